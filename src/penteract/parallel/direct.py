"""Which collectives the ranks of one host do by reading each other's registers, where the layout says so
(`kernels.collectives`): those of tensor and context parallelism that have equal shares."""

from __future__ import annotations

from penteract.config.files.hardware_schema import DIRECT, DIRECTLY
from penteract.config.layout import Layout

AXES = ("tp", "cp")
KINDS = frozenset(name.removeprefix(DIRECTLY) for name in DIRECT)


def timed_as(kind: str, axis: str, layout: Layout, hosts: int) -> str:
    """The name under which measurements have a collective of the tape. `hosts`: over so many its group's ranks are."""
    direct = kind in KINDS and axis in AXES and layout.reads_directly and hosts == 1
    return f"{DIRECTLY}{kind}" if direct else kind
