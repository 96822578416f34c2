"""The explorer as people start it: the command in a process of its own, and a plain client of it."""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parents[2] / "src"


@dataclass(frozen=True)
class Reply:
    """What a request got."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.body.splitlines()]


@dataclass
class Served:
    """A running explorer. `cookie`: of the session, once the address was opened."""

    process: subprocess.Popen[str]
    port: int
    token: str
    cookie: str = ""

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str, **headers: str) -> Reply:
        return self.send("GET", path, None, headers)

    def send(self, method: str, path: str, body: str | bytes | None, headers: dict[str, str]) -> Reply:
        """One request with exactly these headers (a Host of their own replaces the usual one)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, body, {k.replace("_", "-"): v for k, v in headers.items()})
        answer = connection.getresponse()
        reply = Reply(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        connection.close()
        return reply

    def open(self) -> Reply:
        """Open the printed address, and keep the cookie."""
        reply = self.get(f"/?token={self.token}")
        if "set-cookie" in reply.headers:
            self.cookie = reply.headers["set-cookie"].split(";")[0]
        return reply

    def ask(self, kind: str, **request: Any) -> list[dict[str, Any]]:
        """The rows of an answer, asked as the page asks."""
        body = json.dumps({"version": 1, "kind": kind, **request})
        reply = self.send("POST", "/api/ask", body, {"Origin": self.origin, "Cookie": self.cookie})
        assert reply.status == 200, reply.body
        return reply.rows


@contextmanager
def served(*words: str) -> Generator[Served]:
    """`penteract explore` with these words, from its address to Ctrl-C."""
    command = (sys.executable, "-m", "penteract", "explore", *words, "--no-browser", "--json")
    env = os.environ | {"PYTHONPATH": str(SOURCES)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout
        address = json.loads(process.stdout.readline())["address"]
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\?token=([\w-]{30,})", address)
        assert found, address
        yield Served(process, int(found[1]), found[2])
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(10)


def link(question: dict[str, Any], pp_rank: int | None = None, view: str = "memory", **more: Any) -> str:
    """A state as the fragment of an address, as the page writes it. `more`: its parts that may be missing."""
    packed = zlib.compressobj(wbits=-15)
    data = (
        packed.compress(json.dumps({"question": question, "pp_rank": pp_rank, "view": view, **more}).encode())
        + packed.flush()
    )
    return "#q=" + base64.urlsafe_b64encode(data).decode().rstrip("=")


def unlink(fragment: str) -> dict[str, Any]:
    """The state of a fragment."""
    text = fragment.removeprefix("#q=")
    return json.loads(zlib.decompress(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)), wbits=-15))
