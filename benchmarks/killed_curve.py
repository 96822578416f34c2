"""A run on text that is killed again and again, and each time goes on with another layout, beside one that nobody kills.

    python benchmarks/killed_curve.py --out OUT.json [--commit HASH] [--steps 240] [--every 50] [--device cpu]

Each part of the run goes on until a checkpoint more is committed and some steps have followed; then all its processes
are killed at once. The next part resumes from that checkpoint with the next of `LAYOUTS`. Both runs have the same batches, so the
curve goes on if the losses of both agree at each step, up to what other layouts round otherwise. `apart`: by how many nats they
differ, on average and at most, within each part. Needs two GPUs and 60 GB of disk; with four, the run that nobody kills has two of
its own, and goes on beside the other. `--device cpu` tries it with a tiny model.
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
MODEL = {
    "cuda": ("--preset=llama-3.2-1b", "--batch.sequence_length=4096", "--batch.global_batch_size=8", "--batch.micro_batch_size=2"),
    "cpu": ("--preset=tiny", "--batch.sequence_length=128", "--batch.global_batch_size=8", "--batch.micro_batch_size=2"),
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

    def to_the_end(self) -> dict[str, Any]:
        """Wait for it."""
        _, said = self.process.communicate(timeout=self.limit)
        if self.process.returncode:
            raise RuntimeError(said.decode()[-2000:])
        return {"seconds": self._seconds}

    @property
    def _seconds(self) -> float:
        return round(time.monotonic() - self.begun, 1)

    def _alive(self) -> None:
        if self.process.poll() is not None or self._seconds > self.limit:
            kill_run(self.process)
            raise RuntimeError(f"after {self._seconds} s: " + self.process.communicate()[1].decode()[-2000:])
        time.sleep(0.01)


def curves(at: Path, device: str, steps: int, every: int, limit: float) -> dict[str, Any]:
    """Both runs."""
    base = [*MODEL[device], f"--precision.device={device}", f"--training.steps={steps}", f"--checkpoint.every={every}",
            "--checkpoint.keep=1", "--checkpoint.asynchronous=true", "--training.sample_tokens=0",
            "--training.validation_every=0"]  # fmt: skip
    killed, whole, parts = at / "killed", at / "whole", list[dict[str, Any]]()
    beside = device == "cuda" and torch.cuda.device_count() >= 4
    undisturbed = [*base, f"--output.folder={whole}", *words_of(LAYOUTS[0])]
    never = Part(undisturbed, whole, len(LAYOUTS) * limit, "2,3") if beside else None
    if never is not None:
        atexit.register(kill_run, never.process)
    for number, layout in enumerate(LAYOUTS):
        words = [*words_of(layout)]
        words = (
            [f"--resume={(killed / 'latest').resolve()}", *words]
            if number
            else [*base, f"--output.folder={killed}", *words]
        )
        part = Part(words, killed, limit, "0,1" if beside else "")
        last = number == len(LAYOUTS) - 1
        parts.append({"layout": layout} | (part.to_the_end() if last else part.until_saved(every * (number + 1))))
        print(parts[-1], flush=True)
    losses = {step: loss for step, loss, _ in steps_of(killed / "latest")}
    ended = (never or Part(undisturbed, whole, limit)).to_the_end()
    expected = {step: loss for step, loss, _ in steps_of(whole / "latest")}
    first = 1
    for part in parts:
        until = part.get("newest_checkpoint", steps)
        apart = [abs(losses[n] - expected[n]) for n in range(first, until + 1)]
        part["apart"], first = {"mean": fmean(apart), "most": max(apart)}, until + 1
    return {"steps": steps, "parts": parts, "whole": ended, "losses": [losses[n] for n in range(1, steps + 1)],
            "losses_of_whole": [expected[n] for n in range(1, steps + 1)]}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="", type=hexadecimal)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds of a part")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        found = curves(Path(folder), asked.device, asked.steps, asked.every, asked.limit)
    device = torch.cuda.get_device_name() if asked.device == "cuda" else "cpu"
    words = [word.removeprefix("--") for word in MODEL[asked.device]]
    record = {
        **provenance("python benchmarks/killed_curve.py", asked.commit),
        "device": device,
        "torch": torch.__version__,
        "run": words,
        **found,
    }
    asked.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record["parts"], indent=1))


if __name__ == "__main__":
    main()
