"""What a newcomer gets: `penteract train --preset llama-3.2-1b` on a GPU, and how soon.

    python benchmarks/default_path.py --out OUT.json [--parts speed,losses,start]

- **speed**: the command as it is, for three steps; then with a batch of 16 sequences, beside the same with settings by hand:
  micro-batches of 1 to 16, the fastest kernels. `share`: the default's tokens per second over the best of those by hand.
- **losses**: steps on text with the default's kernels with two seeds, and with the reference's kernels in plain torch with
  the first. `kernels_apart`, `seeds_apart`: mean absolute difference of the losses, nats a token.
- **start**: seconds from the command to the end of the first step and of the second, for an 8B on two GPUs: with no compiled
  kernel kept from before, and three times again.

Each run is a process of its own, and is written as soon as it is done.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]

from provenance import hexadecimal, provenance
from train_run import TrainRun

PRESET, STEPS, LAST, LIMIT = "llama-3.2-1b", 8, 5, 240.0
AS_IT_IS, BATCH, SIZES = 3, 16, (1, 2, 4, 8, 16)  # steps; sequences of a step; of a micro-batch
REFERENCE = ("--kernels.attention=reference", "--kernels.elementwise=reference", "--kernels.loss=reference",
             "--kernels.fuse=none")  # fmt: skip


class Run(TrainRun):
    """One run whose steps are told of."""

    def __init__(self, folder: Path, words: list[str], last: int, environment: dict[str, str] | None = None) -> None:
        given = os.environ | (environment or {})
        super().__init__(folder, [*words, "--checkpoint.every=0"], last, limit=LIMIT, environment=given)
        if not self.at:
            raise RuntimeError("\n".join(self.lines[-12:]))

    def column(self, name: str) -> list[float]:
        """A metric of all steps."""
        rows = [
            json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines() if line[-1:] == "}"
        ]
        return [row[name] for row in rows if row.get(name) is not None]

    def resolved(self, name: str) -> str:
        """A setting in the run's file; the first of this name."""
        found = re.search(rf"^{name} = (.+?)(?: *#.*)?$", (self.folder / "run.toml").read_text(), re.MULTILINE)
        return found[1] if found else ""


def speed(folder: Path, note: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The default beside settings by hand."""

    def timed(words: list[str], steps: int = STEPS, last: int = LAST) -> tuple[Run, float]:
        run = Run(folder / "run", [*words, f"--training.steps={steps + 1}"], steps)
        return run, median(run.column("perf/tokens_per_sec")[-last:])

    head = [f"--preset={PRESET}"]
    run, rate = timed(head, AS_IT_IS, AS_IT_IS - 1)
    names = ("sequence_length", "global_batch_size", "micro_batch_size", "attention", "elementwise", "fuse", "dtype")
    found: dict[str, Any] = {"default": {"tokens_per_s": round(rate), **{name: run.resolved(name) for name in names}}}
    found["said"] = [line for line in run.lines if "chosen" in line or "micro" in line][:4]
    note(found)
    head += [f"--batch.global_batch_size={BATCH}"]
    small, rate = timed(head)
    found["default, 16 sequences"] = {
        "tokens_per_s": round(rate),
        "micro_batch_size": small.resolved("micro_batch_size"),
    }
    by_hand = dict[str, Any]()
    for size in SIZES:
        words = [f"--batch.micro_batch_size={size}", f"--batch.sequence_length={run.resolved('sequence_length')}",
                 "--precision.dtype=bf16", "--kernels.elementwise=triton",
                 "--kernels.fuse=all", "--kernels.loss=chunked", f"--kernels.attention={run.resolved('attention')[1:-1]}"]  # fmt: skip
        try:
            by_hand[str(size)] = round(timed(head + words)[1])
        except RuntimeError as error:
            by_hand[str(size)] = str(error)[-300:]
        note(found | {"by_hand": by_hand})
    best = max(rate for rate in by_hand.values() if isinstance(rate, int))
    return found | {"by_hand": by_hand, "share": round(rate / best, 4)}


def losses(folder: Path, note: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The default's kernels with two seeds, and the reference's."""
    steps = 200
    head = [f"--preset={PRESET}", f"--training.steps={steps + 1}", "--batch.sequence_length=1024",
            "--batch.global_batch_size=4", "--precision.dtype=bf16"]  # fmt: skip
    kinds = {"default": [], "another seed": ["--training.seed=1"], "reference": list(REFERENCE)}
    curves = dict[str, list[float]]()
    for name, words in kinds.items():
        curves[name] = Run(folder / "run", head + words, steps).column("train/loss")[:steps]
        note({"steps": steps, "curves": curves})
    first = curves["default"]

    def apart(name: str) -> float:
        return round(fmean(abs(x - y) for x, y in zip(first, curves[name], strict=True)), 5)

    return {"steps": steps, "kernels_apart": apart("reference"), "seeds_apart": apart("another seed"),
            "curves": {name: [round(x, 4) for x in curve] for name, curve in curves.items()}}  # fmt: skip


def start(folder: Path, note: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The first steps of an 8B on two GPUs."""
    words = ["--preset=llama-3.1-8b", "--parallel.dp=2", "--parallel.zero=1", "--batch.sequence_length=8192",
             "--batch.micro_batch_size=1", "--batch.global_batch_size=2", "--training.steps=4"]  # fmt: skip
    home = {"TRITON_CACHE_DIR": str(folder / "triton"), "XDG_CACHE_HOME": str(folder / "cache"), "HOME": str(folder),
            "TMPDIR": str(folder)}  # fmt: skip
    found = dict[str, Any]()
    for name in ("cold", "warm", "warm_2", "warm_3"):
        run = Run(folder / "run", words, 2, home)
        found[name] = {"first_step_s": round(run.at[1], 1), "second_step_s": round(run.at.get(2, 0.0), 1)}
        note(found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default="speed,losses,start")
    parser.add_argument("--commit", type=hexadecimal, default="")
    asked = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
    )
    record: dict[str, Any] = {**provenance("python benchmarks/default_path.py", asked.commit), "model": PRESET}
    import torch

    record |= {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }

    def note(found: dict[str, Any]) -> None:
        """Each run is kept as soon as it is done: a call may have to end before a part does."""
        record[name] = found
        asked.out.write_text(json.dumps(record, indent=1) + "\n")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run that is under way ends too
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for name in asked.parts.split(","):
            try:
                note({"speed": speed, "losses": losses, "start": start}[name](Path(folder), note))
            except Exception as error:
                note(record.get(name, {}) | {"failed": str(error)[-1500:]})
            print(name, json.dumps({k: v for k, v in record[name].items() if k != "curves"}), flush=True)


if __name__ == "__main__":
    main()
