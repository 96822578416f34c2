"""What the clock leaves out changes nothing: jumped is unrolled to the picosecond, the step after the last is the
last again, and nothing that is added makes anything end sooner."""

from __future__ import annotations

import sys
from dataclasses import replace
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from draws import draws
from layouts import Case
from penteract.config.hardware import cluster
from penteract.config.layout import Layout
from penteract.config.model import ModelSpec
from penteract.config.precision.policy import RECIPES
from penteract.errors import Bug
from penteract.readings.composed import Composer
from penteract.readings.costs.rates import Rates
from penteract.readings.time.clock import CHAINED, FIRST, RUN, START, SYNC, WAIT, Op, simulate
from penteract.readings.time.ranks import Ranks
from penteract.readings.time.step import StepClock, largest_change
from strategies import cases

LAUNCHES = [0.0, 1e-6, 20e-6, 84e-6]


@draws(10, wide=125)
@given(
    cases(), st.integers(0, 12), st.integers(1, 24), st.sampled_from(LAUNCHES),
    st.sampled_from(["8xH100", "2x4xH100"]), st.booleans(),
)  # fmt: skip
def test_jumped_is_unrolled_and_one_more_step_takes_as_long(
    case: Case, deeper: int, longer: int, launch: float, where: str, at_once: bool
) -> None:
    assume(not case.schedule)
    lay = replace(case.layout, gradient_accumulation_steps=case.layout.gradient_accumulation_steps * longer)
    model = replace(case.model, layers=case.model.layers + deeper)
    composer, node = Composer(model, case.sequence_length, RECIPES["bf16"]), cluster(where)
    rates = replace(Rates.of(node, "bf16"), launch=launch, launches={})
    unrolled = StepClock(composer, node, rates, at_once, skip_repeats=False).build(lay, 0)
    while not unrolled.steady:
        unrolled.step()
    played, took = len(unrolled.ends), unrolled.last
    told, slowest = [_parts(unrolled, r) for r in range(lay.pp)], unrolled.slowest
    unrolled.step()
    assert unrolled.last == took
    jumped = StepClock(composer, node, rates, at_once).ranks(lay)
    assert (len(jumped.ends), jumped.last) == (played, took)
    assert [_parts(jumped, r) for r in range(lay.pp)] == told
    assert jumped.slowest == slowest


def _parts(ranks: Ranks, r: int) -> list[int]:
    """Of a rank's last step."""
    begun, ended = ranks.spent_at_end[-2][r], ranks.spent_at_end[-1][r]
    spent = ranks.rank_clocks[r].spent[begun:ended]
    return [sum(n * parts[i] for parts, n in spent) for i in range(len(spent[0][0]))]


def _drawn(random: Random, n: int) -> list[Op]:
    """Ops over two groups of ranks; what is waited for may have begun before."""
    ops = list[Op]()
    for _ in range(n):
        took, key = random.randrange(1, 100), ("c", 0, random.randrange(4))
        ops.append(random.choice([
            (RUN, took, 0, "run"), (RUN, took, 0, "run"), (START, FIRST + random.randrange(2), took, key, "start"),
            (WAIT, key, 1, "wait"), (SYNC, "look"),
            (CHAINED, key, took // 3, FIRST, took, ("r", 0, random.randrange(2)), "beside"),
        ]))  # fmt: skip
    return ops


@pytest.mark.parametrize("seed", range(150))
def test_nothing_ends_sooner_from_a_later_state_or_with_longer_ops(seed: int) -> None:
    random = Random(seed)
    ops = _drawn(random, random.randrange(1, 25))
    free = [random.choice((0, random.randrange(200))) for _ in range(FIRST + 2)]
    flights = {("c", 0, i): random.randrange(200) for i in range(4) if random.random() < 0.5}
    host = random.randrange(-300, 100)

    def done(ops: list[Op], more: int) -> tuple[int, int, dict[object, int]]:
        later = [f + random.randrange(50) * more for f in free]
        under_way = {key: t + random.randrange(50) * more for key, t in flights.items()}
        told = simulate(
            ops, later, dict(under_way), host + random.randrange(50) * more, [2] * len(ops), 140_000, (0,) * len(free)
        )
        return told.done, told.host, dict(told.in_flight)

    longer = [(op[0], op[1] + random.randrange(30), *op[2:]) if op[0] == RUN else op for op in ops]
    plain, late, slow = done(ops, 0), done(ops, 1), done(longer, 1)
    for one, other in ((plain, late), (plain, slow)):
        assert one[0] <= other[0] and one[1] <= other[1]
        assert all(t <= other[2][key] for key, t in one[2].items())


TINY = ModelSpec(name="pinned", layers=19, hidden_size=32, heads=4, kv_heads=2, head_size=8, ffn_size=64, vocab_size=64)
SMALL_BUCKETS = Layout(pp=4, cp=2, vpp=2, schedule="gpipe", gradient_accumulation_steps=10, offload_optimizer=True,
                       bucket_bytes=4096)  # fmt: skip


def _slow_hosts() -> StepClock:
    node = cluster("8xH200")
    rates = replace(Rates.of(node, "bf16"), launch=84e-6, launches={})
    return StepClock(Composer(TINY, 16, RECIPES["bf16"]), node, rates)


def test_a_host_that_is_further_ahead_after_each_step_changes_none() -> None:
    """One gains a little in each; all else is as it was."""
    ranks = _slow_hosts().ranks(SMALL_BUCKETS)
    assert ranks.steady and len(ranks.ends) < 64
    settled = ranks.last
    for _ in range(200):
        ranks.step()
        assert ranks.last == settled and ranks.carried[-1] != ranks.carried[-2]


def test_no_later_step_differs_by_more_than_is_told() -> None:
    ranks, told, took = _slow_hosts().build(SMALL_BUCKETS, 4), list[int](), list[int]()
    for _ in range(100):
        ranks.step()
        if len(ranks.ends) > 1:
            told.append(largest_change(ranks))
            took.append(ranks.last)
    assert told[-1] < told[0]
    for i, most in enumerate(told):
        assert max(abs(later - took[i]) for later in took[i:]) <= most
    assert any(0 < most < took[-1] for most in told)


def test_steps_that_never_settle_are_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "steady", False)
    module = sys.modules["penteract.readings.time.step"]
    monkeypatch.setattr(module, "largest_change", lambda ranks: ranks.last)
    monkeypatch.setattr(module, "_MAX_STEPS", 70)
    with pytest.raises(Bug, match="UNSTEADY") as caught:
        _slow_hosts().ranks(SMALL_BUCKETS)
    assert caught.value.exit_code == 70


@pytest.mark.parametrize(("vocab_size", "tied", "micro_batches"), [(50_000, True, 120), (1024, False, 240)])
def test_steps_that_jump_at_other_turns_are_not_joined(vocab_size: int, tied: bool, micro_batches: int) -> None:
    """The second step settles before the first did: what is left of the two differs by the turns that were jumped."""
    model = ModelSpec(name="pinned", layers=8, hidden_size=256, heads=8, kv_heads=4, head_size=32, ffn_size=512,
                      vocab_size=vocab_size, tied=tied)  # fmt: skip
    lay = Layout(dp=2, pp=2, vpp=2, schedule="interleaved", zero=3, gradient_accumulation_steps=micro_batches)
    composer, node = Composer(model, 64, RECIPES["bf16"]), cluster("8xH100")
    rates = replace(Rates.of(node, "bf16"), launch=84e-6, launches={})
    jumped, unrolled = (StepClock(composer, node, rates, skip_repeats=skip_repeats) for skip_repeats in (True, False))
    assert jumped.step(lay) == unrolled.step(lay)
