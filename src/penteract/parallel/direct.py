"""Which collectives the ranks of one host do by reading each other's registers, where the layout says so
(`kernels.collectives`): those of tensor and context parallelism that have equal shares."""

from __future__ import annotations

from penteract.config.files.hardware_schema import DIRECT, DIRECTLY
from penteract.config.layout import Layout

KINDS = frozenset(name.removeprefix(DIRECTLY) for name in DIRECT)


def axes(layout: Layout) -> tuple[str, ...]:
    """The axes over which a layout has such collectives: a ring of context parallelism has none."""
    found = (("tp", layout.tp > 1), ("cp", layout.cp > 1 and layout.cp_method != "ring"))
    return tuple(axis for axis, some in found if some and layout.reads_directly)


def timed_as(kind: str, axis: str, layout: Layout, hosts: int) -> str:
    """The name under which measurements have a collective of the tape. `hosts`: over so many its group's ranks are."""
    direct = kind in KINDS and axis in axes(layout) and hosts == 1
    return f"{DIRECTLY}{kind}" if direct else kind
