"""The server by a plain client: who may ask, and what comes with every response."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Generator
from typing import Any

import pytest

from explore.drawn_questions import question
from explore.served import Served, link, served, unlink
from penteract.cli import main
from penteract.explore.server.guard import HEADERS
from penteract.explore.server.routes import ASSETS

TINY = question("tiny", "dp=2,mbs=1,zero=1", sequence_length=256, global_batch_size=16)


@pytest.fixture(scope="module")
def here() -> Generator[Served]:
    with served() as running:
        running.open()
        yield running


def post(here: Served, body: Any = None, **headers: str) -> int:
    """The status of a question with these headers in place of the page's own."""
    own = {"Origin": here.origin, "Cookie": here.cookie} | {k.replace("_", "-"): v for k, v in headers.items()}
    text = json.dumps(body or {"version": 1, "kind": "opening"})
    return here.send("POST", "/api/ask", text, {k: v for k, v in own.items() if v}).status


def test_the_address_opens_once_and_becomes_a_cookie() -> None:
    with served() as running:
        assert running.get("/?token=wrong").status == 403
        opened = running.open()
        assert (opened.status, opened.headers["location"]) == (303, "/")
        cookie = opened.headers["set-cookie"].lower()
        assert "httponly" in cookie and "samesite=strict" in cookie and running.token not in running.cookie
        assert running.get(f"/?token={running.token}").status == 403
        assert post(running) == 200


def test_only_the_page_of_this_machine_may_ask(here: Served) -> None:
    assert post(here) == 200
    assert post(here, Cookie="") == 403
    assert post(here, Cookie=f"{here.cookie.partition('=')[0]}=guessed") == 403
    assert post(here, Origin="") == 403
    assert post(here, Origin="http://evil.example") == 403
    assert post(here, Origin=f"http://localhost:{here.port}") == 403  # another origin than the Host
    assert post(here, Host="evil.example") == 403
    assert post(here, Host=f"evil.example:{here.port}", Origin=f"http://evil.example:{here.port}") == 403
    assert post(here, Sec_Fetch_Site="cross-site") == 403
    forwarded = {"Host": "localhost:9999", "Origin": "http://localhost:9999"}  # a port of another machine, by ssh
    assert post(here, **forwarded) == 200
    assert here.send("PUT", "/", b"", {}).status == 405
    assert here.get("/", Host="169.254.1.1").status == 403
    assert here.get("/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate").status == 200  # a shared link
    assert here.get("/assets/look.css", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors").status == 403


def test_only_files_of_the_page_are_sent(here: Served) -> None:
    for path in (
        "/assets/../server/guard.py",
        "/assets/%2e%2e/server/guard.py",
        "/assets//etc/passwd",
        "/pyproject.toml",
    ):
        assert here.get(path).status == 404, path
    for file in ASSETS.rglob("*"):
        if file.is_file():
            found = here.get(f"/assets/{file.relative_to(ASSETS).as_posix()}")
            assert (found.status, found.body) == (200, file.read_bytes()), file


def test_every_response_is_of_a_closed_page(here: Served) -> None:
    for reply in (here.get("/"), here.get("/none"), here.get("/api/ask"), here.get("/", Host="evil.example")):
        assert {name: reply.headers[name] for name in HEADERS} == HEADERS
        assert "server" not in reply.headers
    policy = HEADERS["content-security-policy"]
    assert "unsafe-inline" not in policy and "unsafe-eval'" not in policy.replace("'wasm-unsafe-eval'", "")
    page = here.get("/").body.decode()
    assert "<script>" not in page and "style=" not in page and " on" not in page.split("<body>")[1]


@pytest.mark.parametrize("body", ["", "{", "[1]", '"x"', "9" * 3000, "[" * 100_000, '{"version": 2}'])
def test_what_is_no_question_is_refused(here: Served, body: str) -> None:
    reply = here.send("POST", "/api/ask", body, {"Origin": here.origin, "Cookie": here.cookie})
    assert reply.status == 400 or [row["kind"] for row in reply.rows] == ["error"]


def test_a_question_has_an_end(here: Served) -> None:
    big = json.dumps({"version": 1, "kind": "memory", "question": "x" * 2**20})
    assert here.send("POST", "/api/ask", big, {"Origin": here.origin, "Cookie": here.cookie}).status == 413
    assert here.ask("memory", question=TINY)[0]["figures"]


def test_the_command_says_what_is_wrong_in_a_line() -> None:
    for words, said in (
        (["--port", "99999"], "error[PORT]: no port · --port · found 99999 / allowed 0 to 65535 · fix: --port 0"),
        (["nosuchmodel"], "error[MODEL]: no published model of that name"),
        (["--gpus", "8xH2O0"], "error[GPU]: no such GPU"),
        (["--layout", "tpp=2"], "error[SETTING]: no such setting of a layout"),
        (["--layout", "tp=3"], "error[LAYOUT]: tp·pp·cp = 3·1·1 does not divide the number of ranks, 8 · --layout"),
        (["--layout", "dp=2,tp=2"], "error[LAYOUT]: dp·tp·pp·cp = 2·2·1·1 = 4, not the number of ranks, 8 · --layout"),
        (["--gpus", "64x4xH100"], "error[CLUSTER]: the page knows the usual nodes of published GPUs"),
    ):
        command = [sys.executable, "-m", "penteract", "explore", "--no-browser", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert (done.returncode, done.stdout) == (2, ""), words
        assert done.stderr.startswith(said), done.stderr
        assert done.stderr.count("\n") == 1


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        command = [sys.executable, "-m", "penteract", "explore", "--no-browser", "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error[PORT]: cannot be used: Address already in use · --port · found {port}")


def test_a_layout_of_the_command_opens_the_page() -> None:
    words = ("llama-3.1-70b", "--gpus", "32xH100", "--layout", "tp=8,pp=2,zero=1", "--batch", "64seqs")
    with served(*words) as running:
        running.open()
        [opening] = running.ask("opening")
        assert opening["question"]["gpu"] == "H100" and opening["question"]["layout"]["dp"] == 2
        [row] = running.ask("memory", question=opening["question"])
        assert row["plan"]["cluster"]["name"] == "4x8xH100"


def test_a_link_is_the_state() -> None:
    assert unlink(link(TINY, 3)) == {"question": TINY, "pp_rank": 3, "view": "memory"}


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("penteract.cli.explore.find_spec", lambda name: None)
    assert main(["explore", "--no-browser"]) == 2
    said = "error[EXTRA]: explore needs starlette and uvicorn · found none · fix: pip install 'penteract[explore]'\n"
    assert capsys.readouterr().err == said
