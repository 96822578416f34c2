"""Answers to the page: they say what the command line says, they add up, and nothing that a page sends breaks them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draws import draws, seeds
from explore.drawn_questions import drawn, question
from penteract.cli import main
from penteract.explore.answering import answer
from penteract.explore.answers.questions import opening_question, read_question
from penteract.explore.answers.step_curve import shortened
from penteract.explore.schemas.page_schema import MESSAGES, VERSION, Question
from penteract.planner.plan import estimator, plan_one

OPENING = opening_question({"name": "llama-3.1-8b"})
hints_of = cache(get_type_hints)
Json = dict[str, Any]


def ask(kind: str, asked: Json | None = None, **more: Any) -> list[Json]:
    """The rows of an answer, through JSON as they are sent."""
    return [*rows_of(kind, asked, **more)]


def rows_of(kind: str, asked: Json | None = None, **more: Any) -> Iterator[Json]:
    """One by one: a row that is not taken is not made."""
    request = {"version": VERSION, "kind": kind, "question": asked or dict(OPENING), **more}
    for row in answer(json.loads(json.dumps(request)), OPENING):
        yield json.loads(json.dumps(row, allow_nan=False))


def told_by_the_command_line(command: str, capsys: pytest.CaptureFixture[str]) -> Json:
    """What the command prints as JSON; its exit code is that of a layout that fits or does not."""
    words = shlex.split(command)
    assert words.pop(0) == "penteract"
    assert main([*words, "--why", "1", "--json"]) in (0, 2)
    return json.loads(capsys.readouterr().out)


# ---- the schema ------------------------------------------------------------------------------------------------------


def misfits(value: Any, hint: Any, at: str) -> list[str]:
    """Where a value is not of a type of the schema."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind is Literal:
        return [] if value in inner else [at]
    if kind in (Union, UnionType):
        return [] if any(not misfits(value, one, at) for one in inner) else [at]
    if is_typeddict(hint):
        if not isinstance(value, dict):
            return [at]
        hints = hints_of(hint)
        wrong = [f"{at}.{k}" for k in value.keys() - hints.keys()] + [
            f"{at}.{k}" for k in hint.__required_keys__ - value.keys()
        ]
        return wrong + [w for k, v in value.items() if k in hints for w in misfits(v, hints[k], f"{at}.{k}")]
    if kind is list:
        return (
            [w for i, v in enumerate(value) for w in misfits(v, inner[0], f"{at}[{i}]")]
            if isinstance(value, list)
            else [at]
        )
    if kind is dict:
        return (
            [w for k, v in value.items() for w in misfits(v, inner[1], f"{at}.{k}")]
            if isinstance(value, dict)
            else [at]
        )
    if hint is Any:
        return []
    types = (int, float) if hint is float else hint
    fine = isinstance(value, types) and not (isinstance(value, bool) and hint in (int, float))
    return [] if fine or (hint is NoneType and value is None) else [at]


def schema_of(row: Json) -> type:
    """The message of the schema with this `kind`."""
    (found,) = [m for m in MESSAGES if m.__name__ != "PageRequest" and row["kind"] in get_args(hints_of(m)["kind"])]
    return found


@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        ("opening", None), ("memory", None), ("step", None), ("fits", None), ("run_file", None), ("schedule", None),
        ("memory", question(layout="dp=1,tp=3")), ("memory", {"model": 1}),
        ("memory", question("llama-3.1-70b", "dp=2,tp=8,pp=4,zero=3,recompute=full,mbs=1", gpu="H100")),
        ("schedule", question(layout="dp=2,tp=2,pp=4,mbs=1,zero=1,schedule=zb_h1", global_batch_size=64)),
        ("schedules", question(layout="dp=2,pp=4,mbs=1,zero=1", global_batch_size=20)),
        ("step", question("tiny-moe", "dp=2,ep=2,pp=2,vpp=2,schedule=interleaved,mbs=1", sequence_length=256)),
    ],
)  # fmt: skip
def test_answers_have_the_schema(kind: str, asked: Json | None) -> None:
    rows = ask(kind, asked)
    assert rows
    assert [misfit for row in rows for misfit in misfits(row, schema_of(row), row["kind"])] == []
    assert {row["version"] for row in rows} == {VERSION}


def test_the_check_of_the_schema_can_fail() -> None:
    row = ask("memory")[0]
    row["figures"]["total"]["bytes"] = "many"
    del row["command"]
    row["more"] = 1
    assert misfits(row, schema_of(row), "m") == ["m.more", "m.command", "m.figures"]


# ---- what the command line says --------------------------------------------------------------------------------------


@cache
def row_of(seed: int) -> Json:
    """The answer to the question of a seed."""
    return ask("memory", drawn(seed))[0]


@seeds(12, wide=60)
def test_a_question_has_the_answer_of_the_command_line(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    asked = drawn(seed)
    row = row_of(seed)
    if row["kind"] == "error" or row["broken"]:
        words = shlex.split(read_question(asked).command) if row["kind"] == "memory" else []
        if words:
            assert main([*words[1:], "--json"]) == 2
            assert capsys.readouterr().err.startswith("error[")
        return
    told = told_by_the_command_line(row["command"], capsys)
    assert {k: v for k, v in told.items() if k != "explanation"} == row["plan"]
    check_sums(row)


def test_most_drawn_questions_are_legal() -> None:
    rows = [row_of(seed) for seed in range(30)]
    assert sum(row["kind"] == "memory" and not row["broken"] for row in rows) >= 20


def check_sums(row: Json) -> None:
    """Blocks add up to owners, owners to the rank, and the fullest rank is the plan's."""
    figures, (layout,) = row["figures"], row["plan"]["layouts"]
    for owner in figures["owners"]:
        assert sum(block["amount"]["bytes"] for block in owner["blocks"]) == owner["amount"]["bytes"], owner["name"]
        assert owner["amount"]["bytes"] == layout["memory"][f"{owner['name']}_gib"] * 2**30
    assert sum(owner["amount"]["bytes"] for owner in figures["owners"]) == figures["total"]["bytes"]
    assert figures["total"]["bytes"] == layout["memory"]["allocated_gib"] * 2**30
    by_pp_rank = [rank["amount"]["bytes"] for rank in figures["ranks"] for _ in rank["pp_ranks"]]
    assert by_pp_rank == [gib * 2**30 for gib in layout["memory"]["by_pp_rank_gib"]]
    assert sum(len(rank["pp_ranks"]) for rank in figures["ranks"]) == layout["layout"]["pp"]
    for rank in figures["ranks"]:
        assert sum(amount["bytes"] for amount in rank["owners"]) == rank["amount"]["bytes"]


@pytest.mark.parametrize("pp_rank", [0, 1, 3])
def test_any_rank_can_be_looked_into(pp_rank: int) -> None:
    asked = question(layout="dp=1,tp=2,pp=4,mbs=1,zero=0", global_batch_size=32)
    row = ask("memory", asked, pp_rank=pp_rank)[0]
    figures = row["figures"]
    assert figures["pp_rank"] == pp_rank and [r["pp_ranks"] for r in figures["ranks"] if r["shown"]] == [[pp_rank]]
    for owner in figures["owners"]:
        assert sum(block["amount"]["bytes"] for block in owner["blocks"]) == owner["amount"]["bytes"]
    assert figures["total"]["bytes"] == figures["ranks"][pp_rank]["amount"]["bytes"]
    assert row["plan"] == ask("memory", asked)[0]["plan"]  # the plan is about the fullest


def test_a_rank_that_is_not_there_is_the_fullest() -> None:
    assert ask("memory", pp_rank=7)[0]["figures"]["pp_rank"] == 0


def test_the_run_file_is_the_plans(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    asked = question(layout="dp=2,tp=2,pp=2,mbs=1,zero=1,recompute=full")
    row, out = ask("run_file", asked)[0], tmp_path / "run.toml"
    command = shlex.split(read_question(asked).command)
    assert main([*command[1:], "--out", str(out)]) == 0
    capsys.readouterr()
    assert row["text"].splitlines()[3:] == out.read_text().splitlines()[3:]


def test_a_block_has_its_line_of_code() -> None:
    figures = ask("memory")[0]["figures"]
    lines = {block["line"] for owner in figures["owners"] for block in owner["blocks"]} - {""}
    for line in (line for line in lines if ":" in line):
        found = figures["sources"][line]
        assert found["lines"][found["line"] - found["first"]].strip()
        assert found["line"] == int(line.rpartition(":")[2])
    (largest,) = [b for o in figures["owners"] if o["name"] == "activations" for b in o["blocks"][:1]]
    assert largest["formula"] == "4·B·S·F" and largest["times"] == "32 × "
    assert figures["legend"]["F"] == "14336, MLP hidden size"


# ---- the step, and what would fit ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "asked",
    [
        question(),
        question(layout="dp=2,tp=2,pp=2,mbs=1,zero=2", global_batch_size=64),
        question(layout="dp=2,pp=4,mbs=1,zero=0,schedule=gpipe", global_batch_size=16),
        question("tiny-moe", "dp=2,ep=2,pp=2,mbs=1", sequence_length=256, global_batch_size=64),
    ],
)
def test_the_curve_stays_within_what_is_allocated(asked: Json) -> None:
    """And reaches it, but for the free part of the arena, and for the bound of what routing decides."""
    row, figures = ask("step", asked)[0], ask("memory", asked)[0]["figures"]
    assert row["allocated"] == figures["total"]
    most = max(point["total"]["bytes"] for point in row["points"])
    assert row["points"][row["peak"]]["total"]["bytes"] == most
    assert (
        (0.85 if asked["model"]["name"] == "tiny-moe" else 0.98) * row["allocated"]["bytes"]
        < most
        <= row["allocated"]["bytes"]
    )
    held = sum(one["amount"]["bytes"] for one in row["held"])
    assert all(p["total"]["bytes"] == held + p["activations"] + p["workspace"] for p in row["points"])
    places = [point["at"] for point in row["points"]]
    assert places == sorted(places) and places[0] >= 0 and places[-1] <= 1


def test_a_shortened_step_holds_as_much_as_the_whole() -> None:
    """Fewer micro-batches are drawn only where the rest repeat them: the same most and least bytes."""
    for layout in ("dp=2,pp=4,mbs=1", "dp=1,pp=4,vpp=2,schedule=interleaved,mbs=1", "dp=4,pp=2,schedule=zb_h1,mbs=1"):
        asked = read_question(question("gpt2", layout, sequence_length=256, global_batch_size=128))
        plan = plan_one(asked.ask, asked.settings, estimator)
        short = shortened(plan.best.layout)
        assert short.gradient_accumulation_steps < plan.best.layout.gradient_accumulation_steps
        prices = plan.search.estimators[asked.ask.precision]
        assert prices.composer.rank(short, 0).arena == prices.composer.rank(plan.best.layout, 0).arena
    asked = read_question(question("tiny", "dp=1,pp=2,schedule=gpipe,mbs=1", sequence_length=256, global_batch_size=16))
    layout = plan_one(asked.ask, asked.settings, estimator).best.layout
    assert shortened(layout) == layout  # each micro-batch more is held too


def test_what_would_fit_is_what_the_planner_says(capsys: pytest.CaptureFixture[str]) -> None:
    asked = question("llama-3.1-8b", "dp=8,mbs=2,zero=1", gpu="H100")
    assert not ask("memory", asked)[0]["figures"]["fits"]
    *rows, end = ask("fits", asked)
    assert end["tried"] == len(rows) + end["refused"]
    assert {True, False} == {row["fits"] for row in rows}
    for row in rows[::4]:
        told = told_by_the_command_line(read_question(row["question"]).command, capsys)
        (layout,) = told["layouts"]
        assert layout["memory"]["allocated_gib"] * 2**30 == row["amount"]["bytes"]
        assert layout["time"]["step_s"] == row["seconds"]
        assert bool(told["counts"]["fit"]) == row["fits"]


# ---- a page that is not ours -----------------------------------------------------------------------------------------

ATOMS = st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats() | st.text(max_size=8)
TREES = st.recursive(
    ATOMS, lambda s: st.lists(s, max_size=3) | st.dictionaries(st.text(max_size=6), s, max_size=3), max_leaves=6
)


def mutated(draw: st.DrawFn, tree: Any) -> Any:
    """A question with one part replaced, added or left out."""
    if not isinstance(tree, dict) or draw(st.integers(0, 3)) == 0:
        return draw(TREES)
    name = draw(st.sampled_from([*tree, "more"]))
    if draw(st.integers(0, 5)) == 0:
        return {k: v for k, v in tree.items() if k != name}
    return {**tree, name: mutated(draw, tree.get(name))}


@st.composite
def requests(draw: st.DrawFn) -> Any:
    kind = draw(st.sampled_from(["memory", "memory", "run_file", "opening", "x"]))
    base = question("tiny", "dp=2,mbs=1,zero=1", sequence_length=256, global_batch_size=16)
    request = {"version": VERSION, "kind": kind, "question": mutated(draw, base), "pp_rank": draw(st.none() | ATOMS)}
    return mutated(draw, request) if draw(st.integers(0, 5)) == 0 else request


@draws(60, wide=1000)
@given(request=requests())
def test_whatever_a_page_sends_is_answered(request: Any) -> None:
    rows = list(answer(request, OPENING))
    assert rows and all(row["kind"] in ("memory", "run_file", "opening", "error") for row in rows)
    assert all(misfits(row, schema_of(row), "") == [] for row in json.loads(json.dumps(rows)))


@pytest.mark.parametrize(
    "change",
    [
        lambda q: q | {"model": {"name": "/etc/passwd"}}, lambda q: q | {"model": {"name": "."}},
        lambda q: q | {"model": {"name": "../config.json"}}, lambda q: q | {"gpu": "../8xh200.toml"},
        lambda q: q | {"gpu": "H200@nowhere"}, lambda q: q | {"layout": {"dp": "1,tp=2"}},
        lambda q: q | {"layout": {"dp": 2**40}}, lambda q: q | {"parts": {"device": "cuda"}},
    ],
)  # fmt: skip
def test_no_file_is_read_and_no_option_smuggled(change: Callable[[Json], Json]) -> None:
    [row] = ask("memory", change(question()))
    assert row["kind"] == "error" and row["error"]["exit_code"] == 2
    assert "Errno" not in row["text"] and "cannot be read" not in row["text"]


def test_a_config_is_a_model_with_a_hostile_name() -> None:
    config = {"model_type": "llama", "_name_or_path": "<img src=x onerror=alert(1)>", "hidden_size": 64,
              "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128,
              "vocab_size": 512, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "rope_theta": 1e4,
              "tie_word_embeddings": False}  # fmt: skip
    asked: Json = question("tiny", "dp=1,mbs=1", sequence_length=256, global_batch_size=8)
    asked["model"] = {"name": "my.json", "config": config}
    row = ask("memory", asked)[0]
    assert row["plan"]["model"]["parameters"] > 0
    assert row["command"].startswith("penteract plan config.json ")
    assert Question.__required_keys__ == row["question"].keys()
