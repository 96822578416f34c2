"""What the pipeline ranks of a layout hold: the sums of stages, and of the buckets beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penteract.config.layout import Layout
from penteract.readings.buckets.planned import BucketMemory, StageGroups
from penteract.readings.composed import Composer
from penteract.readings.layers.reads import Memos, tracked
from penteract.readings.memory_bound import Growths, MemoryBound
from penteract.readings.price import fed
from penteract.units import Bytes


class RankMemory(NamedTuple):
    """Bytes by kind of the fullest pipeline rank, and of each rank in all; on the host, of the rank with most there."""

    kinds: Mapping[str, Bytes]
    by_stage: tuple[Bytes, ...]
    host: Bytes

    @property
    def allocated(self) -> Bytes:
        """Bytes that the fullest pipeline rank allocates."""
        return max(self.by_stage)


class Least(NamedTuple):
    """What a layout holds at least, whatever the size of its micro-batch: bytes between steps of each group of pipeline
    ranks with the same stages, and what these keep for each sequence."""

    resident: tuple[Bytes, ...]
    growth: Growths

    def total(self, per_sequence: Sequence[Bytes], size: int) -> Bytes:
        """Bytes that the fullest rank holds at least with `size` sequences in a micro-batch, of which the stages of
        each group keep `per_sequence`."""
        return max([held + size * kept for held, kept in zip(self.resident, per_sequence, strict=True)])


class _Beside(NamedTuple):
    """What pipeline ranks hold beside their buckets: the arena with what is routed, of each; data, workspace and
    what is on the host, of each group of ranks with the same stages."""

    activations: tuple[Bytes, ...]
    data: tuple[Bytes, ...]
    workspace: tuple[Bytes, ...]
    host: tuple[Bytes, ...]


@dataclass(slots=True)
class MemoryReading:
    """What ranks of one model's layouts hold. What two layouts share is summed once."""

    composer: Composer
    floor: MemoryBound = field(init=False)
    memos: Memos = field(default_factory=Memos)

    def __post_init__(self) -> None:
        """Make the lower bound over the same composer."""
        self.floor = MemoryBound(self.composer)

    def of(self, layout: Layout) -> RankMemory:
        """Of all ranks."""
        assignment, there, states = self.composer.assignment(layout), self._beside(layout), self._states(layout)
        beside = [
            s.resident + data + max(workspace, s.largest)
            for s, data, workspace in zip(states, there.data, there.workspace, strict=True)
        ]
        by_stage = tuple([a + beside[g] for a, g in zip(there.activations, assignment.group, strict=True)])
        r = max(range(layout.pp), key=by_stage.__getitem__)
        g = assignment.group[r]
        other = there.data[g] + max(there.workspace[g], states[g].largest) + states[g].ring_buffer
        kinds = {**states[g].held, "activations": there.activations[r], "other": other}
        return RankMemory(kinds, by_stage, max([n + s.host for n, s in zip(there.host, states, strict=True)]))

    def least(self, layout: Layout) -> Least:
        """Of layouts that differ in the micro-batch alone, the same."""
        return Least(tuple([s.resident for s in self._states(layout)]), self.floor.growth(layout))

    def at_least(self, layout: Layout, least: Least) -> Bytes:
        """Bytes that the fullest rank holds at least, of which `least` is known: what is allocated is no less."""
        return least.total(self.floor.per_sequence(layout, least.growth), layout.micro_batch_size)

    def _states(self, layout: Layout) -> list[BucketMemory]:
        """Of each group of pipeline ranks with the same stages."""
        return self._states_of(layout, self.composer.packer.groups(layout))

    @tracked
    def _states_of(self, layout: Layout, groups: StageGroups) -> list[BucketMemory]:
        packer, each = self.composer.packer, zip(groups.runs, groups.ranks, strict=True)
        return [packer.state(layout, runs, ranks[0] if packer.shares(runs) else 0) for runs, ranks in each]

    @tracked
    def _beside(self, layout: Layout) -> _Beside:
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
            data.append(fed(inputs, lay.gradient_accumulation_steps, self.composer.widths) + fp8_state_bytes)
            workspace.append(max([s.workspace for s in stages]))
        return _Beside(tuple(activations), tuple(data), tuple(workspace), tuple(host))
