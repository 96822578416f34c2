"""A copy of the state that a rank saves, taken while the next step computes.

Master weights and moments change only in the update of their bucket. So their copies leave bucket by bucket beside the
next step, and its update of a bucket waits until that bucket is copied. State on the host is copied by the host, right
before the update of its bucket stores new slices. What changes elsewhere, as the loss scale, is copied at once.

Only what this rank owns is copied, in the dtype in which it is kept: the writer widens it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from penteract.config.precision.policy import MOMENT_BLOCK
from penteract.engine.checkpoint.background.kept_forms import KeptState
from penteract.engine.checkpoint.background.shared_memory import SharedMemory, as_buffer
from penteract.engine.checkpoint.packing import LARGEST_FILE
from penteract.engine.checkpoint.slices import NAMES, Slice
from penteract.engine.device.copies import CopyOut
from penteract.engine.device.device import Device
from penteract.engine.dtypes import dtype_of
from penteract.engine.session.saved import KINDS, HeldBox, HeldBoxes, small_slices
from penteract.engine.state.moments import codebook
from penteract.engine.state.state import Flat, StateKind, TrainingState
from penteract.step.program import Program
from penteract.units import Bytes

_ALIGN = 64  # bytes: each region begins at a multiple


@dataclass(frozen=True, slots=True)
class SnapshotRegion:
    """`source`: elements of the state; their copy begins at byte `at` of the snapshot. `offloaded`: they are on the
    host."""

    source: torch.Tensor
    at: int
    offloaded: bool = False


@dataclass(slots=True)
class SnapshotPlan:
    """What is copied where, and what the writer makes of it.

    buckets  regions of each flat
    small    regions that are copied at once
    entries  rows of the writer's `describe`: name, shape, offset, size, dtype, and a KeptState if this rank owns it
    """

    p: Program
    state: TrainingState
    buckets: list[list[SnapshotRegion]] = field(default_factory=list[list[SnapshotRegion]])
    small: list[SnapshotRegion] = field(default_factory=list[SnapshotRegion])
    entries: list[list[object]] = field(default_factory=list[list[object]])
    size: Bytes = 0
    _at: dict[tuple[int, str, int], int] = field(default_factory=dict[tuple[int, str, int], int])
    _spans: list[list[range]] = field(default_factory=list[list[range]])

    def __post_init__(self) -> None:
        """Plan all of it."""
        boxes, owned = list(self._boxes()), [list[range]() for _ in self.state.flats]
        for number, at, box in boxes:
            if box.owner:
                owned[number].append(range(at, at + box.count))
        for number, flat in enumerate(self.state.flats):
            self._spans.append(_merged(owned[number], MOMENT_BLOCK if flat.scales else 1))
            self.buckets.append(list(self._regions(number, flat)))
        dtype = NAMES[dtype_of("stat", self.p.precision)]
        for suffix, kind in KINDS.items():
            for number, at, box in boxes:
                if self.state.flats[number].kept(kind) is not None:
                    kept = self._kept(number, kind, at, box.count) if box.owner else None
                    self._entry(box.param.name + suffix, box.param.shape, box.start, box.size, dtype, kept)
        for s in small_slices(self.p, self.state):
            self._small(s)

    def _boxes(self) -> Iterator[tuple[int, int, HeldBox]]:
        """The rectangles that this rank holds: the number of the flat, and where in its shard they begin."""
        held = HeldBoxes(self.p)
        for number, q, begin, within in self.state.shard_parts():
            for box in held.of(q, begin, len(within)):
                yield number, within.start + box.at, box

    def _regions(self, number: int, flat: Flat) -> Iterator[SnapshotRegion]:
        sources = dict(flat.optimizer_state)
        if "master" not in sources or flat.splits_master:
            sources["parameter"] = flat.own_parameter
        for name, source in sources.items():
            for span in self._spans[number]:
                part = source[_scaled(span) if name.endswith("/scales") else slice(span.start, span.stop)]
                self._at[number, name, span.start] = self.size
                yield self._region(part, offloaded=flat.bucket.offloaded and name != "parameter")

    def _region(self, source: torch.Tensor, *, offloaded: bool = False) -> SnapshotRegion:
        region = SnapshotRegion(source, self.size, offloaded)
        self.size += -(-source.nbytes // _ALIGN) * _ALIGN
        return region

    def _kept(self, number: int, kind: StateKind, at: int, count: int) -> KeptState:
        """Where elements of a shard lie in the snapshot."""
        flat = self.state.flats[number]
        span = next(s for s in self._spans[number] if s.start <= at < s.stop)
        begin, kept = at - span.start, flat.kept(kind)
        assert kept is not None

        def where(name: str, begin: int, width: int) -> int:
            return self._at[number, name, span.start] + begin * width

        if kind == "master" and flat.splits_master:
            return KeptState("split", where("parameter", begin, 2), count, where("master", begin, 2))
        if kind != "master" and kind in flat.scales:
            block, skip = divmod(begin, MOMENT_BLOCK)
            return KeptState("levels", where(kind, block * MOMENT_BLOCK, 1), count,
                             where(f"{kind}/scales", block, 4), skip, kind != "square")  # fmt: skip
        name = "parameter" if kind == "master" and "master" not in flat.optimizer_state else kind
        return KeptState(NAMES[kept.dtype], where(name, begin, kept.element_size()), count)  # type: ignore[arg-type]

    def _small(self, s: Slice) -> None:
        kept = None
        if s.owner:
            region = self._region(s.tensor)
            self.small.append(region)
            kept = KeptState(NAMES[s.tensor.dtype], region.at, s.tensor.numel())  # type: ignore[arg-type]
        self._entry(s.name, s.shape, s.offset, s.box[1], NAMES[s.tensor.dtype], kept)

    def _entry(self, name: str, *about: object) -> None:
        *rest, kept = about
        self.entries.append([name, *rest, kept.as_json() if isinstance(kept, KeptState) else None])

    def description(self, threads: int = 1) -> bytes:
        """The payload of the writer's `describe`. `threads`: of the writer, to hash and write."""
        levels = {
            str(signed).lower(): codebook(torch.device("cpu"), signed=signed).levels.tolist()
            for signed in (True, False)
        }  # fmt: skip
        about = {"rank": self.p.rank, "threads": threads, "largest": LARGEST_FILE}
        return json.dumps({**about, "levels": levels, "entries": self.entries}).encode()


@dataclass(slots=True)
class Snapshot:
    """The snapshot of one rank in `memory`, which its writer reads.

    `take()` starts the copies. `before_update(bucket)` is called before each update of a bucket. The writer may read
    once all have `arrived`.
    """

    plan: SnapshotPlan
    device: Device
    memory: SharedMemory
    _whole: torch.Tensor = field(init=False)
    _left: dict[int, list[SnapshotRegion]] = field(default_factory=dict[int, list[SnapshotRegion]])  # of the host
    _waits: dict[int, CopyOut] = field(default_factory=dict[int, CopyOut])  # that an update has to wait for
    _under_way: list[CopyOut] = field(default_factory=list[CopyOut])

    def __post_init__(self) -> None:
        """Page-lock the memory, where copies need that."""
        self._whole = torch.frombuffer(as_buffer(self.memory), dtype=torch.uint8)
        self.device.register(self._whole)

    def take(self) -> None:
        """Begin to copy the state as it is after everything that was computed so far."""
        self.settle()  # another rank may have had the last save dropped before all was there
        self._under_way.clear()
        self.device.settle()  # the last updated slices may still be on their way to the host
        small = self._copy(self.plan.small)
        small.wait()
        self._under_way.append(small)
        for number, regions in enumerate(self.plan.buckets):
            if left := [r for r in regions if r.offloaded]:
                self._left[number] = left
            if there := [r for r in regions if not r.offloaded]:
                self._waits[number] = self._copy(there)
                self._under_way.append(self._waits[number])

    def before_update(self, number: int) -> None:
        """The update of bucket `number` may change its state once this has returned and, on a GPU, what was asked for
        so far is done."""
        if (copy := self._waits.pop(number, None)) is not None:
            copy.wait()
        for region in self._left.pop(number, ()):
            self._target(region).copy_(region.source)

    def arrived(self) -> bool:
        """Whether all of it is there."""
        self._under_way = [copy for copy in self._under_way if not copy.arrived()]
        return not self._under_way and not self._left

    def settle(self) -> None:
        """Wait until all of it is there. Called where no update comes that would copy the rest."""
        for number in [*self._left]:
            self.before_update(number)
        for copy in self._under_way:
            copy.settle()

    def _copy(self, regions: list[SnapshotRegion]) -> CopyOut:
        return self.device.copy_out([(r.source, self._target(r)) for r in regions])

    def _target(self, region: SnapshotRegion) -> torch.Tensor:
        source = region.source
        return self._whole[region.at : region.at + source.nbytes].view(source.dtype).view(source.shape)


def _merged(ranges: list[range], block: int) -> list[range]:
    """The ranges, widened to whole blocks, as few as possible."""
    found = list[range]()
    for one in sorted(ranges, key=lambda r: r.start):
        wide = range(one.start // block * block, -(-one.stop // block) * block)
        if found and wide.start <= found[-1].stop:
            found[-1] = range(found[-1].start, max(found[-1].stop, wide.stop))
        else:
            found.append(wide)
    return found


def _scaled(span: range) -> slice:
    """The scales of these elements."""
    return slice(span.start // MOMENT_BLOCK, span.stop // MOMENT_BLOCK)
