"""Whether one sweep is slower than another: pairs of cases, and a test of them that names its confidence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Literal

from penteract.config.rules.case import KEYS
from penteract.errors import BadInput
from penteract.measure.results.signed_rank import SignedRank, least_pairs, signed_rank
from penteract.measure.schemas.sweep import Sweep, SweepCase, SweepRow
from penteract.units import LARGE_FACTOR

CONFIDENCE = 0.95
_SHOWN = 0.005  # per cent: less is no difference in words
Key = Callable[[SweepCase], tuple[object, ...]]


@dataclass(frozen=True, slots=True)
class CasePair:
    """The same case in both sweeps. `slower`: how much longer it takes in the second, as a ratio: 1.02 is 2 %."""

    first: SweepRow
    second: SweepRow
    slower: float


@dataclass(frozen=True, slots=True)
class SweepComparison:
    """The answer.

    verdict    slower or faster: the second, with this confidence; noise: neither is shown
    of         what was paired: cases, or single steps of few cases, which do not tell noise between runs
    pairs      the cases, in order; `missing` are in one sweep only, or did not end well in one
    low, high  an interval of the ratio of times, with `sure` confidence; `middle` is its centre
    p_slower   the chance of such pairs or slower ones if both were equally fast
    needed     pairs that could show a difference; more than there are: run some
    """

    verdict: Literal["slower", "faster", "noise"]
    of: Literal["cases", "steps"]
    pairs: tuple[CasePair, ...]
    missing: tuple[str, ...]
    middle: float
    low: float
    high: float
    sure: float
    p_slower: float
    needed: int
    confidence: float

    @property
    def line(self) -> str:
        """The answer as a sentence."""
        if max(self.high, 1 / max(self.low, 1e-9)) >= LARGE_FACTOR:
            change, span = f"{self.middle:.2g} times as long", f"{self.low:.2g} to {self.high:.2g} times"
            verb, looks = "takes", "seems to take"
        else:
            percent = 100 * (self.middle - 1)
            change = f"{abs(percent):.2g}% {'slower' if percent > 0 else 'faster'}"
            change = change if abs(percent) > _SHOWN else "as fast"
            span = f"{100 * (self.low - 1):+.2g}% to {100 * (self.high - 1):+.2g}%"
            verb, looks = "is", "looks"
        basis = f"Wilcoxon's signed ranks of {self.number} pairs of {self.of}"
        sure = f"{self.sure:.0%} interval {span}"
        if self.verdict == "noise":
            shown = f"noise: no difference is shown at {self.confidence:.0%} confidence"
            return f"{shown}; the second {looks} {change}, {sure} ({basis})"
        return f"{self.verdict}: the second {verb} {change} at {self.confidence:.0%} confidence, {sure} ({basis})"

    @property
    def number(self) -> int:
        """How many pairs were tested."""
        return len(self.pairs) if self.of == "cases" else sum(len(steps_of(p.first)) for p in self.pairs)


def compare(first: Sweep, second: Sweep, confidence: float = CONFIDENCE) -> SweepComparison:
    """Compare what two sweeps have in common: cases of the same model, layout, precision and batch, and of the same
    further keys that vary in a sweep. If there are none, cases that are alike in all but such keys; if there are none
    of them either, cases in which the two varied the same. Several of a kind are paired in their order.

    Raises BadInput where they have nothing in common.
    """
    pairs, missing = list[CasePair](), list[str]()
    for key in (_exact, _key, _varied):
        if not pairs:
            pairs, missing = _pairs(first, second, key)
    return judge_pairs(pairs, missing, confidence)


def judge_pairs(
    pairs: Sequence[CasePair], missing: Sequence[str] = (), confidence: float = CONFIDENCE
) -> SweepComparison:
    """Test pairs of cases. Of fewer than can show a difference, the timed steps are tested, in their order: that is
    only noise within a run. Raises BadInput where there are no pairs."""
    if not pairs:
        raise BadInput("COMPARE", "the sweeps have no measured case in common", found=", ".join(missing[:3]) or "none",
                       fix="sweeps of the same layouts, model and batch")  # fmt: skip
    needed = least_pairs(confidence)
    by_case = len(pairs) >= needed
    tested = signed_rank([log(p.slower) for p in pairs] if by_case else _by_step(pairs), confidence)
    return SweepComparison(
        _verdict(tested, confidence), "cases" if by_case else "steps", tuple(pairs), tuple(missing),
        exp(tested.middle), exp(tested.low), exp(tested.high), tested.confidence, tested.p_above, needed, confidence,
    )  # fmt: skip


def pair(first: SweepRow, second: SweepRow) -> CasePair:
    """Two cases whose speed counts, as a pair."""
    return CasePair(first, second, _rate(first) / _rate(second))


def steps_of(row: SweepRow) -> tuple[float, ...]:
    """The timed steps of a measured case."""
    return row.result.measured.steps_s if row.result else ()


def _verdict(tested: SignedRank, confidence: float) -> Literal["slower", "faster", "noise"]:
    if tested.p_above <= 1 - confidence:
        return "slower"
    return "faster" if tested.p_below <= 1 - confidence else "noise"


def _pairs(first: Sweep, second: Sweep, key: Key) -> tuple[list[CasePair], list[str]]:
    ours, theirs = (_by_key(sweep, key) for sweep in (first, second))
    pairs, missing = list[CasePair](), list[str]()
    for one in dict.fromkeys((*ours, *theirs)):
        a, b = ours.get(one, []), theirs.get(one, [])
        both = min(len(a), len(b))
        pairs += [pair(x, y) for x, y in zip(a[:both], b[:both], strict=True)]
        missing += [row.case.name for row in (*a[both:], *b[both:])]
    for sweep in (first, second):
        missing += [row.case.name for row in sweep.rows if not row.counts]
    return pairs, list(dict.fromkeys(missing))


def _by_key(sweep: Sweep, key: Key) -> dict[tuple[object, ...], list[SweepRow]]:
    found = dict[tuple[object, ...], list[SweepRow]]()
    for row in sweep.rows:
        if row.counts:
            found.setdefault(key(row.case), []).append(row)
    return found


def _key(case: SweepCase) -> tuple[object, ...]:
    return (case.model, tuple(case.layout.items()), case.precision, case.global_batch_size, case.sequence_length)


def _exact(case: SweepCase) -> tuple[object, ...]:
    more = {key: value for key, value in case.varied.items() if key not in KEYS.values()}
    return *_key(case), *sorted(more.items())


def _varied(case: SweepCase) -> tuple[object, ...]:
    return case.model, tuple(case.varied.items())


def _rate(row: SweepRow) -> float:
    assert row.result is not None
    return row.result.measured.tokens_per_s_per_gpu


def _step(row: SweepRow) -> float:
    assert row.result is not None
    return row.result.measured.step_s


def _by_step(pairs: Sequence[CasePair]) -> list[float]:
    found = list[float]()
    for pair in pairs:
        work = pair.slower / (_step(pair.second) / _step(pair.first))  # 1, unless the two differ in tokens or ranks
        found += [log(b / a * work) for a, b in zip(steps_of(pair.first), steps_of(pair.second), strict=False)]
    return found
