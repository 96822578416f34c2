"""How tokens spread over experts. Every price takes this as an argument, since routing depends on data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, Protocol

from penteract.config.layout import Layout
from penteract.config.model import ModelSpec
from penteract.parallel.expert import most_of_a_token


class Load(Protocol):
    """Rows that this rank's experts receive."""

    def received(self, layer: int, micro: int) -> int:
        """Token copies R that this rank's experts of `layer` receive in micro-batch `micro`."""
        ...


class Balanced(NamedTuple):
    """Every expert gets the same share, so every rank receives as many copies as it sends. A tuple, as the keys of most
    cached costs contain it: the hash of a dataclass takes far longer."""

    rows: int

    @staticmethod
    def of(
        m: ModelSpec, layout: Layout, sequence_length: int, imbalance: float = 1.0,
        whole: tuple[ModelSpec, int] | None = None,
    ) -> Balanced:  # fmt: skip
        """The rank's own token copies: its tokens S/cp·B times top_k, over tp too where tp does not cut experts; 0
        without experts. `imbalance`: so many times as many, as the rank with the most rows gets: no more than can come
        to it. `whole`: the model and its ranks of expert parallelism, where `m` and `layout` have other sizes."""
        if m.moe is None:
            return Balanced(0)
        tokens = sequence_length // layout.cp * layout.micro_batch_size
        rows = tokens // (1 if layout.expert_tp > 1 else layout.tp) * m.moe.top_k
        if imbalance == 1:
            return Balanced(rows)
        model, ranks = whole or (m, layout.ep)
        assert model.moe is not None
        most = ranks * most_of_a_token(model.moe.top_k, model.moe.experts, ranks)
        share = min(Fraction(imbalance).limit_denominator(10**6), Fraction(most, model.moe.top_k))
        return Balanced(rows * share.numerator // share.denominator)

    def received(self, layer: int, micro: int) -> int:
        return self.rows


@dataclass(frozen=True, slots=True)
class Recorded:
    """Counted in a run: (layer, micro-batch) -> rows."""

    rows: Mapping[tuple[int, int], int]

    def received(self, layer: int, micro: int) -> int:
        return self.rows[layer, micro]
