"""The Profile view in a real browser: of a folder, and of opened and dropped files, however large."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from explore.drawn_profiles import BEFORE, drawn, made, written
from explore.drawn_questions import question
from explore.opened import Opened, opened
from explore.served import Served

Json = dict[str, Any]
HOSTILE = "<img src=x onerror=alert(1)>"
CANVAS = "#profile-lanes canvas"
FIGURES = ("#profiles", "#profile-waterfall", "#profile-lanes", "#ops", "#kernels", "#skew", "#owners", "#compared")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = tmp_path_factory.mktemp("given") / "profiles"
    written(given / "first", made())
    hostile = made()
    hostile["ops"][3]["name"] = hostile["run"]["model"] = HOSTILE
    hostile["ops"][3]["kernels"] = [{"name": HOSTILE, "calls": 1, "picoseconds": 10**9}]
    hostile["ops"][3]["measured"] += 10**12
    written(given / HOSTILE, hostile)
    os.utime(given / "first" / "profile.json", (2e9, 2e9))
    return given


@pytest.fixture(scope="module")
def options(folder: Path) -> tuple[str, ...]:
    return "--profiles", str(folder)


def show(page: Opened, **profile: Any) -> Json:
    """Open the view. -> the answer that it shows, asked for again."""
    asked = {"profile": profile} if profile else {}
    page.go(question(), None, "profile", **asked)
    page.page.wait_for_selector(CANVAS, timeout=30_000)
    [found] = page.served.ask("profile", question=question(), **asked)
    page.until("document.querySelector('.big').textContent === arg", found["figures"]["number"])
    page.until(
        "document.querySelector('#profile-lanes h2').textContent.includes(`rank ${arg},`)", found["figures"]["rank"]
    )
    return found


def saved(page: Opened, figure: str, name: str) -> str:
    page.page.click(f"{figure} .menu summary")
    with page.page.expect_download() as download:
        page.page.click(f"{figure} .menu >> text={name}")
    page.page.click(f"{figure} h2")
    return download.value.path().read_text()


def colours(page: Opened) -> int:
    """How many colours the lanes have."""
    return page.page.evaluate(
        """(selector) => {
          const canvas = document.querySelector(selector);
          const copy = Object.assign(document.createElement('canvas'), { width: canvas.width, height: canvas.height });
          const context = copy.getContext('2d', { willReadFrequently: true });
          context.drawImage(canvas, 0, 0);
          return new Set(new Uint32Array(context.getImageData(0, 0, copy.width, copy.height).data.buffer)).size;
        }""",
        CANVAS,
    )


def test_the_view_is_whole_and_says_what_the_answer_says(shared: Opened) -> None:
    figures = show(shared)["figures"]
    assert all(shared.page.query_selector(figure) for figure in FIGURES)
    assert shared.text(".big") == figures["number"] and shared.text(".sum .state") == figures["verdict"]
    facts = dict(zip(shared.texts(".sum .facts dt"), shared.texts(".sum .facts dd"), strict=True))
    assert facts == {fact["label"]: fact["text"] for fact in figures["facts"]}
    texts = [text.split("  ")[0] for text in shared.texts("#profile-waterfall text.much")]
    assert texts == [row["text"] for row in figures["waterfall"]]
    assert shared.texts("#profile-waterfall .advice b") == [one["gain"] for one in figures["advice"]]
    widths = shared.page.eval_on_selector_all(
        "#profile-waterfall rect.part", "(all) => all.map((r) => r.width.baseVal.value)"
    )
    measured = figures["waterfall"][-1]["picoseconds"]
    for wide, row in zip(widths, figures["waterfall"], strict=True):
        assert wide == pytest.approx(max(1, widths[-1] * abs(row["picoseconds"]) / measured), abs=0.01)
    rows = shared.page.query_selector_all("#ops tbody tr")
    assert len(rows) == 30 and colours(shared) > 8
    shared.page.click("#ops .filters >> text=All")
    assert shared.texts("#ops tbody td:nth-child(4)") == [op["measured"]["text"] for op in figures["ops"]]
    shared.page.click("#ops .filters >> text=Unmatched")
    assert shared.texts("#ops tbody .note") == [op["note"] for op in figures["ops"] if op["note"]]
    shared.page.click("#ops .filters >> text=The longest")
    amounts = [one["measured"]["text"] for one in figures["memory"]["owners"]]
    assert [text.split(" · ")[0] for text in shared.texts("#owners text.much")] == amounts


def test_the_pointer_and_keys_read_ops_and_choose_one(shared: Opened) -> None:
    figures = show(shared)["figures"]
    planned, measured = figures["lanes"]["lanes"]
    shared.page.focus(CANVAS)
    value = lambda: shared.page.get_attribute(CANVAS, "aria-valuetext")  # noqa: E731
    shared.page.keyboard.press("ArrowRight")
    assert value() == f"Predicted: {planned['blocks'][0]['text']}"
    shared.page.keyboard.press("ArrowDown")
    assert value().startswith("Measured: ")
    shared.page.keyboard.press("End")
    assert value() == f"Measured: {measured['blocks'][-1]['text']}"
    place = max(
        (i for i, b in enumerate(measured["blocks"]) if b["op"] >= 0),
        key=lambda i: measured["blocks"][i]["end"] - measured["blocks"][i]["start"],
    )
    block = measured["blocks"][place]
    box = shared.page.query_selector(CANVAS).bounding_box()
    share = (block["start"] + block["end"]) / 2 / measured["end"]
    at = (box["x"] + 116 + share * (box["width"] - 117), box["y"] + 6 + (box["height"] - 32) / 2 + 12)
    shared.page.mouse.move(*at)
    assert (
        shared.text("#tip") == block["text"] and shared.text("#profile-lanes .reading") == f"Measured · {block['text']}"
    )
    shared.page.mouse.down()
    shared.page.mouse.up()
    op = next(op for op in figures["ops"] if op["number"] == block["op"])
    shared.until("document.querySelector('#kernels h2').textContent === arg", f"Kernels of {op['name']}")
    assert shared.texts("#kernels text.much") == [
        f"{k['took']['text']} · {k['calls']} × · {k['share']}" for k in op["kernels"]
    ]
    assert shared.page.get_attribute("#ops tr.it button", "aria-pressed") == "true"
    shared.page.mouse.move(1, 1)


def test_the_zoom_and_the_rank_are_in_the_link(browser: Any, here: Served, shared: Opened) -> None:
    show(shared)
    before = colours(shared)
    shared.page.click('#profile-lanes [aria-label="Zoom in"]')
    shared.page.click('#profile-lanes [aria-label="Zoom in"]')
    shared.page.select_option("#profile-lanes select", "1")
    shared.until("document.querySelector('#profile-lanes h2').textContent.includes('rank 1,')")
    shared.page.click("#ops tbody tr:nth-child(2) button")
    shared.page.click("#profile-lanes >> text=One axis")
    shared.page.wait_for_timeout(700)
    state = shared.state()
    own = state["profile"]
    assert own["zoom"] == [0.375, 0.625] and own["rank"] == 1 and own["wide"] is False and "op" in own
    assert not any("/" in str(value) for value in own.values()) and before
    with opened(browser, here) as other:
        other.page.goto(f"{here.origin}/{shared.page.evaluate('location.hash')}")
        other.page.wait_for_selector(CANVAS)
        other.until("document.querySelector('#profile-lanes h2').textContent.includes('rank 1,')")
        assert not other.page.is_disabled("#profile-lanes >> text=Whole step")
        assert other.text("#kernels h2") == shared.text("#kernels h2")
        other.page.click("#profile-lanes >> text=Whole step")
        other.page.wait_for_timeout(700)
        assert "zoom" not in other.state()["profile"] and other.said == []


def test_every_figure_is_a_table_and_files(shared: Opened) -> None:
    figures = show(shared, name="first", against=HOSTILE)["figures"]
    for figure in FIGURES:
        shared.page.click(f"{figure} .tools >> text=Table")
        assert shared.page.query_selector(f"{figure} .table tbody th"), figure
        shared.page.click(f"{figure} .tools >> text=Table")
        lines = list(csv.reader(io.StringIO(saved(shared, figure, "CSV"))))
        assert len(lines) > 1 and len({len(line) for line in lines}) == 1, figure
        if shared.page.query_selector(f"{figure} .menu >> text=SVG"):
            drawing = saved(shared, figure, "SVG")
            assert drawing.startswith("<svg") and "NaN" not in drawing and "undefined" not in drawing, figure
        assert shared.text(f"{figure} .source")
    assert 'height="3"' in saved(shared, "#profile-lanes", "SVG")  # lines under the calls of the chosen op
    rows = list(csv.reader(io.StringIO(saved(shared, "#ops", "CSV"))))
    assert [row[-1] for row in rows[1:]] == [str(op["measured"]["picoseconds"]) for op in figures["ops"]]


def test_two_are_compared_and_hostile_names_are_text(shared: Opened) -> None:
    show(shared)
    shared.page.click(f"#profiles button[aria-label='Compare with {HOSTILE}']")
    shared.page.wait_for_selector("#compared .change-of")
    found = shared.served.ask("profile", question=question(), profile={"against": HOSTILE})[0]["comparison"]
    assert shared.text("#compared .change-of") == found["verdict"]
    labels = [text.split(" · ")[0] for text in shared.texts("#compared text.much")]
    assert labels == [row["change"] for row in (*found["parts"], *found["ops"])]
    assert found["ops"][0]["label"] == HOSTILE and HOSTILE[:20] in shared.text("#compared")
    show(shared, name=HOSTILE)
    shared.until("document.querySelector('#kernels h2').textContent.includes('onerror')")
    assert shared.page.query_selector("#page img[src=x]") is None and HOSTILE in shared.text(".headline")


DROP = """([names, text]) => {
  const data = new DataTransfer();
  for (const name of names) data.items.add(new File([text], name, { type: 'application/json' }));
  window.dispatchEvent(new DragEvent('drop', { dataTransfer: data, cancelable: true }));
}"""


def test_a_file_is_dropped_or_opened_without_any_folder(browser: Any, plain: Served) -> None:
    with opened(browser, plain) as page:
        page.go(question(), None, "profile")
        page.page.wait_for_selector("#profiles .command", timeout=30_000)
        assert page.texts("#profiles .command") == [
            "penteract profile latest",
            "penteract explore --profiles profiles",
        ]
        assert page.text(".sum .state") == "No folder of profiles was given."
        page.go(question())
        large = json.dumps(drawn(2))
        assert len(large) > 2**22
        page.page.evaluate(DROP, [[HOSTILE], large])  # on another view: it is a profile, so it opens there
        page.page.wait_for_selector(CANVAS, timeout=30_000)
        assert page.text("#profiles .name") == HOSTILE and page.page.query_selector("img[src=x]") is None
        assert len(page.page.query_selector_all("#skew .rank")) == 28
        file = {"name": "profile.json", "mimeType": "application/json", "buffer": json.dumps(made()).encode()}
        page.page.set_input_files(
            "#profiles input[type=file]", [file, {**file, "buffer": json.dumps(made(BEFORE)).encode()}]
        )
        page.page.wait_for_selector("#compared .change-of")
        assert page.texts("#profiles .it .name") == ["profile.json (2)", "profile.json"]
        page.page.wait_for_timeout(100)
        assert page.state()["profile"] == {"name": "profile.json", "against": "profile.json (2)"}
        page.page.evaluate(DROP, [["bad.json"], '{"kind": "profile", "version": 9}'])
        page.until("document.querySelector('.sum .state').textContent.includes('another version')")
        page.page.reload()  # what was opened has gone: the link names it, and no path
        page.page.wait_for_selector("#profiles .command", timeout=30_000)
        assert "There is no profile 'bad.json' here" in page.text("#profiles")
        assert page.said == []


@pytest.mark.parametrize(("width", "theme"), [(380, "dark"), (2560, "light")])
def test_every_width_and_axe(browser: Any, here: Served, axe: str, width: int, theme: str) -> None:
    with opened(browser, here, viewport={"width": width, "height": 900}, color_scheme=theme, bypass_csp=True) as page:
        show(page, name="first", against=HOSTILE)
        page.page.wait_for_selector("#compared .change-of")
        assert page.page.evaluate("document.documentElement.scrollWidth") <= width
        for selector in ("#profile-waterfall svg", CANVAS, "#skew svg", "#owners svg"):
            box = page.page.query_selector(selector).bounding_box()
            assert box["width"] > 100 and box["x"] >= 0 and box["x"] + box["width"] <= width + 1, selector
        page.page.click("#owners .tools >> text=Table")
        assert page.serious(axe) == [] and page.said == []
        page.page.emulate_media(media="print")
        assert not page.page.is_visible("aside") and page.page.is_visible("#profile-waterfall svg")
