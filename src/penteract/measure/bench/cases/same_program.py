"""Which runs of a sweep are one program: a setting may change nothing, such as ZeRO 1 on one rank."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, fields, replace
from hashlib import sha256

from penteract.config.layout import Layout
from penteract.config.rules.case import KEYS
from penteract.config.run import RunSpec
from penteract.step.program import compile_run

# Other settings choose kernels too, which a program does not have; degrees are other ranks.
_DEGREES = ("dp", "tp", "pp", "cp", "ep")
_SETTINGS = [f.name for f in fields(Layout) if KEYS[f.name].startswith("parallel.") and f.name not in _DEGREES]


@dataclass(slots=True)
class SamePrograms:
    """Finds runs that are the program of an earlier one. Those that differ in a kernel are never the same."""

    _earlier: dict[RunSpec, list[tuple[str, RunSpec, int]]] = field(
        default_factory=lambda: defaultdict[RunSpec, list[tuple[str, RunSpec, int]]](list)
    )
    _digests: dict[RunSpec, bytes] = field(default_factory=dict[RunSpec, bytes])

    def of(self, name: str, run: RunSpec, allocated_bytes: int) -> str:
        """The name of an earlier run that is the same program by other settings. "": there is none, and this one is
        kept. Bytes are predicted of each run anyway: only programs of as many are compared."""
        alike = replace(run, layout=run.layout.put(**{name: getattr(Layout(), name) for name in _SETTINGS}))
        for other, its_run, its_bytes in self._earlier[alike]:
            if its_bytes == allocated_bytes and its_run != run and self._digest(its_run) == self._digest(run):
                return other
        self._earlier[alike].append((name, run, allocated_bytes))
        return ""

    def _digest(self, run: RunSpec) -> bytes:
        if run not in self._digests:
            self._digests[run] = digest(run)
        return self._digests[run]


def digest(run: RunSpec) -> bytes:
    """Of what one rank of each pipeline stage does in a step, not of the settings that it was made of. Values of a tape
    are equal to themselves alone, so their text is taken."""
    found = sha256()
    for rank in range(0, run.layout.world, run.layout.world // run.layout.pp):
        program = compile_run(run, rank)
        found.update(repr([getattr(program, f.name) for f in fields(program) if f.name != "mesh"]).encode())
    return found.digest()
