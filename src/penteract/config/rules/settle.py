"""Derives what a run file leaves open: dp and the micro-batch size. Legality of the result is checked elsewhere
(`breaches.py`), so an illegal case gives some value and no error."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from penteract.config.layout import MOST_TOKENS
from penteract.config.rules.case import Case
from penteract.schedule.registry import schedule_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Settle:
    """Fills the settings named in `open` ("dp", "micro_batch_size"). `largest_micro_batch`: in sequences.

    A value that is called, because each change of a case is settled anew (`nearest.py`).
    """

    open: frozenset[str] = frozenset()
    largest_micro_batch: int = 1

    def __call__(self, case: Case) -> Case:
        """The case with its open settings filled, dp first, and its accumulation steps updated."""
        lay = case.layout
        if min(lay.tp, lay.pp, lay.cp, lay.ep) < 1:
            return case
        if "dp" in self.open:
            case = case.put("dp", _replicas(case))
        if "micro_batch_size" in self.open:
            case = case.put("micro_batch_size", self._micro_batch(case))
        return case.with_accumulation_steps()

    def _micro_batch(self, case: Case) -> int:
        """The largest size up to the bound that divides a replica's share, if possible into whole schedule rounds."""
        lay, total = case.layout, case.global_batch_size
        if total is None or not 1 <= lay.dp <= total:
            return 1
        share = total // lay.dp  # sequences of a replica a step
        most = min(share, self.largest_micro_batch, MOST_TOKENS // max(1, case.sequence_length))
        fits = [m for m in range(1, most + 1) if share % m == 0] or [1]
        whole = [m for m in fits if share // m % schedule_of(lay.schedule).round(lay.pp) == 0]
        return max(whole or fits)


def _replicas(case: Case) -> int:
    """As many as the ranks allow; without a number of ranks, as few as experts allow."""
    lay = case.layout
    if case.world is not None:
        return max(1, case.world // (lay.tp * lay.pp * lay.cp))
    return lay.ep // gcd(lay.ep, lay.cp)  # the smallest dp for which ep divides dp·cp
