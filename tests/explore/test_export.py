"""The exported page: files under any path of any server, with the planner in the browser and nothing from elsewhere."""

from __future__ import annotations

import json
import shlex
import zipfile
from collections.abc import Generator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from draws import further
from explore.drawn_profiles import BEFORE, made, written
from explore.drawn_questions import drawn, question
from explore.drawn_sweep import drawn_folder
from explore.opened import Opened, opened
from explore.served import Served
from explore.test_answers import ask
from penteract.cli import main
from penteract.explore.answers.profiles.profile_answer import profile_answer
from penteract.explore.training_runs.read_profiles import ProfileFolders
from penteract.units import show_bytes, show_step

STARTS = 120_000  # ms, on a machine with other work
# What the page opens with: the search that is made at export is a small one.
OPENING = ("tiny", "--gpus", "2xH200", "--seq", "256", "--batch", "16seqs")
NEEDED = "18.29 MiB"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drawn_folder(tmp_path_factory.mktemp("given") / "sweeps")


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("given") / "profiles"
    for day, profile in ((25, made()), (24, made(BEFORE))):
        written(folder / f"2026-11-{day}_tiny", profile)
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, sweeps: Path, profiles: Path) -> Path:
    folder = tmp_path_factory.mktemp("web") / "some" / "path"
    assert (
        main(["explore", *OPENING, "--export", str(folder), "--sweeps", str(sweeps), "--profiles", str(profiles)]) == 0
    )
    return folder


@pytest.fixture(scope="module")
def web(site: Path) -> Generator[Served]:
    """A plain file server, and the site under a path of it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site.parents[1])))
    Thread(target=server.serve_forever, daemon=True).start()
    yield AnyServer(None, server.server_port, "")  # type: ignore[arg-type]
    server.shutdown()


class AnyServer(Served):
    """Its page lies under a path."""

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}/some/path"


@pytest.fixture(scope="module")
def live(browser: Any, web: Served) -> Generator[Opened]:
    """The page once its planner runs. All but its own origin is refused."""
    with opened(browser, web) as page:
        page.page.route(lambda url: not url.startswith((web.origin, "blob:", "data:")), lambda route: route.abort())
        page.page.goto(f"{web.origin}/")
        page.page.wait_for_selector(".sum", timeout=20_000)
        assert page.text(".made").startswith("made at export") and page.text(".big") == NEEDED
        page.page.wait_for_selector("#fits .done", timeout=20_000)  # the slower figures too
        page.page.click(".views >> text=Schedules")
        page.page.wait_for_selector("#lanes canvas", timeout=20_000)
        page.page.click(".views >> text=Layouts")
        page.page.wait_for_selector("#points canvas", timeout=20_000)
        page.page.wait_for_selector("#what-if .done", timeout=20_000)
        page.page.click(".views >> text=Bench")
        page.page.wait_for_selector("#heat .cell", timeout=20_000)
        page.page.click(".views >> text=Profile")
        page.page.wait_for_selector("#profile-lanes canvas", timeout=20_000)
        page.page.click(".views >> text=Memory")
        page.page.wait_for_selector(".made.live", timeout=STARTS)
        yield page
        assert page.said == []


def test_the_site_has_the_page_the_planner_and_a_python(site: Path) -> None:
    assert {p.name for p in site.iterdir()} == {"assets", "pyodide", "index.html", "first.json", "penteract.zip"}
    inside = zipfile.ZipFile(site / "penteract.zip").namelist()
    assert "penteract/explore/answering.py" in inside and "penteract/config/catalog/models/llama.toml" in inside
    inside = [name for name in inside if not name.startswith(("sweeps/", "profiles/"))]
    rooms = {Path(name).parts[1] for name in inside} | {"/".join(Path(name).parts[1:3]) for name in inside}
    assert rooms.isdisjoint({"engine", "cli", "slurm", "explore/server", "measure/calibrate", "measure/rehearse"})
    assert {room for room in rooms if room.startswith("measure/")} == {
        "measure/__init__.py", "measure/results", "measure/schemas",
    }  # fmt: skip
    first = json.loads((site / "first.json").read_text())
    assert [rows[0]["kind"] for rows in first.values() if rows] == [
        "opening", "memory", "step", "fit", "schedule", "search", "what_if", "compare", "ranks", "runs",
        "bench", "profile",
    ]  # fmt: skip
    page = (site / "index.html").read_text()
    assert NEEDED in page and "unsafe-inline" not in page and "<script>" not in page and 'content="static"' in page


def test_the_same_question_gives_the_same_site(site: Path, sweeps: Path, profiles: Path, tmp_path: Path) -> None:
    words = ("--sweeps", str(sweeps), "--profiles", str(profiles))
    assert main(["explore", *OPENING, "--export", str(tmp_path / "again"), *words]) == 0
    for file in (p for p in site.rglob("*") if p.is_file()):
        assert file.read_bytes() == (tmp_path / "again" / file.relative_to(site)).read_bytes(), file


def test_a_folder_that_is_full_is_refused(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explore", "--export", str(site)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error[FILE]: it exists already · --export · found") and said.count("\n") == 1


def test_files_cannot_follow_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explore", "--runs", str(tmp_path), "--export", str(tmp_path / "site")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error[USAGE]: files for a web server cannot follow runs · --runs") and said.count("\n") == 1
    assert not (tmp_path / "site").exists()


@pytest.mark.parametrize("seed", [101, 106, 112, 123, *further([(103,), (108,), (118,), (127,)])])
def test_it_answers_as_the_command_line(live: Opened, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    live.go(drawn(seed))
    if live.page.query_selector(".wrong"):
        return
    assert main([*shlex.split(live.command())[1:], "--json"]) in (0, 2)
    (layout,) = json.loads(capsys.readouterr().out)["layouts"]
    assert live.text(".big") == show_bytes(int(layout["memory"]["allocated_gib"] * 2**30))
    facts = dict(zip(live.texts(".facts dt"), live.texts(".facts dd"), strict=True))
    assert facts["Step"] == show_step(layout["time"]["step_s"])


def test_the_schedules_view_is_the_served_one(live: Opened) -> None:
    asked = question(layout="dp=2,tp=2,pp=4,mbs=1,zero=1,schedule=zb_h1", global_batch_size=16)
    live.go(asked, view="schedules")
    live.page.wait_for_selector("#schedules .done", timeout=STARTS)
    [row], choices = ask("schedule", asked), ask("schedules", asked)
    live.until("document.querySelector('#lanes canvas')?.ariaValueText?.startsWith('4 lanes') ?? false", seconds=60)
    assert live.text(".big") == row["bubble"] and live.text(".state") == row["verdict"]
    assert set(live.texts("#lanes .kinds b")[:-1]) <= {kind["seconds"] for kind in row["kinds"]}
    assert live.texts("#schedules .chip b") == [f"bubble {one['bubble']}" for one in choices]


def test_the_layouts_view_is_the_served_one(live: Opened) -> None:
    asked = question("tiny", "dp=2,mbs=1", sequence_length=256, global_batch_size=8)
    live.go(asked, view="layouts")
    live.page.wait_for_selector("#what-if .done", timeout=STARTS)
    rows, others = ask("search", asked), ask("what_if", asked)
    assert live.text(".big") == rows[0]["number"] and live.text(".state") == rows[0]["verdict"]
    assert live.texts("#best tbody th") == [row["point"]["name"] for row in rows[0]["top"]]
    assert rows[-1]["text"] in live.text(".search-line")
    assert live.texts("#what-if .chip b") == [one["speed"] for one in others if not one["why_not"]]


def test_profiles_are_in_the_page_and_further_ones_are_opened(live: Opened, profiles: Path) -> None:
    live.go(question(), view="profile")
    live.page.wait_for_selector("#profile-lanes canvas", timeout=STARTS)
    assert live.texts("#profiles .name") == ["2026-11-25_tiny", "2026-11-24_tiny"]
    answered = lambda: profile_answer({}, ProfileFolders((profiles,), dated=False))["figures"]  # noqa: E731
    figures = answered()
    assert figures and live.text(".big") == figures["number"] and live.text(".sum .state") == figures["verdict"]
    assert live.texts("#profile-waterfall .advice b") == [one["gain"] for one in figures["advice"]]
    live.page.click("#ops .filters >> text=All")
    assert live.texts("#ops tbody td:nth-child(4)") == [op["measured"]["text"] for op in figures["ops"]]
    live.page.set_input_files("#profiles input[type=file]", str(BEFORE))
    live.until("document.querySelector('#profiles .it .name').textContent === arg", BEFORE.name, seconds=60)
    live.until("document.querySelectorAll('#skew .rank').length === 4", seconds=60)
    live.page.click("#profiles button[aria-label='Compare with 2026-11-25_tiny']")
    live.page.wait_for_selector("#compared .change-of", timeout=STARTS)


def test_a_price_does_not_wait_for_a_search(live: Opened) -> None:
    live.go(
        question("llama-3.1-405b", "dp=4,tp=8,pp=16,vpp=2,schedule=interleaved,mbs=1,zero=1", global_batch_size=128)
    )
    live.page.wait_for_timeout(600)  # the curve of 16 stages is under way, and takes long
    live.page.fill("#c-sequence_length", "4096")
    live.page.press("#c-sequence_length", "Enter")
    live.asked("--seq 4096")
    assert live.page.query_selector("#step.stale")
    live.go(question("tiny", "dp=2,mbs=1", sequence_length=256, global_batch_size=16))
    live.page.wait_for_selector("#fits .done", timeout=STARTS)
    assert "tiny" in live.text(".headline") and "does not" not in live.text(".made")


def test_from_a_disk_it_shows_a_picture_and_the_command(browser: Any, site: Path) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto((site / "index.html").as_uri())
    assert NEEDED in page.inner_text(".still") and "python -m http.server" in page.inner_text(".still")
    assert page.query_selector(".still svg .owner-activations").bounding_box()["width"] > 100
    context.close()
