"""Passes with the bucket events of ZeRO 2 and 3: actions of a model chunk simulated from an idle state.

Only events that every such action of a step has are simulated: units whose parameters may be gathered before it begins
are not gathered in it, nor are those that are read after it, and no reduction of an earlier action is in flight. The
clock is monotone, so no action of a step takes less.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from penteract.config.layout import Layout
from penteract.parallel.bucket_plans import NONE
from penteract.readings.buckets.planned import Runs, Units
from penteract.readings.layers.layer_program import EMBEDDING_AND_HEAD, LayerType
from penteract.readings.layers.reads import Memos, tracked
from penteract.readings.layers.touches import NEVER
from penteract.readings.time.clock import LONG, MILLION, PS
from penteract.readings.time.clock_program import ClockProgram
from penteract.readings.time.derive import derive_action
from penteract.readings.time.lower_bounds.idle import IdleLayer
from penteract.readings.time.lower_bounds.passes import Pass, PlayedPasses
from penteract.readings.time.step import StepClock
from penteract.step.fsdp import FsdpState
from penteract.units import Seconds

_LATER = LONG // 10  # a message arrives when all else is long done


class ActionTime(NamedTuple):
    """The seconds of an action, and those of them that may come before the message that it reads."""

    seconds: Seconds
    early: Seconds


@dataclass(slots=True)
class ShardedPasses:
    """Passes with bucket events. `idle`: a layer of a layout without any."""

    steps: StepClock
    idle: Callable[[Layout, LayerType], IdleLayer]
    memos: Memos = field(default_factory=Memos)

    def differ(self, layout: Layout) -> bool:
        """Whether they may take longer than passes without bucket events, and are known: they are not where pipeline
        ranks are placed on nodes in different ways, nor where compute is slowed so much that the clock is not
        monotone."""
        steps = self.steps
        return layout.cuts_units and steps.slower <= MILLION and steps.pp_ranks_aligned_to_nodes(layout)

    def passes(self, layout: Layout) -> list[PlayedPasses]:
        """Seconds of passes, for each group of pipeline ranks with the same stages."""
        composer = self.steps.composer
        assignment, groups = composer.assignment(layout), composer.bucket_planner.groups(layout)
        chunks = dict[int, tuple[Pass, Pass]]()
        for runs, own in zip(groups.runs, assignment.chunks, strict=True):
            begin = 0
            for c in own:
                units = runs.units[begin : (begin := begin + len(assignment.chains[c]))]
                if c not in chunks:
                    chunks[c] = self._chunk(layout, units)
        return [PlayedPasses(*zip(*(chunks[c] for c in own), strict=True)) for own in assignment.chunks]

    def _chunk(self, layout: Layout, units: tuple[Units, ...]) -> tuple[Pass, Pass]:
        """One micro-batch in a chunk of these units: its layers together, the embedding and the head on their own. ->
        the seconds of each action, and those that may come before its message."""
        total, early = dict[str, Seconds](), dict[str, Seconds]()
        for ends, some in groupby(units, lambda run: run.kind in EMBEDDING_AND_HEAD):
            part = tuple(some)
            own = self.idle(layout, part[0].kind).actions if ends else self._layers(layout, part)
            for action, took in own.items():
                total[action] = total.get(action, 0.0) + took.seconds
                if action != "Fwd" or action not in early:  # of the part that computes first
                    early[action] = took.early
        return total, {action: seconds for action, seconds in early.items() if seconds}

    def _layers(self, layout: Layout, units: tuple[Units, ...]) -> dict[str, ActionTime]:
        return self._actions(layout, self.steps.composer.bucket_planner.interned_runs(units))

    @tracked
    def _actions(self, layout: Layout, layers: Runs) -> dict[str, ActionTime]:
        """The actions of a chunk that has only these layers."""
        program = self.steps.chunk_program(layout, layers, 0)
        kinds = dict.fromkeys(action for _, ops in program.layers.values() for action in ops)
        return {action: _action_time(program, action) for action in kinds}


def _action_time(program: ClockProgram, kind: str) -> ActionTime:
    """An action of the only chunk of a program."""
    clock, walk, depth = program.clock, (kind, 0), program.depth
    through, there = program.walk(walk), [NONE] * depth
    for unit in reversed(through.turns[:depth]):  # the first ones may be gathered by actions before
        there[unit % depth] = unit
    action = derive_action(program, walk, FsdpState(tuple(there)))

    def done(message: int) -> int:
        m = clock.rank_clock()
        m.host = -LONG
        if message:
            clock.expect(m, message)
        clock.take(m, action)
        return m.now

    took = done(0)
    late = took if through.arrives == NEVER else done(_LATER) - _LATER
    return ActionTime(took / PS, (took - late) / PS)
