"""Answers about ranks: groups and holders are those that are counted here rank by rank, totals those of the price."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product
from typing import Any

import pytest

from draws import seeds
from explore.drawn_questions import drawn, question
from penteract.config.layout import Layout
from penteract.explore.answering import answer
from penteract.explore.answers.questions import read_question
from penteract.explore.answers.ranks.rank_runs import flat, ranks_text, runs_of
from penteract.planner.plan import estimator, plan_one
from penteract.readings.price import price
from penteract.step.program import compile_step

Json = dict[str, Any]
MOE = question("tiny-moe", "dp=4,cp=2,tp=2,ep=4,mbs=1,zero=1", sequence_length=256, global_batch_size=16)
PIPE = question("llama-3.1-8b", "dp=4,tp=2,pp=4,mbs=1,zero=2", global_batch_size=16)


def ask(asked: Json, **more: Any) -> Json:
    [row] = answer({"version": 1, "kind": "ranks", "question": asked, **more}, asked)
    return row


def ranks_of(runs: list[int]) -> list[int]:
    """The ranks of runs."""
    return [first + step * i for first, step, n in zip(*[iter(runs)] * 3, strict=True) for i in range(n)]


def coordinates(lay: Layout) -> dict[int, dict[str, int]]:
    """The place of each rank: numbered one by one, tensor ranks first, then context, data, pipeline."""
    every = product(range(lay.pp), range(lay.dp), range(lay.cp), range(lay.tp))
    return {rank: dict(zip(("pp", "dp", "cp", "tp"), at, strict=True)) for rank, at in enumerate(every)}


def group(lay: Layout, axis: str, rank: int) -> list[int]:
    """The ranks that differ from `rank` in one coordinate alone; of ep, those of its block of (dp, cp)."""
    at = coordinates(lay)
    if axis == "ep":
        block = lambda r: (at[r]["pp"], at[r]["tp"], (at[r]["dp"] * lay.cp + at[r]["cp"]) // lay.ep)  # noqa: E731
        return [r for r in at if block(r) == block(rank)]
    return [r for r in at if all(at[r][other] == at[rank][other] for other in at[rank] if other != axis)]


@seeds(5, wide=60)
def test_groups_and_totals_of_drawn_questions(seed: int) -> None:
    asked = drawn(seed)
    few = random.Random(seed).choice([1, 2, 4, 7])  # micro-batches: the price here plays all of them
    asked["global_batch_size"] = asked["layout"]["dp"] * asked["layout"]["micro_batch_size"] * few
    row = ask(asked)
    if row["kind"] == "error":
        assert row["error"]["code"] in ("LAYOUT", "OP", "BUDGET", "MODEL", "PRECISION")
        return
    read = read_question(asked)
    plan = plan_one(read.ask, read.settings, estimator)
    lay, composer = plan.best.layout, plan.search.estimators[plan.best.estimate.precision].composer
    rank = random.Random(seed).randrange(lay.world)
    row = ask(asked, rank=rank)
    assert row["rank"] == rank and row["world"] == lay.world == row["nodes"] * row["per_node"]
    assert [axis["axis"] for axis in row["axes"]] == [a for a in ("pp", "dp", "cp", "tp", "ep") if getattr(lay, a) > 1]
    for axis in row["axes"]:
        members = group(lay, axis["axis"], rank)
        assert ranks_of(axis["ranks"]) == members and axis["size"] == len(members)
        assert [r for r in range(lay.world) if r // axis["block"] == rank // axis["block"]
                and r % axis["step"] == rank % axis["step"]] == members  # fmt: skip
        assert (axis["link"] == "inside") == (len({r // row["per_node"] for r in members}) == 1)
        if axis["coordinate"]:
            assert rank // axis["step"] % axis["size"] == coordinates(lay)[rank][axis["axis"]]
    program = compile_step(composer.model, lay, composer.sequence_length, rank=rank, precision=composer.policy,
                           optimizer_kinds=composer.optimizer_kinds)  # fmt: skip
    wires = Counter[tuple[str, tuple[int, ...]]]()
    for (kind, ranks), size in price(program).wires.items():
        wires[kind, tuple(sorted(ranks))] += size * (len(set(ranks)) > 1)
    found = Counter[tuple[str, tuple[int, ...]]]()
    for one in row["traffic"]:
        found[one["collective"], tuple(ranks_of(one["ranks"]))] += one["amount"]["bytes"]
        assert one["size"] == len(ranks_of(one["ranks"])) and rank in ranks_of(one["ranks"])
    assert found == +wires
    for link in ("inside", "between"):
        some = [one for one in row["traffic"] if one["link"] == link]
        added = [one for one in row["sums"] if one["link"] == link]
        assert sum(o["picoseconds"] for o in some) == sum(o["picoseconds"] for o in added)
        assert sum(o["amount"]["bytes"] for o in some) == sum(o["amount"]["bytes"] for o in added)
        for one in some:
            assert (link == "inside") == (len({r // row["per_node"] for r in ranks_of(one["ranks"])}) == 1)


# The parameter, and which part of it a rank that has it holds.
HELD = [
    (PIPE, "layers.0.attention.q.weight", lambda at: at["tp"]),
    (PIPE, "layers.0.norm1.weight", lambda at: 0),
    (PIPE, "embedding.weight", lambda at: at["tp"]),
    (MOE, "layers.1.moe.experts.up", lambda at: (at["dp"] * 2 + at["cp"]) % 4),
    (MOE, "layers.1.moe.router.weight", lambda at: 0),
    (question("qwen3-30b-a3b", "dp=2,tp=8,mbs=1,ep=2", sequence_length=4096, global_batch_size=8),
     "layers.0.attention.k.weight", lambda at: at["tp"] // 2),  # four heads of keys on eight ranks
]  # fmt: skip


@pytest.mark.parametrize(("asked", "name", "part"), HELD)
def test_who_holds_which_part(asked: Json, name: str, part: Any) -> None:
    row = ask(asked, parameter=name)
    held, at = (
        row["parameter"],
        coordinates(plan_one((r := read_question(asked)).ask, r.settings, estimator).best.layout),
    )
    assert held["name"] == name
    expected: dict[int, list[int]] = {}
    for rank, place in at.items():
        if place["pp"] == 0:
            expected.setdefault(part(place), []).append(rank)
    assert {one["number"]: ranks_of(one["ranks"]) for one in held["parts"]} == dict(sorted(expected.items()))
    assert [one["number"] for one in held["parts"] if one["own"]] == [part(at[0])]
    area = sum(w * h for _, _, w, h in (one["box"] for one in held["parts"]))
    assert 0.85 < area <= 1.0001 and all(0 <= x <= x + w < 1.001 for x, _, w, _ in (p["box"] for p in held["parts"]))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_optimizer_states_of_a_part_are_shared_out_once(zero: int) -> None:
    asked = question("llama-3.1-8b", f"dp=4,tp=2,mbs=1,zero={zero}", global_batch_size=8)
    held = ask(asked, rank=3, parameter="layers.5.mlp.up.weight")["parameter"]
    if zero == 0:
        assert held["states"] == [] and ranks_of(held["states_ranks"]) == [1, 3, 5, 7]
        return
    ends = [tuple(int(n.replace(" ", "")) for n in one["elements"].split(" to ")) for one in held["states"]]
    assert [first for first, _ in ends] == [0, *(last + 1 for _, last in ends[:-1])]
    assert ends[-1][1] + 1 == 4096 * 14336 // 2
    assert {one["rank"] for one in held["states"]} <= {1, 3, 5, 7} and f"ZeRO {zero}" in held["states_text"]


def test_every_parameter_can_be_asked_for_and_equal_layers_are_one() -> None:
    row = ask(PIPE, rank=8)  # the second pipeline rank
    names = [one["name"] for one in row["parameters"]]
    assert names[0].startswith("layers.8.") and all("· 8 layers" in one["text"] for one in row["parameters"])
    for name in names:
        held = ask(PIPE, rank=8, parameter=name)["parameter"]
        assert held["name"] == name and ranks_of(held["parts"][0]["ranks"])[0] >= 8
    assert ask(PIPE, rank=8, parameter="no such")["parameter"]["name"] == "layers.8.attention.q.weight"


def test_a_rank_that_is_not_there_is_the_first_and_what_is_no_rank_is_refused() -> None:
    assert ask(PIPE, rank=10**9)["rank"] == ask(PIPE, rank=-1)["rank"] == 0
    assert ask(PIPE, rank="x")["error"]["code"] == "QUESTION"
    assert ask(PIPE, rank=True)["error"]["where"] == "rank"
    alone = ask(question("gpt2", "dp=1", sequence_length=128, global_batch_size=1))
    assert alone["traffic"] == [] and "one rank" in alone["missing"] and ask(alone["more"])["world"] == 8


def test_four_thousand_ranks_are_a_few_numbers() -> None:
    row = ask(question("llama-3.1-405b", "dp=64,tp=8,pp=8,mbs=1,zero=1", global_batch_size=2048), rank=1000)
    assert row["nodes"] == 512 and len(str(row)) < 40_000
    assert ranks_of(row["axes"][0]["ranks"]) == [488 + 512 * i for i in range(8)]


def test_runs_are_the_ranks_and_can_be_read() -> None:
    draw = random.Random(7)
    for _ in range(200):
        ranks = sorted(draw.sample(range(100), draw.randrange(1, 20)))
        assert ranks_of(flat(runs_of(ranks))) == ranks
    text = lambda ranks: ranks_text(runs_of(ranks))  # noqa: E731
    assert text(range(8)) == "0–7" and text([3]) == "3" and text([0, 4]) == "0, 4"
    assert text(range(0, 512, 8)) == "0, 8, 16 … 504" and text([0, 1, 2, 3, 8, 9, 10, 11]) == "0–3, 8–11"
