"""Plan, train, profile, bench, calibrate and rehearse from Python: values in, values out. On the CPU, in half a minute.

python examples/07_measure.py
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from penteract import bench, calibrate, plan, profile, rehearse, train
from penteract.measure.bench.cases.sweep_question import SweepQuestion

RUN = {
    "model__layers": 1, "batch__sequence_length": 32, "batch__micro_batch_size": 1, "batch__global_batch_size": 2,
    "data__pack_documents": False,
}  # fmt: skip


def main(folder: Path) -> None:
    here = calibrate(folder / "here.toml", budget=1)
    assert here.curves is not None
    print(f"this machine multiplies fp32 at {here.gpu.fp32 * 1e3:.0f} GFLOP/s")

    found = plan("tiny", here, sequence_length=64, batch="4seqs", precision="fp32")
    best = found.best
    print(f"planned: {found.ask.text(best.layout)}, {1e3 * best.time.seconds:.0f} ms a step")

    done = train(preset="tiny", training__steps=4, training__sample_tokens=0, output__folder=folder / "runs", **RUN)
    assert done["steps"] == 4
    print(f"trained: {done['steps']} steps, loss {done['loss_last']:.2f}")

    seen = profile(preset="tiny", gpus=folder / "here.toml", out=folder / "profile", **RUN)
    rows = seen["waterfall"]
    print(
        f"profiled: {seen['step']['measured'] / 1e9:.0f} ms a step, of which {rows[0]['share']:.1%} at the CPU's peak"
    )
    parts = sum(row["picoseconds"] for row in rows if not row["level"])
    assert rows[0]["picoseconds"] + parts == rows[-1]["picoseconds"], "the waterfall sums to the step"

    words = tuple(f"{key.replace('__', '.')}={str(value).lower()}" for key, value in RUN.items())
    grid = {"batch.micro_batch_size": (1, 2)}
    sweep = bench(
        SweepQuestion(name="sizes", preset="tiny", words=words, grid=grid, ranks=1, steps=2, warmup=2), folder / "sweep"
    )
    for row in sweep.rows:
        assert row.result is not None and row.status.state == "done"
        print(f"benched: {row.case.name}, {row.result.measured.tokens_per_s_per_gpu:,.0f} tokens/s")

    played = rehearse(preset="tiny", rank=3, parallel__tp=2, parallel__dp=2, **RUN)
    assert not played.mismatches
    print("rehearsed: rank 3 of 4 finds every peer where it expects one")


if __name__ == "__main__":
    with TemporaryDirectory() as at:
        main(Path(at))
