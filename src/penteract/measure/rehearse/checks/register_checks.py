"""Are registers read while they live, freed once, and apart from each other in the arena?"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from penteract.engine.executor.registers import Key, Registers
from penteract.measure.rehearse.findings import Findings
from penteract.ops.tape import Call
from penteract.step.program import BufferKey

Interval = tuple[int, int, Key]  # begin and end in the arena


@dataclass(slots=True)
class RegisterChecks:
    """Follows the registers of one rank through its first step, in which each is made.

    freed   register -> what freed it
    coming  registers that a collective, a message or a copy has not filled yet
    """

    registers: Registers
    block: torch.Tensor | None  # of the arena
    findings: Findings
    freed: dict[Key, str] = field(default_factory=dict[Key, str])
    coming: dict[Key, str] = field(default_factory=dict[Key, str])
    made_by: dict[Key, str] = field(default_factory=dict[Key, str])
    live: list[Interval] = field(default_factory=list[Interval])
    _at: dict[Key, Interval] = field(default_factory=dict[Key, Interval])

    def read(self, buffer: BufferKey, call: Call, by: str) -> None:
        """Before a call: what it reads is alive and complete."""
        inputs = self.registers.p.chunks[buffer[0]].inputs
        for r in call.ins:
            key = (buffer, r)
            if r in inputs:
                continue
            if key not in self.registers.values:
                last = self.freed.get(key)
                raise self.findings.stop(
                    "FREED", f"{by} reads register {r}, " + (f"freed after {last}" if last else "which nothing made")
                )
            if key in self.coming and call.phase != "finish":
                self.findings.add("WAIT", f"{by} reads register {r} while {self.coming[key]} still fills it")

    def wrote(self, buffer: BufferKey, registers: Sequence[int], by: str) -> None:
        """After a call: what it made is apart from what lives."""
        for r in registers:
            key = (buffer, r)
            self.made_by[key] = by
            self.freed.pop(key, None)
            x: Any = self.registers.values.get(key)
            if isinstance(x, torch.Tensor) and x.nbytes and self._in_arena(x):
                self._place(key, x, by)

    def _in_arena(self, x: torch.Tensor) -> bool:
        return self.block is not None and x.untyped_storage()._cdata == self.block.untyped_storage()._cdata

    def _place(self, key: Key, x: torch.Tensor, by: str) -> None:
        begin = int(x.storage_offset()) * x.element_size()
        mine = (begin, begin + x.nbytes, key)
        i = bisect_left(self.live, (begin,))  # type: ignore[arg-type]
        for other in self.live[max(0, i - 1) : i + 1]:
            if other[0] < mine[1] and mine[0] < other[1]:
                self.findings.add("ARENA", f"register {key[1]} of {by} lies over register {other[2][1]} of "
                                  f"{self.made_by[other[2]]}, which lives", once="overlap")  # fmt: skip
        insort(self.live, mine)
        self._at[key] = mine

    def free(self, buffer: BufferKey, registers: Sequence[int], after: str) -> None:
        """Before registers are freed."""
        for r in registers:
            key = (buffer, r)
            if key not in self.registers.values:
                last = self.freed.get(key, "nothing made it")
                raise self.findings.stop("FREED", f"register {r} is freed twice: after {last}, and after {after}")
            if key in self.coming:
                self.findings.add("WAIT", f"register {r} is freed while {self.coming[key]} still fills it")
            self.freed[key] = after
            if (mine := self._at.pop(key, None)) is not None:
                del self.live[bisect_left(self.live, mine)]

    def end(self) -> None:
        """After a step nothing is left."""
        for key in self.registers.values:
            (_, micro), r = key
            by = self.made_by.get(key, "nothing")
            self.findings.add("KEPT", f"register {r} of micro-batch {micro} is never freed, of {by}", "the step's end",
                              once="kept")  # fmt: skip
        for key, what in self.coming.items():
            self.findings.add("WAIT", f"{what} is never waited for", "the step's end", once=str(key))
