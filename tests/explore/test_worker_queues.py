"""Worker processes: one that ends is replaced, one that does not stop is ended, and whole answers are remembered."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any

from explore.drawn_questions import question
from penteract.explore.server.remembered import RememberedAnswers
from penteract.explore.server.worker_queues import WorkerQueues

TINY = question("tiny", "dp=2,mbs=1,zero=1", sequence_length=256, global_batch_size=16)
OPENING: Any = TINY


def request(kind: str) -> dict[str, Any]:
    return {"version": 1, "kind": kind, "question": TINY}


async def kinds(queues: WorkerQueues, kind: str) -> list[str]:
    return [json.loads(row)["kind"] async for row in queues.rows(request(kind))]


async def with_queues(use: Any) -> None:
    queues = WorkerQueues(OPENING)
    await queues.start()
    try:
        await use(queues)
    finally:
        await queues.end()


def run(use: Any) -> None:
    """In a thread of its own: a browser of other tests has an event loop in this one."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(lambda: asyncio.run(with_queues(use))).result()


def test_a_worker_that_ends_is_an_answer_and_the_next_question_has_another() -> None:
    async def use(queues: WorkerQueues) -> None:
        assert await kinds(queues, "memory") == ["memory"]
        first = queues.prices.worker
        assert first
        os.kill(first.process.pid, signal.SIGKILL)
        await first.process.wait()
        assert await kinds(queues, "memory") == ["error"]
        assert await kinds(queues, "memory") == ["memory"]
        assert queues.prices.worker is not first

    run(use)


def test_an_answer_that_nobody_reads_is_stopped_and_its_worker_goes_on() -> None:
    async def use(queues: WorkerQueues) -> None:
        worker = queues.searches.worker
        async with aclosing(queues.rows(request("fits"))) as rows:
            async for _ in rows:
                break  # the page has gone after the first row
        assert queues.searches.worker is worker and worker and not worker.dead
        whole = [row async for row in queues.rows(request("fits"))]  # what was stopped is not remembered
        assert json.loads(whole[-1])["kind"] == "fits_end"
        assert [row async for row in queues.rows(request("fits"))] == whole

    run(use)


def test_a_worker_remembers_the_newest_answers() -> None:
    remembered = RememberedAnswers(most=30)
    for request in (b"one", b"two"):
        remembered.keep(request, [b"abcd", b"efgh"])
    assert remembered.find(b"one") == (b"abcd", b"efgh")
    remembered.keep(b"more", [b"x" * 15])
    assert remembered.find(b"two") is None  # `one` was used after it
    assert remembered.find(b"one") and remembered.find(b"more") == (b"x" * 15,) and remembered.bytes == 30
    remembered.keep(b"large", [b"x" * 30])
    assert remembered.find(b"large") is None and remembered.bytes == 0


def test_a_worker_that_does_not_stop_is_replaced() -> None:
    async def use(queues: WorkerQueues) -> None:
        worker = queues.searches.worker
        assert worker
        async with aclosing(queues.rows(request("fits"))) as rows:
            async for _ in rows:
                os.kill(worker.process.pid, signal.SIGSTOP)  # as if it hung
                break
        assert worker.dead
        assert (await kinds(queues, "fits"))[-1] == "fits_end"
        assert queues.searches.worker is not worker

    run(use)
