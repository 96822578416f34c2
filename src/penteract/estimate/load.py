"""How tokens spread over experts: an argument of every price, since routing is data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from penteract.step.program import Program


class Load(Protocol):
    """Rows that this rank's experts receive."""

    def received(self, layer: int, micro: int) -> int: ...


@dataclass(frozen=True, slots=True)
class Balanced:
    """Every expert gets the same share, so every rank receives as many copies as it sends."""

    rows: int

    @staticmethod
    def of(p: Program) -> Balanced:
        lay, moe = p.layout, p.model.moe
        tokens = p.sequence_length // lay.cp * lay.micro_batch_size // (1 if lay.expert_tp > 1 else lay.tp)
        return Balanced(tokens * (moe.top_k if moe else 0))

    def received(self, layer: int, micro: int) -> int:
        return self.rows


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a run counted: (layer, micro-batch) -> rows."""

    rows: Mapping[tuple[int, int], int]

    def received(self, layer: int, micro: int) -> int:
        return self.rows[layer, micro]
