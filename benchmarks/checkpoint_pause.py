"""Checkpoints on one GPU: what a save costs training, beside torch.distributed.checkpoint; and whether nothing is lost.

    python benchmarks/checkpoint_pause.py --out OUT.json [--parts kills,equal,pauses] [--seconds 150] [--folder DIR]

- **kills**: a small run with saves in the background is killed and resumed; beside it one that nothing disturbs. All
  steps and the last checkpoint must be bitwise equal: with the fastest kernels, and with the reference's attention.
- **equal**: one state is saved at once, then in the background while the run trains on. All files must be equal.
- **pauses**: saves of four kinds in turns while a 1B model trains: ours and torch's, each at once and in the background.
  The first of each in the background is not counted: it starts processes and page-locks memory.

A save is under way until its files are on the disk and, of ours, have been read back. `pause_s`: what the training steps
of that time and the call took longer than as many undisturbed steps. The record is written after each save, and when
the time is up. `--device cpu --model tiny` tries the script without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]

import torch
from checkpoint_kinds import Ours, Run, Saves, Torch, differing_files, summary
from killed_runs import killed_and_resumed
from measuring import run_parts
from provenance import hexadecimal, provenance

UNDISTURBED = 12  # steps that are timed before each round
PROBE = 2**30  # bytes


class TimeIsUp(BaseException):
    """The record says how far it went."""


def disk_speed(folder: Path) -> float:
    """GB/s of a file that is written and synced."""
    block, at, begun = os.urandom(2**24), folder / "probe", time.perf_counter()
    with at.open("wb", buffering=0) as file:
        for _ in range(PROBE // len(block)):
            file.write(block)
        os.fsync(file.fileno())
    took = time.perf_counter() - begun
    at.unlink()
    return PROBE / took / 1e9


class Pauses:
    """The saves of all kinds. `record` is filled on the way; `note()` writes it."""

    def __init__(self, asked: argparse.Namespace, until: float, record: dict[str, Any], note: Any) -> None:
        self.folder, self.asked, self.until, self.record, self.note = Path(asked.folder), asked, until, record, note

    def __call__(self) -> dict[str, Any]:
        """Equality first, then as many rounds as the time allows."""
        record, begun = self.record, time.perf_counter()
        run = Run(self.folder / "run", self.asked.model, self.asked.device, self.asked.step_tokens)
        record |= {"opened_s": round(time.perf_counter() - begun, 2), "disk_gb_s": round(disk_speed(self.folder), 2)}
        run.undisturbed(4)  # kernels are compiled
        layout = asdict(run.session.spec.layout)
        record["layout"] = {name: layout[name] for name in ("attention", "elementwise", "loss", "micro_batch_size")}
        if "equal" in self.asked.parts.split(","):
            record["equal"] = self._equal(run)
            self.note()
        if "pauses" not in self.asked.parts.split(","):
            run.session.saver.close()
            return {"took_s": round(time.perf_counter() - begun, 1)}
        theirs = Torch(run)
        record |= {"checkpoint_bytes": theirs.bytes, "torch_staging": theirs.in_the_background.staging}
        kinds: dict[str, Saves] = {
            "at once": Ours(run, background=False), "in the background": Ours(run, background=True),
            "torch, at once": theirs.at_once, "torch, in the background": theirs.in_the_background,
        }  # fmt: skip
        self._one(run, "torch, in the background", kinds, counted=False)
        for number in range(self.asked.rounds):
            round_begun = time.monotonic()
            for name in kinds if number % 2 == 0 else reversed(kinds):
                record["undisturbed_steps_s"].append(round(run.undisturbed(UNDISTURBED), 5))
                self._one(run, name, kinds)
            took = time.monotonic() - round_begun
            if time.monotonic() + 1.1 * took > self.until:
                break
        theirs.in_the_background.close()
        run.session.saver.close()
        return {"took_s": round(time.perf_counter() - begun, 1)}

    def _equal(self, run: Run) -> dict[str, Any]:
        """One state, saved both ways; the run trains on while the second is written."""
        once, later = Ours(run, background=False), Ours(run, background=True)
        folders, before = [self.folder / "once", self.folder / "later"], run.number
        once.begin(folders[0])
        later.begin(folders[1])
        while not later.is_durable():
            run.step()
        run.settle()
        steps, found = run.number - before, differing_files(*folders)
        while once.is_under_way() or later.is_under_way():
            run.step()
        run.settle()
        for at in folders:
            shutil.rmtree(at)
        return {"steps_meanwhile": steps, **found}

    def _one(self, run: Run, name: str, kinds: dict[str, Saves], *, counted: bool = True) -> None:
        """One save of a kind, with the steps beside it."""
        at, kind, before = self.folder / "save", kinds[name], run.number
        begun = time.perf_counter()
        kind.begin(at)
        returned = time.perf_counter() - begun
        durable = returned if kind.is_durable() else 0.0
        while kind.is_under_way() or not durable:
            run.step()
            if not durable and kind.is_durable():
                durable = time.perf_counter() - begun
        run.settle()
        total = time.perf_counter() - begun
        shutil.rmtree(at)
        row = {"returns_s": returned, "durable_s": durable, "under_way_s": total, "steps": run.number - before}
        if counted:
            self.record["saves"].setdefault(name, []).append({k: round(v, 4) for k, v in row.items()})
        self.note()


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="What saving checkpoints costs on one GPU.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default="kills,equal,pauses")
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--rounds", type=int, default=9, help="at most")
    parser.add_argument("--folder", help="where checkpoints are written; by default where temporary files are")
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--step-tokens", type=int, default=16_384, help="tokens of a step")
    parser.add_argument("--commit", type=hexadecimal, default="")
    return parser.parse_args()


def main() -> None:
    """Run the parts, and write the record whatever happens."""
    asked, begun = parsed(), time.monotonic()
    until = begun + asked.seconds - 4
    torch.set_grad_enabled(False)
    record: dict[str, Any] = {
        **provenance("python benchmarks/checkpoint_pause.py", asked.commit), "model": asked.model,
        "tokens_a_step": asked.step_tokens, "torch": torch.__version__, "load_average": round(os.getloadavg()[0], 1),
        "device": torch.cuda.get_device_name() if asked.device == "cuda" else asked.device, "undisturbed_steps_s": [], "saves": {},
    }  # fmt: skip

    def note() -> None:
        if record["saves"]:
            record["medians"] = summary(record["saves"], record["undisturbed_steps_s"])
        record["seconds"] = round(time.monotonic() - begun, 1)
        asked.out.write_text(json.dumps(record, indent=1) + "\n")

    def up(*_: Any) -> None:
        raise TimeIsUp

    signal.signal(signal.SIGALRM, up)
    signal.setitimer(signal.ITIMER_REAL, max(1.0, until - begun))
    try:
        with tempfile.TemporaryDirectory(dir=asked.folder, ignore_cleanup_errors=True) as folder:
            asked.folder = folder
            names = dict.fromkeys("pauses" if name == "equal" else name for name in asked.parts.split(","))  # one run
            parts = {"kills": lambda: killed_and_resumed(Path(folder) / "kills", asked.device),
                     "pauses": Pauses(asked, until, record, note)}  # fmt: skip
            for name in names:
                record |= run_parts(name, {name: parts[name]})
                note()
    except TimeIsUp:
        record["ended_early"] = True
    note()
    print(json.dumps({name: record.get(name) for name in ("kills", "equal", "medians", "ended_early", "seconds")}))
    sys.stdout.flush()
    os._exit(0)  # a thread or a process of a save may be under way


if __name__ == "__main__":
    main()
