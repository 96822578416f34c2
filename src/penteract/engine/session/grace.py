"""Whether a run can save in the time that a scheduler gives it to stop."""

from __future__ import annotations

from dataclasses import dataclass

from penteract.units import show_seconds

RATE = 0.5e9  # bytes a second that a rank hashes and writes, until a save was measured: a modest disk


@dataclass(slots=True)
class Grace:
    """`limit`: seconds between a request to stop and the kill (`--grace`). `size`: bytes that a rank saves.
    `saved`: seconds of the last save; 0: none yet. `saves`: how many a stop may wait for: its own, and one that may be
    under way in the background."""

    limit: float
    size: float
    saved: float = 0.0
    warned: bool = False
    saves: int = 1

    def line(self, step: float) -> str:
        """What to say where a step of `step` seconds and the saves take longer than the limit: once, else ""."""
        save = self.saved or self.size / RATE
        stop = step + self.saves * save
        if self.warned or stop <= self.limit:
            return ""
        self.warned = True
        basis = "measured" if self.saved else f"at {RATE / 1e9:g} GB/s a rank"
        each = f"a save {show_seconds(save)} ({basis})" + ", and as long for one under way" * (self.saves > 1)
        return (
            f"a stop takes about {show_seconds(stop)}: a step {show_seconds(step)}, {each}; more than "
            f"--grace {self.limit:g} s, so a scheduler may kill the run before it has saved: give it more time "
            "(Slurm's KillWait or --signal=USR1@SECONDS), or set checkpoint.every"
        )
