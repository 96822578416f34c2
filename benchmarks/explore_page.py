"""How long the explorer's page takes, served and exported: the first picture, the planner's start, a changed layout; and a
profile of 64 ranks with 3 000 spans each.

    python benchmarks/explore_page.py
    python benchmarks/explore_page.py --half

Each time ten times, in the browser of this machine; the record has the load of the machine too. It is
benchmarks/results/explore_page.json. `--half` adds the exported page's start with half a core for browser and server, by a
control group of its own (cgroup v1, as root). Needs playwright and chromium.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from threading import Thread
from typing import Any

from playwright.sync_api import sync_playwright
from provenance import ROOT, provenance

sys.path[:0] = [str(ROOT / "tests")]

from browsers import WINDOWED, browser_path
from explore.drawn_profiles import drawn, written
from explore.drawn_questions import question
from explore.opened import opened
from explore.served import Served, link, served
from penteract.cli import main as penteract

RECORD = Path(__file__).parent / "results" / "explore_page.json"
TIMES = 10
LARGE = question("llama-3.1-405b", "dp=8,tp=8,pp=8,mbs=1,zero=1", gpu="H100", global_batch_size=512)
# Sets a degree of dp, and waits until the newest answer is drawn: milliseconds.
CHANGE = """async (value) => {
  const field = document.querySelector("#c-layout-dp"), main = document.querySelector("main");
  const answers = Number(main.dataset.answers), began = performance.now();
  Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value").set.call(field, String(value));
  field.dispatchEvent(new Event("change", { bubbles: true }));
  while (Number(main.dataset.answers) === answers || main.getAttribute("aria-busy") === "true")
    await new Promise((drawn) => requestAnimationFrame(drawn));
  return performance.now() - began;
}"""


# Chooses another rank of a profile, and waits until its lanes are drawn: milliseconds.
RANK = """async (value) => {
  const field = document.querySelector("#profile-lanes select"), began = performance.now();
  field.value = String(value);
  field.dispatchEvent(new Event("change", { bubbles: true }));
  while (!document.querySelector("#profile-lanes h2").textContent.includes(`rank ${value},`))
    await new Promise((drawn) => requestAnimationFrame(drawn));
  return performance.now() - began;
}"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def exported() -> Iterator[Served]:
    """The exported page on a plain file server."""
    with tempfile.TemporaryDirectory() as folder:
        penteract(["explore", "--export", f"{folder}/site"])
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=f"{folder}/site"))
        server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a page that is left breaks off its files
        Thread(target=server.serve_forever, daemon=True).start()
        yield Served(None, server.server_port, "")  # type: ignore[arg-type]
        server.shutdown()


def seconds(times: list[float]) -> dict[str, float]:
    return {"median": round(median(times), 3), "worst": round(max(times), 3)}


def openings(browser: Any, here: Served, *selectors: str) -> list[dict[str, float]]:
    """From the address to each of these, every time in a new profile."""
    found: list[list[float]] = [[] for _ in selectors]
    for _ in range(TIMES):
        with opened(browser, here) as page:
            began = time.perf_counter()
            page.page.goto(f"{here.origin}/")
            for times, selector in zip(found, selectors, strict=True):
                page.page.wait_for_selector(selector, timeout=120_000)
                times.append(time.perf_counter() - began)
    return [seconds(times) for times in found]


def changes(browser: Any, here: Served, asked: dict[str, Any], ready: str) -> dict[str, float]:
    """A degree of dp is changed, again and again, each time when the last change is drawn and its figures rest."""
    with opened(browser, here) as page:
        page.go(asked)
        page.page.wait_for_selector(ready, timeout=120_000)
        page.rested()
        took = []
        for i in range(TIMES + 1):
            took.append(page.page.evaluate(CHANGE, (4, 8)[i % 2]) / 1000)
            page.rested()
        return seconds(took[1:])


def profiles(browser: Any, here: Served, ready: str, file: Path | None) -> dict[str, Any]:
    """From the address, or from a file that is opened, to the lanes; another rank; and the frames of lanes that are zoomed.
    `file`: opened in the page; None: the server has it."""
    shown, ranks, frames = list[float](), list[float](), list[float]()
    for i in range(TIMES):
        with opened(browser, here) as page:
            began = time.perf_counter()
            page.page.goto(f"{here.origin}/{link(question(), None, 'profile')}")
            page.page.wait_for_selector(ready, timeout=120_000)
            if file:
                page.page.wait_for_selector("#profiles input[type=file]", state="attached")
                began = time.perf_counter()
                page.page.set_input_files("#profiles input[type=file]", str(file))
            page.page.wait_for_selector("#profile-lanes canvas", timeout=120_000)
            shown.append(time.perf_counter() - began)
            ranks.append(page.page.evaluate(RANK, 1 + 6 * i) / 1000)
            page.page.focus("#profile-lanes canvas")
            page.page.keyboard.press("+")
            frames.append(page.page.evaluate("performance.getEntriesByName('lanes').at(-1).duration") / 1000)
    return {"lanes shown": seconds(shown), "another rank": seconds(ranks), "frame of lanes": seconds(frames)}


@contextmanager
def half_a_core() -> Iterator[None]:
    """This process and those that it starts have half a core."""
    group, own = Path("/sys/fs/cgroup/cpu/penteract-half"), str(os.getpid())
    group.mkdir(exist_ok=True)
    (group / "cpu.cfs_quota_us").write_text("50000")
    (group / "cgroup.procs").write_text(own)
    try:
        yield
    finally:
        (group.parent / "cgroup.procs").write_text(own)


def slow_start() -> None:
    """Add to the record how long an exported page takes to start with half a core."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    with exported() as here, half_a_core(), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path(WINDOWED), args=["--no-sandbox"])
        first, live = openings(browser, here, ".sum", ".made.live")
        browser.close()
    record["seconds"]["exported, half a core"] = {"first picture": first, "controls live": live}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record["seconds"]["exported, half a core"]))


def main() -> None:
    if sys.argv[1:] == ["--half"]:
        return slow_start()
    load = os.getloadavg()[0]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path(WINDOWED), args=["--no-sandbox"])
        with served() as here:
            here.open()
            (first,) = openings(browser, here, ".sum")
            page = {"first picture": first, "changed, 8B on 8 GPUs": changes(browser, here, question(), ".sum"),
                    "changed, 405B on 512 GPUs": changes(browser, here, LARGE, ".sum")}  # fmt: skip
        with tempfile.TemporaryDirectory() as folder, served("--profiles", folder) as here:
            here.open()
            large = written(Path(folder) / "large", drawn(1)) / "profile.json"
            page["profile of 64 ranks, of a folder"] = profiles(browser, here, ".sum", None)
            many = Path(large.rename(Path(tempfile.gettempdir()) / f"profile_{os.getpid()}.json"))
            page["profile of 64 ranks, opened"] = profiles(browser, here, ".sum", many)
        with exported() as here:
            first, live = openings(browser, here, ".sum", ".made.live")
            site = {"first picture": first, "controls live": live,
                    "changed, 8B on 8 GPUs": changes(browser, here, question(), ".made.live"),
                    "profile of 64 ranks, opened": profiles(browser, here, ".made.live", many)}  # fmt: skip
        many.unlink()
        version = browser.version
        browser.close()
    record = provenance("python benchmarks/explore_page.py") | {
        "browser": f"Chromium {version}", "cores": os.cpu_count(), "load_before": round(load, 1), "times": TIMES,
        "seconds": {"served": page, "exported": site},
    }  # fmt: skip
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
