"""A run that is killed again and again, and each time goes on with another layout, beside runs that nobody kills.

    python benchmarks/killed_curve.py --out OUT.json [--commit HASH] [--model 8b] [--steps 240] [--every 50] [--device cpu]
    python benchmarks/killed_curve.py --out OUT.json --undisturbed dp=2,zero=1 tp=2

Each part of the run goes on until a checkpoint more is committed and some steps have followed; then all its processes
are killed at once. The next part resumes from that checkpoint with the next of `--layouts`. `--undisturbed` runs the record's run
once more with each of these layouts, as many beside each other as there are GPUs for, and adds their losses to the record. All have
the same batches, so the curve goes on if the losses of the killed run part from those of the first undisturbed one by no more than
those of other undisturbed ones do. `apart`: by how many nats, on average and at most, within each part.

Where there are GPUs for two runs, an undisturbed one with the first layout goes on beside the killed one. Needs 60 GB of disk, with
the 8B 200 GB. `--device cpu` tries it with a tiny model.
"""

from __future__ import annotations

import argparse
import atexit
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from math import prod
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
    "8b": ("--preset=llama-3-8b", "--batch.sequence_length=8192", "--batch.global_batch_size=8", "--batch.micro_batch_size=1"),
}  # fmt: skip


def words_of(layout: str) -> list[str]:
    """A layout's settings; what it leaves out is 1, or 0 for ZeRO."""
    given = {"dp": "1", "tp": "1", "pp": "1", "zero": "0"} | dict(part.split("=") for part in layout.split(","))
    return [f"--parallel.{key}={value}" for key, value in given.items()]


def world(layout: str) -> int:
    """Ranks of a layout."""
    return prod(int(value) for key, value in (part.split("=") for part in layout.split(",")) if key != "zero")


def gpus_of(number: int, layout: str) -> str:
    """GPUs of run number so and so of those beside each other; "": this machine's, where it has none to choose from."""
    if torch.cuda.device_count() < 2 * world(layout):
        return ""
    return ",".join(str(world(layout) * number + at) for at in range(world(layout)))


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
            if self.process.poll() is None or rows_so_far(self.folder / "latest") < steps:  # it may have just ended
                self._alive()
        if self.process.poll():
            self._alive()  # with an error
        found = {"seconds": self._seconds}
        kill_run(self.process)
        return found

    def losses(self, steps: int) -> list[float]:
        """Of the run's steps until now, those before this part too."""
        found = {step: loss for step, loss, _ in steps_of(self.folder / "latest")}
        return [found[step] for step in range(1, steps + 1)]

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


def batched(every: Iterable[Any], n: int) -> Iterator[list[Any]]:
    """n at a time: Python 3.12 has it."""
    left = iter(every)
    while some := list(islice(left, n)):
        yield some


def undisturbed(at: Path, given: Sequence[str], layouts: Sequence[str], steps: int, limit: float) -> Iterator[Any]:
    """Runs that nobody kills: as many at a time as there are GPUs for."""
    for some in batched(enumerate(layouts), max(1, torch.cuda.device_count() // world(layouts[0]))):
        parts = list[tuple[str, Part]]()
        for number, layout in some:
            folder, gpus = at / f"undisturbed{number}", gpus_of(len(parts), layout)
            part = Part([*given, f"--output.folder={folder}", *words_of(layout)], folder, limit, gpus)
            atexit.register(kill_run, part.process)
            parts.append((layout, part))
        for layout, part in parts:
            yield {"layout": layout, **part.to_the_end(steps), "losses": part.losses(steps)}


def killed(
    at: Path, given: Sequence[str], layouts: Sequence[str], steps: int, every: int, limit: float
) -> Iterator[dict[str, Any]]:
    """The run that is killed: its parts and losses until now, after each part; at last those of one beside it too."""
    folder, parts = at / "killed", list[dict[str, Any]]()
    base = [*given, f"--checkpoint.every={every}", "--checkpoint.keep=1", "--checkpoint.asynchronous=true"]
    beside = torch.cuda.device_count() >= 2 * world(layouts[0])
    whole = [*given, f"--output.folder={at / 'whole'}", *words_of(layouts[0])]
    other = Part(whole, at / "whole", len(layouts) * limit, gpus_of(1, layouts[0])) if beside else None
    if other is not None:
        atexit.register(kill_run, other.process)
    for number, layout in enumerate(layouts):
        begin = [f"--resume={(folder / 'latest').resolve()}"] if number else [*base, f"--output.folder={folder}"]
        part = Part([*begin, *words_of(layout)], folder, limit, gpus_of(0, layout))
        last = number == len(layouts) - 1
        parts.append({"layout": layout} | (part.to_the_end(steps) if last else part.until_saved(every * (number + 1))))
        print(parts[-1], flush=True)
        until = parts[-1].get("newest_checkpoint", steps)
        yield {"parts": parts, "losses": part.losses(until), "undisturbed": []}
    if other is not None:
        yield {"undisturbed": [{"layout": layouts[0], **other.to_the_end(steps), "losses": other.losses(steps)}]}


def compare(record: dict[str, Any]) -> None:
    """How far the killed run and others are from the first undisturbed one."""
    if not record["undisturbed"]:
        return
    (first, *others), begin = record["undisturbed"], 0
    for part in record["parts"]:
        end = part.get("newest_checkpoint", record["steps"])
        part["apart"], begin = apart(record["losses"][begin:end], first["losses"][begin:end]), end
    for other in others:
        other["apart"] = apart(other["losses"], first["losses"])


def apart(some: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """On average and at most."""
    nats = [abs(a - b) for a, b in zip(some, others, strict=True)]
    return {"mean": fmean(nats), "most": max(nats)}


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
    if len({world(layout) for layout in (asked.undisturbed or asked.layouts)}) > 1:
        parser.error("all layouts have as many ranks: runs beside each other have GPUs by their number")
    record = json.loads(asked.out.read_text()) if asked.undisturbed else new_record(asked)
    given = settings(record["model"], asked.device, record["steps"])
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True, dir=asked.folder) as folder:
        if asked.undisturbed:
            for run in undisturbed(Path(folder), given, asked.undisturbed, record["steps"], asked.limit):
                record["undisturbed"].append(run)
                write(asked.out, record)
        else:
            for found in killed(Path(folder), given, asked.layouts, asked.steps, asked.every, asked.limit):
                write(asked.out, record := record | found)


def new_record(asked: argparse.Namespace) -> dict[str, Any]:
    """What a record begins with."""
    model = asked.model or ("1b" if asked.device == "cuda" else "tiny")
    return {
        **provenance("python benchmarks/killed_curve.py", asked.commit),
        "device": torch.cuda.get_device_name() if asked.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "model": model,
        "run": [word.removeprefix("--") for word in MODELS[model]],
        "steps": asked.steps,
    }


def write(out: Path, record: dict[str, Any]) -> None:
    """Write it, with what differs, and say that."""
    compare(record)
    out.write_text(json.dumps(record, indent=1) + "\n")
    print([part.get("apart") for part in (*record["parts"], *record["undisturbed"])], flush=True)


if __name__ == "__main__":
    main()
