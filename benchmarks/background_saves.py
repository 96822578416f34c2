"""How long a save keeps a CPU rank from training: in the background, beside a save that it waits for.

    python benchmarks/background_saves.py [--hidden N] [--saves N]

Both kinds of saves in turns, in one run on one rank, between steps of training. Writes results/background_saves.json:
ratios, because seconds are those of one machine. The first save in the background also starts the writer.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from provenance import provenance

from penteract.config.resolve.resolved_run import resolve
from penteract.engine.rank.rank import Rank
from penteract.engine.session.background.background_saves import BackgroundSaves
from penteract.engine.session.saved import saved_bytes, state_slices
from penteract.engine.session.session import Session, SessionOptions
from penteract.units import MIB

RESULT = Path(__file__).parent / "results" / "background_saves.json"


def opened(folder: Path, hidden: int) -> Session:
    """A run of one rank on the CPU whose state is large beside its step."""
    words = [
        f"--output.folder={folder}", "--training.sample_tokens=0", "--training.validation_every=0",
        "--batch.sequence_length=64", "--batch.global_batch_size=1", "--batch.micro_batch_size=1",
        f"--model.hidden_size={hidden}", f"--model.head_size={hidden // 8}", f"--model.ffn_size={4 * hidden}",
        "--training.steps=100", "--checkpoint.every=1", "--checkpoint.asynchronous=true", "--precision.device=cpu",
    ]  # fmt: skip
    made = Session(resolve(None, "tiny", words, world=1).run, Rank(0, 1, torch.device("cpu"), None),
                   SessionOptions(folder))  # fmt: skip
    made.open()
    return made


def timed(session: Session, background: BackgroundSaves | None, step: int) -> float:
    """Seconds that a save of `step` keeps the rank."""
    trainer, at = session.trainer, time.perf_counter()
    if background is not None:
        background.start(step, {"step": step})
    else:
        session.checkpoints.save(step, state_slices(trainer.program, trainer.state), {"step": step})
    return time.perf_counter() - at


def measured(saves: int, hidden: int) -> dict[str, Any]:
    """Seconds of saves of both kinds in turns, after one of each that is not counted."""
    rows: dict[str, list[float]] = {"at once": [], "in the background": [], "step beside one": [], "step": []}
    with tempfile.TemporaryDirectory() as folder:
        session = opened(Path(folder), hidden)
        assert session.saver.background is not None
        step = 0
        for turn in range(saves + 1):
            for kind in ("at once", "in the background"):
                step += 1
                session.trainer.step(step, session.train, 0)
                background = session.saver.background if kind != "at once" else None
                seconds = timed(session, background, step)
                step += 1
                at = time.perf_counter()
                session.trainer.step(step, session.train, 0)
                beside = time.perf_counter() - at
                session.saver.background.finish()
                if turn:
                    rows[kind].append(seconds)
                    rows["step" if background is None else "step beside one"].append(beside)
        session.checkpoints.close()
        session.saver.background.close()
        size = saved_bytes(session.trainer.program)
    once, later, alone, beside = (median(rows[n]) for n in ("at once", "in the background", "step", "step beside one"))
    return {
        "checkpoint_mib": round(size / MIB, 1), "saves": saves, "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 1),
        "seconds": {name: [round(x, 4) for x in values] for name, values in rows.items()},
        "save_returns_after": round(later / once, 4), "asked": 0.15,
        "step_beside_a_save": round(beside / alone, 3),
    }  # fmt: skip


def main() -> None:
    """Measure, and write the record."""
    parser = argparse.ArgumentParser(description="Saves in the background beside saves at once, on a CPU.")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--saves", type=int, default=7)
    asked = parser.parse_args()
    torch.set_grad_enabled(False)
    record = {**provenance("python benchmarks/background_saves.py"), **measured(asked.saves, asked.hidden)}
    RESULT.write_text(json.dumps(record, indent=1) + "\n")
    print(f"save returns after {record['save_returns_after']:.1%} of a save at once")


if __name__ == "__main__":
    main()
