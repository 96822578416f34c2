"""Memory of the pipeline ranks of a layout: the sums of their stages and of their buckets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penteract.config.layout import Layout
from penteract.readings.buckets.planned import BucketMemory, StageGroups
from penteract.readings.composed import Composer
from penteract.readings.layers.reads import Memos, tracked
from penteract.readings.memory.memory_bound import Growths, MemoryBound
from penteract.readings.price import input_bytes
from penteract.units import Bytes


class RankMemory(NamedTuple):
    """Bytes by kind of the fullest pipeline rank, the total of each rank, and the most that any rank has on the
    host."""

    kinds: Mapping[str, Bytes]
    by_pp_rank: tuple[Bytes, ...]
    host: Bytes

    @property
    def allocated(self) -> Bytes:
        """Bytes that the fullest pipeline rank allocates."""
        return max(self.by_pp_rank)


class Least(NamedTuple):
    """A lower bound of memory for any micro-batch size.

    For each group of pipeline ranks with the same stages: bytes between steps (`resident`), and what one micro-batch
    keeps per sequence (`growth`).
    """

    resident: tuple[Bytes, ...]
    growth: Growths

    def total(self, per_sequence: Sequence[Bytes], size: int) -> Bytes:
        """A lower bound of the bytes on the fullest rank, with `size` sequences in a micro-batch; each group keeps
        `per_sequence` bytes for each of them."""
        return most(self.resident, per_sequence, size)


def most(resident: Sequence[Bytes], per_sequence: Sequence[Bytes], size: int) -> Bytes:
    """The same, of the bytes between steps."""
    return max([held + size * kept for held, kept in zip(resident, per_sequence, strict=True)])


class _OutsideBuckets(NamedTuple):
    """Memory outside of buckets: the arena and routed registers, of each rank; input data, workspace and bytes on the
    host, of each group of ranks with the same stages."""

    activations: tuple[Bytes, ...]
    data: tuple[Bytes, ...]
    workspace: tuple[Bytes, ...]
    host: tuple[Bytes, ...]


@dataclass(slots=True)
class MemoryReading:
    """Memory of the ranks of one model's layouts. Sums that layouts share are computed once."""

    composer: Composer
    floor: MemoryBound = field(init=False)
    memos: Memos = field(default_factory=Memos)

    def __post_init__(self) -> None:
        """Make the lower bound over the same composer."""
        self.floor = MemoryBound(self.composer)

    def of(self, layout: Layout) -> RankMemory:
        """Memory of all pipeline ranks."""
        assignment, rest, states = self.composer.assignment(layout), self._outside(layout), self._states(layout)
        fixed = [
            s.resident + data + max(workspace, s.largest)
            for s, data, workspace in zip(states, rest.data, rest.workspace, strict=True)
        ]
        by_pp_rank = tuple([a + fixed[g] for a, g in zip(rest.activations, assignment.group, strict=True)])
        r = max(range(layout.pp), key=by_pp_rank.__getitem__)
        g = assignment.group[r]
        other = rest.data[g] + max(rest.workspace[g], states[g].largest) + states[g].ring_buffer
        kinds = {**states[g].held, "activations": rest.activations[r], "other": other}
        return RankMemory(kinds, by_pp_rank, max([n + s.host for n, s in zip(rest.host, states, strict=True)]))

    def least(self, layout: Layout) -> Least:
        """The lower bound. Layouts that differ only in the micro-batch size have the same."""
        return Least(self.resident(layout), self.floor.growth(layout))

    def resident(self, layout: Layout) -> tuple[Bytes, ...]:
        """Bytes between steps of each group of pipeline ranks with the same stages."""
        return tuple([s.resident for s in self._states(layout)])

    def at_least(self, layout: Layout, least: Least) -> Bytes:
        """A lower bound of what the fullest rank allocates, from the `least` of its layout."""
        return least.total(self.floor.per_sequence(layout, least.growth), layout.micro_batch_size)

    def _states(self, layout: Layout) -> list[BucketMemory]:
        """Bucket memory of each group of pipeline ranks with the same stages."""
        return self._states_of(layout, self.composer.bucket_planner.groups(layout))

    @tracked
    def _states_of(self, layout: Layout, groups: StageGroups) -> list[BucketMemory]:
        bucket_planner, each = self.composer.bucket_planner, zip(groups.joined, groups.ranks, strict=True)
        return [
            bucket_planner.state(layout, runs, ranks[0] if bucket_planner.shares(runs) else 0) for runs, ranks in each
        ]

    @tracked
    def _outside(self, layout: Layout) -> _OutsideBuckets:
        lay = layout
        activations, data, workspace, host = [0] * lay.pp, list[Bytes](), list[Bytes](), list[Bytes]()
        groups = zip(self.composer.assignment(lay).groups, self.composer.stages_by_group(lay), strict=True)
        for ranks, stages in groups:
            pools = self.composer.pools(stages)
            for r, (arena, routed) in zip(ranks, pools.activations(lay, ranks), strict=True):
                activations[r] = arena + routed
            host.append(max(pools.pinned(lay, ranks)) if lay.offload else 0)
            inputs = {name: spec for s in stages for name, spec in s.inputs.items()}
            fp8_state_bytes = sum([s.fp8_state_bytes for s in stages])
            data.append(input_bytes(inputs, lay.gradient_accumulation_steps, self.composer.widths) + fp8_state_bytes)
            workspace.append(max([s.workspace for s in stages]))
        return _OutsideBuckets(tuple(activations), tuple(data), tuple(workspace), tuple(host))
