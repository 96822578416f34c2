"""Process groups: few calls a rank in a world of any size, those that its program uses, in an order without cycles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draws import draws
from layouts import Case
from observed_calls import observation
from penteract.config.catalog import model as find_model
from penteract.config.layout import Layout
from penteract.config.optimizers import PLAIN, OptimizerKind, OptimizerKinds
from penteract.engine.comm.groups import CHANNELS, ProcessGroups, Round, needed
from penteract.step.program import compile_step
from pool import Pool
from strategies import cases, fp8_gather_cases


def made(rounds: list[Round], rank: int, world: int, groups: ProcessGroups | None = None) -> list[tuple[int, ...]]:
    """The groups that a rank asks torch for."""
    asked = list[tuple[int, ...]]()

    def new_group(ranks: list[int], *, use_local_synchronization: bool, **more: object) -> object:
        assert use_local_synchronization and more == {"backend": None, "timeout": None}
        asked.append(tuple(ranks))
        return object()

    with (
        patch.object(dist, "new_group", new_group),
        patch.object(dist, "get_rank", lambda: rank),
        patch.object(dist, "get_world_size", lambda: world),
    ):
        (groups or ProcessGroups()).make(rounds)
    return asked


@pytest.mark.parametrize("zero", [1, 3])
def test_a_70b_over_4096_ranks_makes_five(zero: int) -> None:
    """Tensor ranks, data ranks, stages (norms are whole on all of one), and two lines of the pipeline."""
    layout = Layout(dp=64, tp=8, pp=8, gradient_accumulation_steps=8, zero=zero)
    p = compile_step(find_model("llama-3.1-70b"), layout, 8192, rank=4095, precision="bf16")
    rounds = needed(p)
    for rank in (0, 511, 2048, 4095):
        mesh, asked = p.mesh, made(rounds, rank, layout.world)
        assert sorted(asked) == sorted(mesh.group(n, rank) for n in ("dp", "tp", "dp_cp_tp", "pp", "pp"))


def test_a_tied_table_is_a_line_between_its_stages_and_the_others_keep_count() -> None:
    """A process that makes none while others do would look for the next one under another name."""
    layout = Layout(dp=2, pp=4, gradient_accumulation_steps=4)
    model = find_model("llama-3.2-1b")
    p = compile_step(model, layout, 128, precision="bf16")
    asked = [made(needed(p), rank, layout.world) for rank in range(layout.world)]
    assert len({len(some) for some in asked}) == 1
    ends = [i for i, ranks in enumerate(asked[0]) if ranks == (0, 1, 6, 7)]
    assert len(ends) == 1
    assert [some[ends[0]] for some in asked] == [(0, 1, 6, 7)] * 2 + [(r,) for r in range(2, 6)] + [(0, 1, 6, 7)] * 2


def check(case: Case) -> None:
    world = case.layout.world
    programs = [case.compile(rank) for rank in range(world)]
    rounds = needed(programs[0])
    assert all(needed(p) == rounds for p in programs), "all ranks know the same rounds"
    for groups, _ in rounds:
        assert sorted(r for g in groups for r in g) == [*range(world)], "groups of a round share no rank"
    there = {(g, channel) for groups, channel in rounds for g in groups}
    p = programs[-1]
    for seen in observation(p, counted=False).seen:
        match seen.what:
            case "start":
                assert (seen.ranks, "") in there, seen
            case "send" | "recv" if seen.name:
                assert (p.mesh.group("pp", p.rank), seen.name) in there, seen
            case "send" | "recv":
                assert (p.mesh.group("cp", p.rank), "") in there, seen
            case _:
                pass
    counts = {len(made(rounds, rank, world)) for rank in range(world)}
    assert len(counts) == 1
    assert counts.pop() <= 12


@draws(16, wide=200)
@given(cases(), st.sampled_from([PLAIN, OptimizerKinds(matrices=OptimizerKind("muon", 2))]))
def test_a_rank_has_the_groups_that_its_program_asks_for(case: Case, optimizer_kinds: OptimizerKinds) -> None:
    if optimizer_kinds is not PLAIN:
        case = replace(case, layout=replace(case.layout, offload_optimizer=False))
    check(replace(case, optimizer_kinds=optimizer_kinds))


@settings(max_examples=8, suppress_health_check=list(HealthCheck), deadline=None)
@given(fp8_gather_cases())
def test_and_where_bodies_agree(case: Case) -> None:
    check(case)


def test_groups_that_are_there_are_not_made_again() -> None:
    layouts = (Layout(dp=2, tp=2), Layout(dp=2, tp=2, zero=1), Layout(tp=4), Layout(dp=4))
    model, groups = find_model("llama-3.2-1b"), ProcessGroups()
    counts = [len(made(needed(compile_step(model, lay, 128, precision="bf16")), 1, 4, groups)) for lay in layouts]
    assert counts == [2, 0, 0, 0]  # the world has its group


def crossed(rank: int, groups: ProcessGroups) -> list[tuple[int, ...]]:
    """Rounds in which ranks have unlike groups, and some none, made and used at once."""
    world = range(dist.get_world_size())
    rounds = [
        Round(((0, 3), (1, 2), *((r,) for r in world[4:])), "value"), Round(((2, 3, 5), (0, 1), (4,), (6, 7))),
        Round(((0, 3), (1, 2), *((r,) for r in world[4:])), "gradient"), Round((tuple(world),)),
        Round(((0, 2, 4, 6), (1, 3, 5, 7))),
    ]  # fmt: skip
    groups.make(rounds)
    return [ranks for ranks, group in _own(groups, rounds, rank) if dist.get_process_group_ranks(group) == [*ranks]]


def _own(groups: ProcessGroups, rounds: list[Round], rank: int) -> Iterator[tuple[tuple[int, ...], object]]:
    for some, channel in rounds:
        own = next(g for g in some if rank in g)
        if len(own) > 1:
            yield own, groups.of(own, channel)


def test_rounds_of_unlike_groups_meet(pool: Pool) -> None:
    told = pool.run(crossed)
    assert [len(some) for some in told] == [5, 5, 5, 5, 2, 3, 3, 3]
    assert CHANNELS == ("value", "gradient")
