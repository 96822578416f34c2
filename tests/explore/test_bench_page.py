"""The Bench view in a real browser: it shows what the answers say, its controls ask anew, and it is live."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from explore.drawn_questions import question
from explore.drawn_sweep import HOSTILE, drawn_csv, drawn_folder, drawn_sweep
from explore.opened import Opened, opened
from explore.served import Served
from measured_sweeps import case, row
from penteract.measure.schemas.sweep_folder import SweepFolder

Json = dict[str, Any]
DROP = """([name, text]) => {
  const data = new DataTransfer();
  data.items.add(new File([text], name));
  window.dispatchEvent(new DragEvent('drop', { dataTransfer: data, cancelable: true }));
}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drawn_folder(tmp_path_factory.mktemp("given") / "sweeps")


@pytest.fixture(scope="module")
def options(folder: Path) -> tuple[str, ...]:
    return "--sweeps", str(folder)


def show(page: Opened, **options: Any) -> Json:
    """Open the view. -> the answer that it shows, asked for again."""
    bench = {"sweep": "eight ranks", **options}
    page.go(question(), view="bench", bench=bench)
    [found] = page.served.ask("bench", bench=bench)
    shown(page, found)
    return found


def shown(page: Opened, found: Json) -> None:
    """Wait until the page shows this answer."""
    page.until("document.querySelector('.sum .headline')?.textContent === arg", found["headline"])
    page.until(
        "document.querySelectorAll('#heat .cell').length === arg", len((found["heat"] or {"cells": []})["cells"])
    )
    page.until("document.querySelectorAll('#cases tbody tr').length === arg", len(found["table"]["rows"]))


def test_the_screen_says_what_the_answers_say_and_hostile_names_are_text(shared: Opened) -> None:
    found = show(shared)
    assert shared.text(".big") == found["number"] and shared.text(".state") == found["verdict"]
    assert shared.texts("#heat .cell .value") == [cell["text"] for cell in found["heat"]["cells"]]
    assert shared.texts("#heat .cell title")[0].endswith(found["heat"]["cells"][0]["about"])
    assert shared.texts("#sweeps .legend b") == [one["count"] for one in found["states"]]
    assert shared.texts("#sweeps .reasons b") == [one["name"] for one in found["unfinished"]]
    assert shared.texts("#ranking .why") == found["ranking"]["about"]
    assert shared.texts("#residuals .why") == found["residuals"]["about"]
    assert [text.split(" mean")[0] for text in shared.texts("#groups text.much")] == [
        one["mean"] for one in found["residuals"]["groups"]
    ]
    assert found["points"]["text"] in shared.text("#scatter")
    first = [cell.inner_text() for cell in shared.page.query_selector_all("#cases tbody tr >> nth=0 >> css=th, td")]
    assert first == found["table"]["rows"][0]
    assert HOSTILE in shared.text("#cases") and shared.page.query_selector("#page img[src=x]") is None


SELECTS = [
    ("heat-colour", "allocated_bytes", "colour", "#heat h2", "Memory allocated"),
    ("heat-rows", "pp", "rows", "#heat h2", "over pp"),
    ("heat-columns", "micro_batch_size", "columns", "#heat h2", "Micro-batch"),
    ("heat-panels", "none", "panels", "#heat h2", "over pp × Micro-batch"),
    ("scatter-up", "mfu", "up", "#scatter h2", "MFU and"),
    ("scatter-across", "step_s", "across", "#scatter h2", "and Step time"),
    ("residual-group", "pp", "group", "#groups h2", "by pp"),
]


def test_every_control_changes_what_it_should(shared: Opened) -> None:
    show(shared)
    ids = {one.get_attribute("id") for one in shared.page.query_selector_all("main select")}
    assert ids == {name for name, *_ in SELECTS} | {"residual-pair"}
    for name, value, option, at, text in SELECTS:
        shared.page.select_option(f"#{name}", value)
        shared.until("document.querySelector(arg[0]).textContent.includes(arg[1])", [at, text])
        shared.page.wait_for_timeout(50)
        assert shared.state()["bench"][option] == value
    shared.page.select_option("#residual-pair", "predicted_allocated_bytes allocated_bytes")
    shared.until("document.querySelector('#groups h2').textContent.includes('Memory allocated')")
    shared.page.click(".which summary")
    shared.page.click('[aria-label^="tp 2,"]')
    shared.until("document.querySelectorAll('#cases tbody tr').length === 6")
    shared.page.fill("#bench-find", "007")
    shared.page.press("#bench-find", "Enter")
    shared.until("document.querySelectorAll('#cases tbody tr').length < 6")
    shared.page.click("#sweeps >> text=all cases")
    shared.until("document.querySelectorAll('#cases tbody tr').length === arg", len(drawn_sweep().rows))


def test_the_table_is_sorted_and_its_file_has_all(shared: Opened) -> None:
    show(shared, first=4)
    assert len(shared.texts("#cases tbody tr")) == 4
    shared.page.click("#cases thead >> text=Micro-batch")
    shared.until("document.querySelector('#cases th[aria-sort=descending]')?.textContent.includes('Micro-batch')")
    shared.page.click("#cases >> text=Show more")
    shared.until("document.querySelectorAll('#cases tbody tr').length === arg", len(drawn_sweep().rows))
    shared.page.click("#cases .menu summary")
    with shared.page.expect_download() as download:
        shared.page.click("#cases .menu >> text=CSV")
    lines = download.value.path().read_text().splitlines()
    assert len(lines) == 1 + len(drawn_sweep().rows) and lines[0].startswith("case,state,")
    shared.page.click("#heat .menu summary")
    with shared.page.expect_download() as download:
        shared.page.click("#heat .menu >> text=SVG")
    assert "rgb(" in download.value.path().read_text()
    shared.page.click("#scatter .menu summary")
    with shared.page.expect_download() as download:
        shared.page.click("#scatter .menu >> text=SVG")
    assert "Memory allocated" in download.value.path().read_text()


def test_the_keyboard_goes_from_cell_to_cell_and_keeps_its_cases(shared: Opened) -> None:
    found = show(shared)
    shared.page.focus("#heat svg.heat")
    before = shared.page.get_attribute("#heat svg.heat", "aria-valuetext")
    assert found["heat"]["cells"][found["heat"]["best"]]["about"] in before
    shared.page.keyboard.press("ArrowUp")
    after = shared.page.get_attribute("#heat svg.heat", "aria-valuetext")
    assert after != before and after.split(": ")[1].split(" · ")[0] in shared.text("#heat .reading")
    shared.page.keyboard.press("Enter")
    shared.until("document.querySelectorAll('#cases tbody tr').length === 2")
    shared.page.focus("#scatter canvas")
    shared.page.keyboard.press("Home")
    assert "Tokens/s/GPU" in shared.page.get_attribute("#scatter canvas", "aria-valuetext")


def test_a_dropped_table_is_shown_kept_in_the_link_and_closed(browser: Any, here: Served) -> None:
    with opened(browser, here) as page:
        page.go(question())
        page.page.evaluate(DROP, ["mine.csv", drawn_csv()])
        [found] = here.ask("bench", bench={"file": {"name": "mine.csv", "text": drawn_csv()}})
        shown(page, found)
        assert "published" in page.text("#heat .source") and HOSTILE in page.text("#cases")
        assert page.page.query_selector("#page img[src=x]") is None
        page.page.wait_for_timeout(100)
        assert page.state()["bench"]["file"] == {"name": "mine.csv", "text": drawn_csv()}
        page.page.reload()
        shown(page, found)
        page.page.set_input_files("#bench-file", {"name": "long.csv", "mimeType": "text/csv",
                                                  "buffer": drawn_csv(8000).encode()})  # fmt: skip
        page.until("document.querySelector('#cases')?.textContent.includes('of 8') ?? false", seconds=40)
        page.page.wait_for_timeout(200)
        assert page.state()["bench"]["file"] == {"name": "long.csv"}
        page.page.reload()
        page.page.wait_for_selector("#sweeps >> text=has not its content")
        page.page.evaluate(DROP, ["bad.json", "{"])
        page.page.wait_for_selector("#sweeps .wrong")
        page.page.click("#sweeps >> text=Close bad.json")
        page.page.wait_for_selector("#sweeps .chip")
        page.page.click("#sweeps .chip >> text=older")
        page.until("document.querySelectorAll('#cases tbody tr').length === 3")
        assert page.said == []


def test_a_sweep_is_live(shared: Opened, folder: Path) -> None:
    show(shared)
    last = drawn_sweep().rows[-1].case.name
    SweepFolder(folder / "eight ranks").case(last).write_status(row(case(1), state="failed").status)
    shared.until(
        "![...document.querySelectorAll('#sweeps .legend li')].some((one) => one.textContent.includes('running'))"
    )


@pytest.mark.parametrize(("width", "theme"), [(380, "dark"), (1280, "light"), (2560, "light")])
def test_every_width_theme_and_axe(browser: Any, here: Served, axe: str, width: int, theme: str) -> None:
    with opened(browser, here, viewport={"width": width, "height": 900}, color_scheme=theme, bypass_csp=True) as page:
        show(page, only={"tp": ["1", "2"]})
        assert page.page.evaluate("document.documentElement.scrollWidth") <= width
        for selector in ("#heat .plot", "#ranking svg", "#residuals canvas", "#groups svg", "#cases .table"):
            box = page.page.query_selector(selector).bounding_box()
            assert box["width"] > 100 and box["x"] >= 0 and box["x"] + box["width"] <= width + 1, selector
        page.page.click("#ranking .tools >> text=Table")
        assert page.serious(axe) == [] and page.said == []


def test_it_prints(shared: Opened) -> None:
    show(shared)
    shared.page.emulate_media(media="print")
    assert not shared.page.is_visible("aside") and shared.page.is_visible("#heat svg")
    shared.page.emulate_media(media="screen")


def test_without_a_folder_the_view_names_its_command(browser: Any, plain: Served) -> None:
    with opened(browser, plain) as page:
        page.go(question(), view="bench")
        page.page.wait_for_selector("#sweeps .command", timeout=30_000)
        assert page.text("#sweeps .command") == "penteract explore --sweeps sweeps" and page.said == []
