"""How often a step gathers each unit: the rule of `fsdp.py` for units that are sharded whole, without instructions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from penteract.parallel.bucket_plans import NONE
from penteract.step.fsdp import Due, FsdpRule, NumberedStates, UnitReads, upcoming

_Action = tuple[int, tuple[int, ...], int]  # the number of the state before it, the units it reads, the next one


class _Whole(NamedTuple):
    """A unit's parameters, sharded over two ranks."""

    unit: int
    cut_parameters: bool = True
    cut_gradients: bool = False
    shards: int = 2
    replicate_ranks: tuple[int, ...] = ()


@dataclass(slots=True)
class _RingBuffer:
    """What actions gather into a ring buffer: the number of the state after each, and the gathered units."""

    rule: FsdpRule
    states: NumberedStates = field(default_factory=NumberedStates)
    actions: dict[_Action, tuple[int, list[int]]] = field(default_factory=dict[_Action, tuple[int, list[int]]])

    def action(self, action: _Action) -> tuple[int, list[int]]:
        """Apply the rule."""
        left, own, following = action
        passing = UnitReads([(k, unit) for k, unit in enumerate(own)], writes=(), attention=(), reused=())
        before, _, then = self.rule.action(self.states[left], passing, Due(), following, lambda _: False)
        gathered = [unit for events in before.values() for question, unit in events if question == "gather"]
        return self.states.number(then), gathered


@cache
def _ring_buffer(units: int, depth: int) -> _RingBuffer:
    """That of so many units, with `depth` entries."""
    return _RingBuffer(FsdpRule([_Whole(unit) for unit in range(units)], depth))


def gathers(reads: Sequence[tuple[int, ...]], depth: int) -> Counter[int]:
    """How often a step gathers each unit into a ring buffer of `depth` entries. `reads`: for each action, its units."""
    buffer = _ring_buffer(1 + max([unit for own in {*reads} for unit in own], default=NONE), depth)
    left, actions = buffer.states.number(buffer.rule.begin()), buffer.actions
    gathered: list[int] = []
    for own, following in zip(reads, upcoming(reads), strict=True):
        key = left, own, following
        if (found := actions.get(key)) is None:
            found = actions[key] = buffer.action(key)
        left = found[0]
        gathered += found[1]
    return Counter(gathered)
