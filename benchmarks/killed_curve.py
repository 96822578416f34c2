"""A run on text that is killed again and again, and each time goes on with another layout, beside one that nobody kills.

    python benchmarks/killed_curve.py --out OUT.json [--commit HASH] [--model 8b] [--steps 240] [--every 50] [--device cpu]
    python benchmarks/killed_curve.py --out OUT.json --undisturbed dp=2,zero=1 tp=2

Each part of the run goes on until a checkpoint more is committed and some steps have followed; then all its processes
are killed at once. The next part resumes from that checkpoint with the next of `LAYOUTS`. Both runs have the same batches, so the
curve goes on if the losses of both agree at each step, up to what other layouts round otherwise. `apart`: by how many nats they
differ, on average and at most, within each part. Needs two GPUs and 60 GB of disk, with the 8B 200 GB; with four GPUs, the run that
nobody kills has two of its own, and goes on beside the other. `--device cpu` tries it with a tiny model.

`--undisturbed` runs the record's run again with each of these layouts, beside each other, and adds their losses to the record:
how far runs part that nobody kills.
"""

from __future__ import annotations

import argparse
import atexit
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]

import torch
from killed_runs import kill_run, started_run
from provenance import hexadecimal, provenance

from penteract.engine.checkpoint.folder import committed
from run_records import rows_so_far, steps_of

LAYOUTS = ("dp=2,zero=1", "tp=2", "pp=2", "dp=2,zero=3")
AFTER = 5  # steps after a commit, until a run is killed
MODELS = {
    "tiny": ("--preset=tiny", "--batch.sequence_length=128", "--batch.global_batch_size=8", "--batch.micro_batch_size=2"),
    "1b": ("--preset=llama-3.2-1b", "--batch.sequence_length=4096", "--batch.global_batch_size=8", "--batch.micro_batch_size=2"),
    "8b": ("--preset=llama-3-8b", "--batch.sequence_length=8192", "--batch.global_batch_size=4", "--batch.micro_batch_size=1"),
}  # fmt: skip


def words_of(layout: str) -> list[str]:
    """A layout's settings; what it leaves out is 1, or 0 for ZeRO."""
    given = {"dp": "1", "tp": "1", "pp": "1", "zero": "0"} | dict(part.split("=") for part in layout.split(","))
    return [f"--parallel.{key}={value}" for key, value in given.items()]


class Part:
    """One process's share of a run: `words` begin or resume it, and it ends by itself or is killed."""

    def __init__(self, words: Sequence[str], folder: Path, limit: float, gpus: str = "") -> None:
        self.folder, self.begun, self.limit = folder, time.monotonic(), limit
        self.process = started_run(words, gpus)

    def until_saved(self, step: int) -> dict[str, Any]:
        """Kill it AFTER steps after the checkpoint of a step is committed, or at the first step that is later."""
        checkpoints = self.folder / "latest" / "checkpoints"
        while not any(found.step >= step for found in committed(checkpoints)):
            self._alive()
        seen = rows_so_far(self.folder / "latest")
        while rows_so_far(self.folder / "latest") < seen + AFTER:
            self._alive()
        kill_run(self.process)
        last = steps_of(self.folder / "latest")[-1][0]
        return {
            "killed_after_step": last,
            "newest_checkpoint": committed(checkpoints)[0].step,
            "seconds": self._seconds,
        }

    def to_the_end(self, steps: int) -> dict[str, Any]:
        """Wait for its last step. What it would save then is not waited for."""
        while rows_so_far(self.folder / "latest") < steps:
            self._alive()
        found = {"seconds": self._seconds}
        kill_run(self.process)
        return found

    @property
    def _seconds(self) -> float:
        return round(time.monotonic() - self.begun, 1)

    def _alive(self) -> None:
        if self.process.poll() is not None or self._seconds > self.limit:
            kill_run(self.process)
            raise RuntimeError(f"after {self._seconds} s: " + self.process.communicate()[1].decode()[-2000:])
        time.sleep(0.05)


def settings(model: str, device: str, steps: int) -> list[str]:
    """What all runs have in common."""
    return [*MODELS[model], f"--precision.device={device}", f"--training.steps={steps}", "--training.sample_tokens=0",
            "--training.validation_every=0"]  # fmt: skip


def curves(
    at: Path, given: Sequence[str], layouts: Sequence[str], steps: int, every: int, limit: float
) -> dict[str, Any]:
    """Both runs."""
    base = [*given, f"--checkpoint.every={every}", "--checkpoint.keep=1", "--checkpoint.asynchronous=true"]
    killed, whole, parts = at / "killed", at / "whole", list[dict[str, Any]]()
    beside = torch.cuda.device_count() >= 4
    undisturbed = [*given, f"--output.folder={whole}", *words_of(layouts[0])]
    never = Part(undisturbed, whole, len(layouts) * limit, "2,3") if beside else None
    if never is not None:
        atexit.register(kill_run, never.process)
    for number, layout in enumerate(layouts):
        words = [*words_of(layout)]
        words = (
            [f"--resume={(killed / 'latest').resolve()}", *words]
            if number
            else [*base, f"--output.folder={killed}", *words]
        )
        part = Part(words, killed, limit, "0,1" if beside else "")
        last = number == len(layouts) - 1
        parts.append({"layout": layout} | (part.to_the_end(steps) if last else part.until_saved(every * (number + 1))))
        print(parts[-1], flush=True)
    losses = {step: loss for step, loss, _ in steps_of(killed / "latest")}
    ended = (never or Part(undisturbed, whole, limit)).to_the_end(steps)
    expected = {step: loss for step, loss, _ in steps_of(whole / "latest")}
    first = 1
    for part in parts:
        until = part.get("newest_checkpoint", steps)
        apart = [abs(losses[n] - expected[n]) for n in range(first, until + 1)]
        part["apart"], first = {"mean": fmean(apart), "most": max(apart)}, until + 1
    return {"steps": steps, "parts": parts, "whole": ended, "losses": [losses[n] for n in range(1, steps + 1)],
            "losses_of_whole": [expected[n] for n in range(1, steps + 1)]}  # fmt: skip


def again(at: Path, given: Sequence[str], layouts: Sequence[str], steps: int, limit: float) -> list[dict[str, Any]]:
    """Undisturbed runs beside each other, on two GPUs each."""
    folders = [at / f"again{number}" for number in range(len(layouts))]
    parts = list[Part]()
    for number, (folder, layout) in enumerate(zip(folders, layouts, strict=True)):
        gpus = f"{2 * number},{2 * number + 1}" if torch.cuda.is_available() else ""
        parts.append(Part([*given, f"--output.folder={folder}", *words_of(layout)], folder, limit, gpus))
        atexit.register(kill_run, parts[-1].process)
    ended = [part.to_the_end(steps) for part in parts]
    return [{"layout": layout, **end, "losses": [loss for _, loss, _ in steps_of(folder / "latest")][:steps]}
            for layout, folder, end in zip(layouts, folders, ended, strict=True)]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="", type=hexadecimal)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="", choices=["", *MODELS], help="by default 1b, on CPUs tiny")
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, help="of the parts, in turn")
    parser.add_argument("--undisturbed", nargs="+", default=(), help="layouts of runs to add to the record")
    parser.add_argument("--folder", type=Path, default=None, help="where runs lie, for example /dev/shm")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds of a part")
    asked = parser.parse_args()
    old = json.loads(asked.out.read_text()) if asked.undisturbed else None
    model = old["model"] if old else asked.model or ("1b" if asked.device == "cuda" else "tiny")
    given = settings(model, asked.device, old["steps"] if old else asked.steps)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True, dir=asked.folder) as folder:
        if old:
            old["undisturbed"] = again(Path(folder), given, asked.undisturbed, old["steps"], asked.limit)
            asked.out.write_text(json.dumps(old, indent=1) + "\n")
            return
        found = curves(Path(folder), given, asked.layouts, asked.steps, asked.every, asked.limit)
    device = torch.cuda.get_device_name() if asked.device == "cuda" else "cpu"
    words = [word.removeprefix("--") for word in MODELS[model]]
    record = {
        **provenance("python benchmarks/killed_curve.py", asked.commit),
        "device": device,
        "torch": torch.__version__,
        "model": model,
        "run": words,
        **found,
    }
    asked.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record["parts"], indent=1))


if __name__ == "__main__":
    main()
