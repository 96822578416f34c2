"""Where routers send tokens where tensors have no numbers: evenly, or as a run did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from penteract.engine.kernels.moe.experts import Splits
from penteract.ops.tape import Site
from penteract.step.program import Program

Given = Callable[[int, int], Splits | None]  # layer, and which call of its router -> the sizes that a run had


def _even(layer: int, call: int) -> None:
    """No run is followed."""


@dataclass(slots=True)
class Routing:
    """The sizes of all-to-alls. Experts get equal shares of a rank's token copies; the first ones get the rest."""

    p: Program
    given: Given = _even
    calls: dict[int, int] = field(default_factory=dict[int, int])  # of each layer's router
    last: dict[int, int] = field(default_factory=dict[int, int])  # rows that this rank's experts of a layer got

    def splits(self, site: Site) -> Splits:
        """Rows to send and to receive at a site of `split_sizes`."""
        number = self.calls[site.layer] = self.calls.get(site.layer, -1) + 1
        made = self.given(site.layer, number) or self._evenly(site)
        self.last[site.layer] = sum(made.received)
        return made

    def _evenly(self, site: Site) -> Splits:
        ranks, experts = int(site.attrs["ranks"]), int(site.ins[0].shape[0])  # type: ignore[arg-type]
        share, rest = divmod(self._copies, experts)
        each = [share + (e < rest) for e in range(experts)]
        own, me = experts // ranks, self._index(site) if ranks > 1 else 0
        mine = each[me * own : (me + 1) * own]
        return Splits([sum(each[i * own : (i + 1) * own]) for i in range(ranks)], [sum(mine)] * ranks, [mine] * ranks)

    def rows(self, layer: int) -> int:
        """Rows that this rank's experts received last, or without all-to-alls, all copies that it routes."""
        return self.last.get(layer, self._copies)

    @property
    def _copies(self) -> int:
        """Token copies that a rank routes in a micro-batch."""
        lay, moe = self.p.layout, self.p.model.moe
        assert moe is not None
        tokens = self.p.sequence_length // lay.cp * lay.micro_batch_size
        return tokens // (1 if lay.expert_tp > 1 else lay.tp) * moe.top_k

    def _index(self, site: Site) -> int:
        """This rank's place among those that share experts."""
        return self.p.mesh.index("ep", self.p.rank)
