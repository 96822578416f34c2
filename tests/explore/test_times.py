"""What must be quick in the explorer: a figure is drawn within a frame's time, and no price waits for a search.

A frame's time is that of a core. All of it is in one file: what measures time runs alone, and one server and one
browser do for all."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Generator
from typing import Any

import pytest

from explore import test_bench_page, test_layouts_page, test_profile_page, test_ranks_page, test_schedules_page
from explore.core_times import core_times
from explore.drawn_profiles import drawn
from explore.drawn_questions import question
from explore.drawn_sweep import drawn_folder
from explore.opened import opened
from explore.served import Served, served

pytestmark = pytest.mark.alone

FRAME = 150  # ms of a core that a figure may take
MOVED = "rank 1001 · node 125, GPU 1 · pp 1, dp 61, tp 1"
WIDE = {"width": 1600, "height": 1000}
LARGE = question("llama-3.1-405b", "dp=4,tp=8,pp=16,vpp=2,schedule=interleaved,mbs=1,zero=1", global_batch_size=2048)
TINY = question("tiny", "dp=2,mbs=1,zero=1", sequence_length=256, global_batch_size=16)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Generator[Served]:
    """Without a browser too, for those that need none."""
    folder = drawn_folder(tmp_path_factory.mktemp("given") / "sweeps")
    with served("--sweeps", str(folder)) as running:
        running.open()
        yield running


# ---- a frame's time --------------------------------------------------------------------------------------------------


def test_many_lanes_are_drawn_within_a_frames_time(browser: Any, here: Served) -> None:
    """64 lanes, whole and zoomed."""
    with opened(browser, here, viewport=WIDE) as page, core_times(browser, page.page) as took:
        page.go(test_schedules_page.MANY, None, "schedules")
        page.page.wait_for_selector(test_schedules_page.CANVAS, timeout=120_000)
        frames = "performance.getEntriesByName('lanes').at(-1).startTime"
        page.until(f"{frames} > 0")
        whole = page.page.evaluate(frames)
        page.page.click('[aria-label="Zoom in"]')
        page.until(f"{frames} > arg", whole)
        assert page.page.query_selector(test_schedules_page.CANVAS).bounding_box()["height"] < 2000
        assert page.said == []
    assert len(took["lanes"]) > 1 and max(took["lanes"]) < FRAME, took


def test_four_thousand_ranks_are_drawn_within_a_frames_time(browser: Any, here: Served) -> None:
    with opened(browser, here, viewport=WIDE) as page, core_times(browser, page.page) as took:
        test_ranks_page.show(page, test_ranks_page.LARGE, rank=1000)
        page.page.focus(test_ranks_page.MESH)
        page.page.keyboard.press("ArrowRight")
        page.until("document.querySelector('#mesh .reading').innerText === arg", MOVED)
        page.page.wait_for_timeout(200)  # a canvas is drawn after the page has changed
        assert page.page.query_selector(test_ranks_page.MESH).bounding_box()["height"] < 600
        assert page.said == []
    assert len(took["mesh"]) > 1 and max(took["mesh"]) < FRAME, took


def test_many_points_are_drawn_within_a_frames_time(browser: Any, here: Served) -> None:
    """A hundred thousand of every kind."""
    with opened(browser, here) as page, core_times(browser, page.page) as took:
        test_layouts_page.show(page)
        page.page.evaluate(
            """async () => {
              const { draw, geometry } = await import('/assets/js/points_drawing.js');
              const { CanvasPen } = await import('/assets/js/pens.js');
              const points = Array.from({ length: 100_000 }, (_, i) => ({
                x: (i * 7919) % 1000, y: (i * 104729) % 997, kind: ['bad', 'faint', 'strong'][i % 3], front: false }));
              const axes = { across: { most: 1000, ticks: [], label: 'x' }, up: { most: 1000, ticks: [], label: 'y' } };
              const colours = { strong: '#123', faint: '#345', bad: '#567' };
              const pen = new CanvasPen(document.createElement('canvas'), 1600, 400, colours);
              for (let i = 0; i < 5; i += 1) {
                performance.clearMeasures('many points');
                draw(pen, points, axes, geometry(1600));
                performance.measure('many points');
              }
            }"""
        )
        assert page.said == []
    assert len(took["many points"]) == 5 and min(took["many points"]) < FRAME, took


def test_a_sweeps_points_are_drawn_within_a_frames_time(browser: Any, here: Served) -> None:
    with opened(browser, here) as page, core_times(browser, page.page) as took:
        test_bench_page.show(page)
        page.until("performance.getEntriesByName('points').length > 0")
        assert page.said == []
    assert took["points"] and max(took["points"]) < FRAME, took


def test_the_calls_of_a_large_profile_are_drawn_within_a_frames_time(browser: Any, here: Served) -> None:
    """Each time, while they are zoomed and moved."""
    large = json.dumps(drawn(2))
    assert len(large) > 2**22
    with opened(browser, here) as page, core_times(browser, page.page) as took:
        page.go(question())
        page.page.evaluate(test_profile_page.DROP, [["large.json"], large])
        page.page.wait_for_selector(test_profile_page.CANVAS, timeout=30_000)
        page.page.focus(test_profile_page.CANVAS)
        for _ in range(12):
            page.page.keyboard.press("+")
            page.page.keyboard.press("ArrowRight")
        page.page.wait_for_timeout(200)  # a canvas is drawn after the page has changed
        assert page.said == []
    assert len(took["lanes"]) > 12 and max(took["lanes"]) < FRAME, took


# ---- prices and searches ---------------------------------------------------------------------------------------------


def begin(here: Served, request: dict[str, Any]) -> socket.socket:
    """Ask, and do not wait."""
    body = json.dumps({"version": 1, **request})
    head = {"Host": f"127.0.0.1:{here.port}", "Origin": here.origin, "Cookie": here.cookie, "Content-Length": len(body)}
    lines = ("POST /api/ask HTTP/1.1", *(f"{name}: {value}" for name, value in head.items()), "", body)
    connection = socket.create_connection(("127.0.0.1", here.port))
    connection.sendall("\r\n".join(lines).encode())
    return connection


def test_a_price_does_not_wait_for_a_search(here: Served) -> None:
    here.ask("memory", question=TINY)
    with begin(here, {"kind": "step", "question": LARGE}) as search:  # seconds
        time.sleep(0.3)
        assert here.ask("memory", question=TINY)[0]["figures"]
        search.settimeout(0.0)
        with pytest.raises(BlockingIOError):  # not even its headers' body: it is still at work
            while search.recv(10_000):
                pass


def test_a_search_stops_when_its_page_has_gone(here: Served) -> None:
    """What is asked next is there sooner than it would be found; and it was not found, or it would be remembered."""
    here.ask("step", question=TINY)
    begin(here, {"kind": "step", "question": LARGE}).close()
    time.sleep(0.3)
    began = time.perf_counter()
    assert here.ask("step", question=TINY)[0]["kind"] == "step"
    waited = time.perf_counter() - began
    here.ask("step", question=LARGE)
    assert waited < time.perf_counter() - began - waited
