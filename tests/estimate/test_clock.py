"""The clock plays what the walk does: the same calls and bucket events in the same order, and jumps change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from estimate.recording import Seen, recorded
from layouts import Case
from penteract.estimate.composed import Composer
from penteract.estimate.rates import Rates
from penteract.estimate.time.clock import LOOK, RUN, START, WAIT, Op
from penteract.estimate.time.ranks import line_of
from penteract.estimate.time.step import StepClock
from penteract.spec.hardware import cluster
from penteract.spec.layout import Layout
from penteract.spec.mesh import Mesh
from penteract.spec.precision import RECIPES, policy
from penteract.step.program import compile_step
from strategies import cases

NODE = cluster("8xH100")


def clock_of(case: Case, *, jumps: bool = True, precision: str = "bf16") -> StepClock:
    composer = Composer(
        case.model, case.sequence_length, policy(precision if case.precision == "fp64" else case.precision)
    )
    return StepClock(composer, NODE, Rates.of(NODE, "bf16", fp8=composer.policy.fp8 is not None), jumps=jumps)


def played(steps: StepClock, layout: Layout, r: int) -> list[Seen]:
    """What the program of a pipeline rank says, every run unrolled."""
    stage = steps.stage(layout, r)
    line = line_of(layout.schedule, layout.pp, layout.vpp, layout.gradient_accumulation_steps)
    derived, clock = stage.derive(line.computes[r]), stage.clock
    ranks = {n: ranks for ranks, n in stage.ops.streams.by_ranks.items()}
    sizes = {key[1]: key for key in stage.ops.known}
    out = list[Seen]()

    def tell(ops: tuple[Op, ...]) -> None:
        for op in ops:
            if op[0] == RUN:
                out.append(("compute", op[3]))
            elif op[0] == WAIT:
                out.append(("wait", op[3]))
            elif op[0] != LOOK:
                stream, took, name = (op[1], op[2], op[4]) if op[0] == START else (op[2], op[3], op[5])
                out.append(("start", name, ranks.get(stream, stream), took))

    tell(clock.ops[derived.opening])
    for item in line.todo[r]:
        if not isinstance(item, int):
            out.append(("exchange",))
            continue
        for body, times, step in clock.runs[derived.actions[item]]:
            for _ in range(times):
                for segment, _, _ in body:
                    tell(clock.ops[segment])
    tell(clock.ops[derived.closing])
    tell(clock.ops[derived.update])
    assert sizes is not None
    return out


def expected(steps: StepClock, case: Case, layout: Layout, r: int, precision: str) -> Iterator[Seen]:
    rank = Mesh(layout).group("pp", 0)[r]
    p = compile_step(case.model, layout, case.sequence_length, rank=rank, precision=steps.composer.policy)
    yield from recorded(p)


def names(seen: list[Seen]) -> list[Seen]:
    return [(*one[:2], one[2]) if one[0] == "start" and isinstance(one[2], tuple) else one[:2] for one in seen]


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases(), st.integers(0, 3), st.sampled_from(["bf16", "fp64", "narrow"]))
def test_plays_what_the_walk_does(case: Case, deeper: int, precision: str) -> None:
    assume(not case.schedule and not case.layout.offload and not case.layout.offload_optimizer)
    case = replace(case, model=replace(case.model, layers=case.model.layers + deeper))
    chosen = replace(RECIPES["bf16"], reduce="bf16") if precision == "narrow" else RECIPES[precision]
    case = replace(case, precision=chosen)
    steps = clock_of(case)
    for r in range(case.layout.pp):
        got, want = names(played(steps, case.layout, r)), names([*expected(steps, case, case.layout, r, precision)])
        assert got == want, _first(got, want)


def _first(got: list[Seen], want: list[Seen]) -> str:
    i = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), min(len(got), len(want)))
    return f"at {i} of {len(got)} and {len(want)}:\n{got[max(0, i - 4) : i + 4]}\n{want[max(0, i - 4) : i + 4]}"
