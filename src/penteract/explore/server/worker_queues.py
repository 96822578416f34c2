"""Two queues of requests, each with a worker process that answers one request after another. So a search, which takes
seconds, never delays a price, which takes milliseconds.

When a page closes its request, the worker gets SIGUSR1 and stops computing. A worker that does not stop in time is
killed, and a spare one takes its place, which has imported the planner already.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, cast

from penteract.errors import Bug
from penteract.explore.schemas.page_schema import VERSION, Question
from penteract.explore.server.answering_process import END

STOP_SECONDS = 0.1  # how long a worker may take to stop, before it is killed
_LONGEST_LINE = 2**26  # bytes
# Kinds of requests that take long (`page_schema.py`); all others go to the queue of prices.
_SEARCHES = ("step", "fits", "schedule", "schedules", "search", "what_if", "ranks", "bench")


@dataclass(slots=True)
class Worker:
    """A worker process (`answering_process.py`). `dead`: it has ended, or was told to."""

    process: Process
    dead: bool = False

    @staticmethod
    async def start() -> Worker:
        """Start a process, which imports the planner at once. It has a session of its own, so that Ctrl-C in the
        terminal does not reach it."""
        command = (sys.executable, "-m", "penteract.explore.server.answering_process")
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, limit=_LONGEST_LINE, start_new_session=True
        )  # fmt: skip
        return Worker(process)

    async def rows(self, request: bytes) -> AsyncGenerator[bytes]:
        """Send a request (one line of JSON), and yield the lines of its answer. Raises Bug if the process ends."""
        assert self.process.stdin and self.process.stdout
        try:
            self.process.stdin.write(request)
            await self.process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            self.dead = True
        while not self.dead:
            line = await self.process.stdout.readline()
            if line == END:
                return
            if not line:
                break
            yield line
        self.dead = True
        raise Bug("WORKER", "a worker process has ended", found=str(self.process.returncode), fix="ask again")

    async def stop(self) -> bool:
        """Stop the answer that is being computed, and drop the rest of its lines. -> whether the process can take
        another request; False also if it has not stopped within `STOP_SECONDS`."""
        assert self.process.stdout
        if self.dead:
            return False
        self.process.send_signal(signal.SIGUSR1)
        try:
            async with asyncio.timeout(STOP_SECONDS):
                while (line := await self.process.stdout.readline()) != END:
                    if not line:
                        return False
        except TimeoutError:
            return False
        return True

    async def end(self) -> None:
        """Kill the process, and wait until it has ended."""
        assert self.process.stdin and self.process.stdout
        self.dead = True
        if self.process.returncode is None:
            self.process.kill()
        self.process.stdin.close()
        await self.process.stdout.read()
        await self.process.wait()


@dataclass(slots=True)
class SpareWorker:
    """A worker that has started ahead of need, for a queue that loses its own."""

    _next: asyncio.Task[Worker] | None = None

    def warm(self) -> None:
        """Start a worker in the background."""
        self._next = asyncio.create_task(Worker.start())

    async def take(self) -> Worker:
        """The spare worker, once it has started. Another one is started in its place."""
        assert self._next
        worker = await self._next
        self.warm()
        return worker

    async def end(self) -> None:
        """End the spare worker, if there is one."""
        if self._next:
            await (await self._next).end()


@dataclass(slots=True)
class WorkerQueue:
    """Answers one request after another, in the order in which they come. A request that its page has closed leaves the
    queue. `lock` is held by the request that is being answered; the others wait for it."""

    spare: SpareWorker
    worker: Worker | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def rows(self, request: bytes) -> AsyncGenerator[bytes]:
        """The lines of the answer to a request, once earlier ones are answered. Closing the iterator stops the
        answer."""
        async with self.lock:
            if self.worker is None or self.worker.dead:
                if self.worker:
                    await self.worker.end()
                self.worker = await self.spare.take()
            done = False
            try:
                async for row in self.worker.rows(request):
                    yield row
                done = True
            finally:
                if not done and not await self.worker.stop():
                    await self.worker.end()


@dataclass(slots=True)
class WorkerQueues:
    """The queue of prices and the queue of searches. `opening`: the question that the page opens with."""

    opening: Question
    spare: SpareWorker = field(default_factory=SpareWorker)
    prices: WorkerQueue = field(init=False)
    searches: WorkerQueue = field(init=False)

    def __post_init__(self) -> None:
        """Make the queues; `start` starts their workers."""
        self.prices, self.searches = WorkerQueue(self.spare), WorkerQueue(self.spare)

    async def start(self) -> None:
        """Start all workers; they import the planner while the browser opens."""
        self.prices.worker, self.searches.worker = await asyncio.gather(Worker.start(), Worker.start())
        self.spare.warm()

    async def end(self) -> None:
        """End all workers."""
        for queue in (self.prices, self.searches):
            if queue.worker:
                await queue.worker.end()
        await self.spare.end()

    async def rows(self, request: Any) -> AsyncGenerator[bytes]:
        """The lines of the answer to a request, from the queue of its kind. If the worker ends, the answer is one line
        with the error."""
        kind = cast("dict[str, Any]", request).get("kind") if isinstance(request, dict) else ""
        queue = self.searches if kind in _SEARCHES else self.prices
        line = json.dumps({"request": request, "opening": self.opening}).encode() + b"\n"
        rows = queue.rows(line)
        try:
            async for row in rows:
                yield row
        except Bug as error:
            message = {"version": VERSION, "kind": "error", "text": str(error), "error": error.as_dict(), "control": ""}
            yield json.dumps(message).encode() + b"\n"
        finally:
            await rows.aclose()
