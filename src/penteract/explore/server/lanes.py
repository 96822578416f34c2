"""Lanes of answers: each computes in a process of its own, one request after another. A search never delays a price.

A request whose page has gone is stopped: its process is told to, and one that does not stop at once is replaced by a
spare that is warm already.
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

PATIENCE = 0.1  # seconds in which a process stops
_LONGEST = 2**26  # bytes of a line
_SEARCHES = ("step", "fits", "schedule", "schedules", "search", "what_if", "ranks", "bench")


@dataclass(slots=True)
class Worker:
    """One process. `dead`: it has ended, or was told to."""

    process: Process
    dead: bool = False

    @staticmethod
    async def start() -> Worker:
        """A new process, which imports the planner at once. It is in a session of its own: Ctrl-C is not for it."""
        command = (sys.executable, "-m", "penteract.explore.server.answering_process")
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, limit=_LONGEST, start_new_session=True
        )  # fmt: skip
        return Worker(process)

    async def rows(self, request: bytes) -> AsyncGenerator[bytes]:
        """The lines of an answer. Raises Bug if the process ends."""
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
        """Stop the present answer. -> whether the process can take another one."""
        assert self.process.stdout
        if self.dead:
            return False
        self.process.send_signal(signal.SIGUSR1)
        try:
            async with asyncio.timeout(PATIENCE):
                while (line := await self.process.stdout.readline()) != END:
                    if not line:
                        return False
        except TimeoutError:
            return False
        return True

    async def end(self) -> None:
        """End the process, and wait until it has ended."""
        assert self.process.stdin and self.process.stdout
        self.dead = True
        if self.process.returncode is None:
            self.process.kill()
        self.process.stdin.close()
        await self.process.stdout.read()
        await self.process.wait()


@dataclass(slots=True)
class Spare:
    """One warm process, for a lane that loses its own."""

    _next: asyncio.Task[Worker] | None = None

    def warm(self) -> None:
        """Start one in the background."""
        self._next = asyncio.create_task(Worker.start())

    async def take(self) -> Worker:
        """The warm process; another is started."""
        assert self._next
        worker = await self._next
        self.warm()
        return worker

    async def end(self) -> None:
        """End the process that nobody took."""
        if self._next:
            await (await self._next).end()


@dataclass(slots=True)
class Lane:
    """Answers one request after another; those of pages that have gone leave the queue."""

    spare: Spare
    worker: Worker | None = None
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def rows(self, request: bytes) -> AsyncGenerator[bytes]:
        """The lines of an answer. Closing the iterator stops it."""
        async with self.turn:
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
class Lanes:
    """The lane of prices and that of searches."""

    opening: Question
    spare: Spare = field(default_factory=Spare)
    prices: Lane = field(init=False)
    searches: Lane = field(init=False)

    def __post_init__(self) -> None:
        """Make the lanes; `start` starts their processes."""
        self.prices, self.searches = Lane(self.spare), Lane(self.spare)

    async def start(self) -> None:
        """Start all processes; they import while the browser opens."""
        self.prices.worker, self.searches.worker = await asyncio.gather(Worker.start(), Worker.start())
        self.spare.warm()

    async def end(self) -> None:
        """End all processes."""
        for lane in (self.prices, self.searches):
            if lane.worker:
                await lane.worker.end()
        await self.spare.end()

    async def rows(self, request: Any) -> AsyncGenerator[bytes]:
        """The lines of the answer to a request, from its lane. A process that ends is an answer too."""
        kind = cast("dict[str, Any]", request).get("kind") if isinstance(request, dict) else ""
        lane = self.searches if kind in _SEARCHES else self.prices
        line = json.dumps({"request": request, "opening": self.opening}).encode() + b"\n"
        rows = lane.rows(line)
        try:
            async for row in rows:
                yield row
        except Bug as error:
            message = {"version": VERSION, "kind": "error", "text": str(error), "error": error.as_dict(), "control": ""}
            yield json.dumps(message).encode() + b"\n"
        finally:
            await rows.aclose()
