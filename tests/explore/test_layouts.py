"""Answers of the Layouts view: the planner's own, to the last digit; steps that add up; what a page may send."""

from __future__ import annotations

import asyncio
import json
import shlex
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from draws import further, seeds
from explore.drawn_questions import drawn, question
from explore.test_answers import OPENING, ask, misfits, rows_of, schema_of
from penteract.cli import main
from penteract.explore.answering import answer
from penteract.explore.schemas.page_schema import VERSION
from penteract.explore.server import worker_queues
from penteract.explore.server.worker_queues import WorkerQueues

Json = dict[str, Any]
TINY = question("tiny", "dp=4,mbs=1", sequence_length=256, global_batch_size=16)
MIXED = question("tiny-moe", "dp=2,tp=2,mbs=1", sequence_length=256, global_batch_size=16, gpu="H100")
SPLIT = question("gpt2", "dp=2,pp=2,tp=2,mbs=1", sequence_length=1024, global_batch_size=32)
PAIR = question("gpt2", "dp=1,pp=2,mbs=1", sequence_length=1024, global_batch_size=8)
LONG = question("llama-3.1-405b", "dp=8,tp=8,pp=8,mbs=1", global_batch_size=512)
COST: Json = {"tokens": "1T", "usd_per_gpu_hour": 2.5}


def by_command(command: str, capsys: pytest.CaptureFixture[str]) -> Json:
    assert main([*shlex.split(command)[1:], "--json"]) in (0, 2)
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("asked", "search"),
    [
        (TINY, COST), (SPLIT, {"fix": {"zero": [3, 1], "schedule": ["1f1b"]}}),
        (MIXED, {"fix": {"recompute": ["none"], "tp": [1, 2], "micro_batch_size": [2]}}),
        *further([(TINY, {}), (MIXED, COST)]),
    ],
)  # fmt: skip
def test_the_search_is_the_command_lines(asked: Json, search: Json, capsys: pytest.CaptureFixture[str]) -> None:
    rows = ask("search", asked, search=search)
    first, last = rows[0], rows[-1]
    assert (first["kind"], last["kind"]) == ("search", "search_end")
    told = by_command(first["command"], capsys)
    assert len(first["top"]) == len(told["layouts"]) > 0
    for row, layout in zip(first["top"], told["layouts"], strict=True):
        assert row["point"]["seconds"] == layout["time"]["step_s"]
        assert row["point"]["rate"] == layout["tokens_per_s_per_gpu"]
        assert row["point"]["amount"]["bytes"] / 2**30 == layout["memory"]["allocated_gib"]
        assert row["limited_by"] == layout["limited_by"]
        assert {k: layout["layout"].get(k) for k in ("dp", "tp", "pp")} == {
            k: row["point"]["layout"].get(k, 1) for k in ("dp", "tp", "pp")
        }
    assert {one["why"]: one["count"] for one in first["left_out"]} == {
        why: n for why, n in told["counts"]["refused"].items() if n
    }
    if search == COST:
        assert float(first["top"][0]["hours"].replace("\u2009", "").replace("\u202f", "").replace(" ", "")) == round(
            told["budget"]["gpu_hours"]
        )


@pytest.mark.parametrize("asked", [TINY, PAIR, *further([(SPLIT,)])])
def test_rows_have_the_schema_and_the_front_is_one(asked: Json) -> None:
    rows = [*ask("search", asked), *ask("what_if", asked), *ask("compare", asked, search={"against": {"dp": 1}})]
    assert [misfit for row in rows for misfit in misfits(row, schema_of(row), row["kind"])] == []
    points = next(row for row in rows if row["kind"] == "search_end")["points"]
    simulated = [p for p in points if p["simulated"] and p["fits"]]
    assert points and any(p["front"] for p in points)
    for one in simulated:
        better = [p for p in simulated if p is not one and p["seconds"] <= one["seconds"]
                  and p["amount"]["bytes"] <= one["amount"]["bytes"]]  # fmt: skip
        assert one["front"] == (not better) or [p for p in better if p["seconds"] == one["seconds"]]


@seeds(10, first=100)
def test_a_step_is_its_ideal_and_what_is_lost(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    """To the picosecond; and each part is the planner's own."""
    [row] = ask("compare", drawn(seed))
    if row["kind"] == "error":
        return
    [side] = row["sides"]
    [told] = by_command(row["command"], capsys)["layouts"]
    size = {step["name"]: step["picoseconds"] for step in side["waterfall"]}
    assert sum(size.values()) == side["picoseconds"] == round(told["time"]["step_s"] * 10**12)
    for part in ("pointwise", "tensor", "data", "pipeline", "update"):
        assert size.get(part, 0) == round(told["time"][f"{part}_s"] * 10**12)
    products = sum(round(told["time"][f"{part}_s"] * 10**12) for part in ("compute", "attention"))
    assert size["ideal"] + size.get("compute", 0) + size.get("attention", 0) == products


def test_two_layouts_differ_by_what_the_planner_says(capsys: pytest.CaptureFixture[str]) -> None:
    [row] = ask("compare", question(), search={"against": {"dp": 8, "zero": 3}})
    a, b = (
        by_command(f"penteract plan llama-3.1-8b --gpus 8xH200 --seq 8192 --batch 128seqs --layout {layout}", capsys)
        for layout in ("dp=8,mbs=2,zero=1", "dp=8,zero=3")
    )
    was, now = a["layouts"][0], b["layouts"][0]
    for one in row["differences"]:
        if one["what"] == "time":
            assert one["size"] == now["time"][f"{one['name']}_s"] - was["time"][f"{one['name']}_s"]
        else:
            assert one["size"] / 2**30 == now["memory"][f"{one['name']}_gib"] - was["memory"][f"{one['name']}_gib"]
    assert row["why"][0] == "Other settings: micro_batch_size 2 -> 1, zero 1 -> 3."
    assert [s["name"] for s in row["sides"]] == ["dp=8,mbs=2,zero=1", "dp=8,mbs=1,zero=3"]


def test_what_if_is_a_search_of_the_other_question() -> None:
    rows = ask("what_if", TINY, search=COST)
    assert {row["text"] for row in rows} >= {"8 GPUs", "2 GPUs", "sequences of 128"} and len(rows) >= 6
    for row in rows:
        assert not row["why_not"] and row["cost"].startswith("1T tokens: ")
        found = next(rows_of("search", row["question"], search={}))  # its front is another search
        assert found["top"][0]["point"]["name"] == row["name"]
        assert found["top"][0]["point"]["seconds"] == row["seconds"]


def test_what_does_not_fit_says_so() -> None:
    rows = ask("search", question("llama-3.1-70b", "dp=1,mbs=1"))
    assert not rows[0]["fits"] and rows[0]["verdict"].startswith("error[FIT]") and rows[0]["top"] == []
    assert rows[0]["notes"] and not any(p["fits"] for p in rows[-1]["points"])


@pytest.mark.parametrize(
    "search",
    [
        {"fix": {"tp": [3]}}, {"fix": {"tp": []}}, {"fix": {"tp": ["1,zero=3"]}}, {"fix": {"loss": ["chunked"]}},
        {"tokens": "many"}, {"tokens": 1}, {"usd_per_gpu_hour": -1}, {"usd_per_gpu_hour": 1e9}, {"more": 1}, 3,
        {"against": [1]}, {"fix": {"schedule": ["--out"]}},
    ],
)  # fmt: skip
def test_what_cannot_be_searched_is_an_error(search: Any) -> None:
    [row] = ask("search", TINY, search=search)
    assert row["kind"] == "error" and row["error"]["found"]


def test_the_best_so_far_is_told_while_it_searches() -> None:
    told: list[Any] = []
    request = {"version": VERSION, "kind": "search", "question": question("llama-3.1-8b", "dp=32,mbs=1", gpu="H100")}
    first = next(answer(request, OPENING, told.append))
    assert first["kind"] == "search" and told
    assert all(misfits(json.loads(json.dumps(row)), schema_of(row), "progress") == [] for row in told)
    assert any(row["best"] for row in told)


@pytest.mark.alone
def test_a_search_delays_no_price_and_stops_within_a_tenth_of_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search of a minute goes on after a price, which another process answers. It is stopped when its page goes: by
    itself, not as one that is killed, after a tenth of a second of its core."""
    monkeypatch.setattr(worker_queues, "STOP_SECONDS", 30)

    def request(kind: str, asked: Json) -> Json:
        return {"version": VERSION, "kind": kind, "question": asked}

    def worked(pid: int) -> float:
        """Seconds of a core that a process has had."""
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9

    async def use() -> None:
        queues = WorkerQueues(OPENING)
        await queues.start()
        try:
            assert [row async for row in queues.rows(request("compare", TINY))]  # both processes have begun
            assert [row async for row in queues.rows(request("search", TINY))]
            worker = queues.searches.worker
            assert worker is not None
            async with aclosing(queues.rows(request("search", LONG))) as rows:
                assert json.loads(await anext(rows))["kind"] == "search_progress"
                assert [row async for row in queues.rows(request("memory", TINY))]
                assert json.loads(await anext(rows))["kind"] == "search_progress"
                before = worked(worker.process.pid)
            assert worked(worker.process.pid) - before < 0.1
            assert queues.searches.worker is worker and not worker.dead
            kinds = [json.loads(row)["kind"] async for row in queues.rows(request("search", TINY))]
            assert kinds[-1] == "search_end"
        finally:
            await queues.end()

    with ThreadPoolExecutor(1) as thread:  # a browser of other tests has an event loop in this one
        thread.submit(lambda: asyncio.run(use())).result()
