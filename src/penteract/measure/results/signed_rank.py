"""Wilcoxon's signed-rank test: whether paired differences lie above zero, exactly, for any distribution around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

MOST_PAIRS = 200  # more change nothing but the time that they take


@dataclass(frozen=True, slots=True)
class SignedRank:
    """The test of some differences.

    middle         the median of the means of all pairs of differences (Hodges-Lehmann)
    p_above        the chance of such ranks or higher ones if the differences were symmetric around zero; `p_below`
    low, high      an interval of at least `confidence` around the middle
    """

    middle: float
    p_above: float
    p_below: float
    low: float
    high: float
    confidence: float


def signed_rank(differences: Sequence[float], confidence: float = 0.95) -> SignedRank:
    """The test of 1 to `MOST_PAIRS` differences; those of more are the first. Ties share their ranks; zeros count for
    both sides."""
    found = list(differences)[:MOST_PAIRS]
    n = len(found)
    means = sorted((a + b) / 2 for i, a in enumerate(found) for b in found[i:])
    positive = sum(1.0 if a > 0 else 0.5 if a == 0 else 0.0 for a in means)  # the sum of positive ranks
    tail = _tail(n)
    total = n * (n + 1) // 2
    cut = next((k for k in range(total, -1, -1) if k and 2 * tail(total - k + 1) <= 1 - confidence), 0)
    sure = 1 - 2 * tail(total - cut + 1) if cut else 1 - 2 * 0.5**n
    k = max(cut, 1)
    return SignedRank(median(means), tail(positive), tail(total - positive), means[k - 1], means[-k], sure)


def least_pairs(confidence: float) -> int:
    """The fewest pairs that can show a difference with this confidence, one-sided."""
    return next(n for n in range(1, 64) if 0.5**n <= 1 - confidence)


def _tail(n: int) -> Callable[[float], float]:
    """k -> the chance that the sum of positive ranks of n differences is k or more, if all signs are equally likely.

    Halves, which ties and zeros make, are rounded down: a chance is never told as smaller than it is.
    """
    ways = [1] + [0] * (n * (n + 1) // 2)
    for rank in range(1, n + 1):
        for total in range(len(ways) - 1, rank - 1, -1):
            ways[total] += ways[total - rank]
    above = [*accumulate(reversed(ways))][::-1]
    return lambda k: (above[max(0, int(k))] if k < len(above) else 0) / 2**n
