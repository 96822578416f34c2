"""What the server answers: the files of the page, and `POST /api/ask`, whose answer is lines of JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from penteract.explore.answering import answer
from penteract.explore.measured_sweeps.read_sweeps import SweepFolders
from penteract.explore.schemas.page_schema import MOST_BYTES, MOST_FILE_BYTES, VERSION, Answer, Question
from penteract.explore.server.guard import Guard, Keys
from penteract.explore.server.worker_queues import WorkerQueues
from penteract.explore.training_runs.read_profiles import ProfileFolders
from penteract.explore.training_runs.read_runs import RunFolders
from penteract.explore.training_runs.run_answer import runs_answer

FILES = "/api/files"  # for requests with files that the reader opened in the page
ASSETS = Path(__file__).parent.parent / "assets"
_TYPES: Mapping[str, str] = {
    ".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8", ".svg": "image/svg+xml", ".woff2": "font/woff2",
    ".json": "application/json", ".txt": "text/plain; charset=utf-8",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Given:
    """The folders that the explorer was given: it reads no other. A folder of runs may have profiles too."""

    runs: Path | None = None
    profiles: Path | None = None
    sweeps: Path | None = None


def application(opening: Question, keys: Keys, port: int, given: Given) -> ASGIApp:
    """The server of one explorer, which opens with this question."""
    runs = RunFolders(given.runs) if given.runs else None
    sweeps = SweepFolders(given.sweeps) if given.sweeps else None
    profiled = ProfileFolders(tuple(at for at in (given.profiles, given.runs) if at))
    queues, files = WorkerQueues(opening), _files()

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        await queues.start()
        yield
        await queues.end()

    async def file(request: Request) -> Response:
        found = files.get(request.path_params.get("path", "index.html"))
        return Response(found[0], media_type=found[1]) if found else PlainTextResponse("no such file", 404)

    async def ask(request: Request) -> Response | _Lines:
        body, most = bytearray(), MOST_FILE_BYTES if request.url.path == FILES else MOST_BYTES
        try:
            async for part in request.stream():
                body += part
                if len(body) > most:
                    return PlainTextResponse("the question is too long", 413)
        except ClientDisconnect:
            return Response(status_code=400)
        try:
            asked: object = json.loads(body)
        except (ValueError, RecursionError):
            return PlainTextResponse("not JSON", 400)
        if (found := runs) and _is_about("runs", asked):
            return _Lines(_read(found.turn, lambda: runs_answer(found, cast("Any", asked).get("runs"))))
        if _is_about("profile", asked):
            return _Lines(_read(profiled.turn, lambda: next(answer(asked, opening, profiles=profiled))))
        if (folders := sweeps) and _is_about("bench", asked) and not _has_file(asked):
            return _Lines(_read(folders.turn, lambda: next(answer(asked, opening, sweeps=folders))))
        return _Lines(queues.rows(asked))

    routes = [Route("/", file), Route("/assets/{path:path}", file), *(Route(path, ask, methods=["POST"]) for path in
              ("/api/ask", FILES))]  # fmt: skip
    return Guard(Starlette(routes=routes, lifespan=lifespan), keys, port)


def _is_about(kind: str, asked: object) -> bool:
    request = cast("dict[str, Any]", asked) if isinstance(asked, dict) else {}
    return request.get("kind") == kind and request.get("version") == VERSION


def _has_file(asked: Any) -> bool:
    options = asked.get("bench")
    return isinstance(options, dict) and "file" in cast("dict[str, Any]", options)


async def _read(turn: asyncio.Lock, read: Callable[[], Answer]) -> AsyncGenerator[bytes]:
    """The answer from folders, which a thread reads; one request after another, as they share what was read."""
    async with turn:
        found = await asyncio.to_thread(lambda: json.dumps(read(), allow_nan=False).encode())
    yield found + b"\n"


def _files() -> Mapping[str, tuple[bytes, str]]:
    """The files of the page and their types, by path: nothing else is ever read."""
    return {
        path.relative_to(ASSETS).as_posix(): (path.read_bytes(), _TYPES[path.suffix])
        for path in sorted(ASSETS.rglob("*"))
        if path.is_file() and path.suffix in _TYPES
    }


class _Lines:
    """A response of lines as they come. When the page goes away, the answer is stopped at once."""

    def __init__(self, rows: AsyncGenerator[bytes]) -> None:
        self.rows = rows

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(send))
        gone = asyncio.create_task(_disconnected(receive))
        await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not sending.done():
            sending.cancel()
        await asyncio.gather(sending, gone, return_exceptions=True)
        await self.rows.aclose()

    async def _send(self, send: Send) -> None:
        headers = [(b"content-type", b"application/x-ndjson; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for row in self.rows:
            await send({"type": "http.response.body", "body": row, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
