"""The Schedules view in a real browser: lanes are drawn, followed and explained, and say what the answers say."""

from __future__ import annotations

import base64
import csv
import io
from typing import Any

import pytest

from explore.drawn_questions import question
from explore.opened import WIDTHS_AND_THEMES, Opened, opened
from explore.served import Served
from penteract.schedule.registry import SCHEDULES

Json = dict[str, Any]
SPLIT = question(layout="dp=2,tp=2,pp=4,mbs=1,zero=1,schedule=zb_h1", global_batch_size=64)
SHORT = question("gpt2", "dp=2,pp=2,mbs=1,zero=1", sequence_length=256, global_batch_size=8)
MANY = question("llama-3.1-405b", "dp=1,tp=8,pp=64,mbs=1,zero=0,schedule=1f1b", global_batch_size=512)
CANVAS = "#lanes canvas"


def show(page: Opened, asked: Json = SPLIT, pp_rank: int | None = None) -> Json:
    """Open the view on a question. -> the answer that it shows, asked for again."""
    page.page.mouse.move(1, 1)
    page.go(asked, pp_rank, "schedules")
    page.rested()
    [row] = page.served.ask("schedule", question=asked, pp_rank=pp_rank)
    return row


def point(page: Opened, lane: int, lanes: int, share: float, part: float = 0.2) -> None:
    """The pointer at a share of the axis of a lane."""
    page.page.hover(CANVAS, position={"x": 1, "y": 1})
    box = page.page.query_selector(CANVAS).bounding_box()
    side = 26 if box["width"] < 620 else 116
    step = (box["height"] - 32) / lanes
    page.page.mouse.move(box["x"] + side + share * (box["width"] - side - 1), box["y"] + 6 + (lane + part) * step)


def colours(page: Opened) -> set[tuple[int, int, int]]:
    """All colours of the canvas."""
    data = page.page.evaluate(
        """() => {
          const canvas = document.querySelector('#lanes canvas');
          const copy = Object.assign(document.createElement('canvas'), { width: canvas.width, height: canvas.height });
          const context = copy.getContext('2d', { willReadFrequently: true });
          context.drawImage(canvas, 0, 0);
          const bytes = context.getImageData(0, 0, copy.width, copy.height).data;
          let text = '';
          for (let i = 0; i < bytes.length; i += 4) text += String.fromCharCode(bytes[i], bytes[i + 1], bytes[i + 2]);
          return btoa(text);
        }"""
    )
    raw = base64.b64decode(data)
    return {(raw[i], raw[i + 1], raw[i + 2]) for i in range(0, len(raw), 3)}


def test_the_view_is_whole_and_says_what_the_answers_say(shared: Opened) -> None:
    row = show(shared)
    assert shared.texts("h2") == [
        "Each pipeline rank over the step",
        "Memory over the step",
        "Every schedule, for this layout",
    ]
    assert shared.text(".big") == row["bubble"] and shared.text(".state") == row["verdict"]
    facts = dict(zip(shared.texts(".facts dt"), shared.texts(".facts dd"), strict=True))
    assert facts == {fact["label"]: fact["text"] for fact in row["facts"]}
    spent = [
        kind for i, kind in enumerate(row["kinds"]) if any(lane["times"][i]["picoseconds"] for lane in row["lanes"])
    ]
    assert shared.texts("#lanes .kinds b")[:-1] == [kind["seconds"] for kind in spent]
    assert shared.texts("#lanes .kinds small")[:-1] == [kind["share"] for kind in spent]
    assert row["note"] in shared.text("#lanes")
    choices = shared.served.ask("schedules", question=SPLIT)
    assert shared.texts("#schedules .chip b") == [f"bubble {one['bubble']}" for one in choices]
    assert len(choices) == len(SCHEDULES)
    tokens = ("2f3e8f", "8fbbe4", "1c7c6f", "f0eeea", "edc25c", "b34a00")  # passes, bubble, exposed, gathers
    assert {tuple(bytes.fromhex(code)) for code in tokens} <= colours(shared)


def test_the_table_and_the_files_have_the_data(shared: Opened) -> None:
    row = show(shared)
    shared.page.click("#lanes .tools >> text=Table")
    cells = [[c.text_content() for c in line.query_selector_all("th, td")]
             for line in shared.page.query_selector_all("#lanes tbody tr")]  # fmt: skip
    assert [line[2:-3] for line in cells] == [[time["text"] for time in lane["times"]] for lane in row["lanes"]]
    assert [line[-1] for line in cells] == [lane["activations"]["text"] for lane in row["lanes"]]
    shared.page.click("#lanes .tools >> text=Table")
    lines = list(csv.reader(io.StringIO(saved(shared, "CSV"))))
    expected = [[str(lane["pp_rank"]), b["name"], str(b["start"]), str(b["end"]), b["text"]]
                for lane in row["lanes"] for b in lane["blocks"]]  # fmt: skip
    assert [[one[0], one[1], *one[3:]] for one in lines[1:] if [one[0], one[1], *one[3:]] in expected] == expected
    drawing = saved(shared, "SVG")
    assert drawing.startswith("<svg") and drawing.count("<rect") > 200 and ">F0<" in drawing and "#2f3e8f" in drawing
    assert "NaN" not in drawing and "undefined" not in drawing


def saved(page: Opened, name: str) -> str:
    page.page.click("#lanes .menu summary")
    with page.page.expect_download() as download:
        page.page.click(f"#lanes .menu >> text={name}")
    page.page.click("#lanes h2")
    return download.value.path().read_text()


def test_the_pointer_reads_blocks_messages_and_ranks(shared: Opened) -> None:
    row = show(shared)
    lane = row["lanes"][2]
    block = next(b for b in lane["blocks"] if b["name"] == "I1")
    point(shared, 2, 4, (block["start"] + block["end"]) / 2 / row["end"])
    assert shared.text("#tip") == block["text"]
    assert shared.text("#lanes .reading") == f"{lane['label']} · {block['text']}"
    idle = max((b for b in lane["blocks"] if not b["name"]), key=lambda b: b["end"] - b["start"])
    point(shared, 2, 4, (idle["start"] + idle["end"]) / 2 / row["end"])
    assert shared.text("#tip") == idle["text"] and "wait" in idle["text"]
    point(shared, 2, 4, (block["start"] + block["end"]) / 2 / row["end"], 0.56)
    assert shared.text("#tip") in [span["text"] for span in lane["other_streams"]]
    point(shared, 1, 4, -0.1)
    assert shared.text("#tip").startswith("pipeline rank 1, 4 GPUs: at most 4 in flight")


def test_a_click_looks_into_a_rank(shared: Opened) -> None:
    show(shared)
    point(shared, 1, 4, 0.5)
    shared.page.mouse.down()
    shared.page.mouse.up()
    shared.until("document.querySelector('#step .quiet').textContent.includes('pipeline rank 1 ')")
    shared.page.wait_for_timeout(100)
    assert shared.state()["pp_rank"] == 1 and shared.state()["view"] == "schedules"


def test_the_keyboard_moves_through_passes_zooms_and_looks(shared: Opened) -> None:
    row = show(shared)
    shared.page.focus(CANVAS)
    value = lambda: shared.page.get_attribute(CANVAS, "aria-valuetext")  # noqa: E731
    shared.page.keyboard.press("ArrowRight")
    assert value() == f"{row['lanes'][0]['label']}: {row['lanes'][0]['blocks'][0]['text']}"
    shared.page.keyboard.press("ArrowRight")
    assert value().endswith(row["lanes"][0]["blocks"][1]["text"])
    shared.page.keyboard.press("End")
    assert value().endswith(row["lanes"][0]["blocks"][-1]["text"])
    shared.page.keyboard.press("ArrowDown")
    assert value().startswith(row["lanes"][1]["label"])
    before = colours(shared)
    for _ in range(9):
        shared.page.keyboard.press("+")
    assert shared.page.is_disabled('[aria-label="Zoom in"]') and colours(shared) != before
    shared.page.keyboard.press("Home")
    shared.page.keyboard.press("Enter")
    shared.until("document.querySelector('#step .quiet').textContent.includes('pipeline rank 1 ')")
    shared.page.click("text=Whole step")
    assert shared.page.is_disabled('[aria-label="Zoom out"]')


def test_zoom_by_buttons_and_wheel_and_a_drag(shared: Opened) -> None:
    row = show(shared)
    assert shared.page.is_disabled("text=Whole step")
    shared.page.click('[aria-label="Zoom in"]')
    shared.page.click('[aria-label="Zoom in"]')  # a quarter, around the middle
    point(shared, 0, 4, 0.5)
    shared.page.mouse.down()
    box = shared.page.query_selector(CANVAS).bounding_box()
    shared.page.mouse.move(box["x"] + box["width"] * 3, box["y"] + 10, steps=3)  # to the beginning
    shared.page.mouse.up()
    point(shared, 0, 4, 0.02)
    shared.page.wait_for_timeout(50)
    assert shared.text("#tip") == row["lanes"][0]["blocks"][0]["text"]
    assert shared.state()["pp_rank"] is None  # a drag is no click
    shared.page.keyboard.down("Control")
    shared.page.mouse.wheel(0, 2000)
    shared.page.keyboard.up("Control")
    shared.until("document.querySelector('[aria-label=\"Zoom out\"]').disabled")


def test_the_zoom_is_in_the_link(shared: Opened) -> None:
    show(shared)
    shared.page.click('[aria-label="Zoom in"]')
    shared.page.click('[aria-label="Zoom in"]')
    shared.until("location.hash !== arg", shared.page.evaluate("location.hash"))
    assert shared.state()["zoom"] == [0.375, 0.625]
    shared.go(SPLIT, None, "schedules", zoom=[0.5, 1])
    shared.until("!document.querySelector('[aria-label=\"Zoom out\"]').disabled")
    shared.page.click('[aria-label="Zoom out"]')
    assert shared.page.is_disabled('[aria-label="Zoom out"]')
    shared.until("location.hash !== arg", shared.page.evaluate("location.hash"))
    assert "zoom" not in shared.state()


def test_it_plays_and_is_scrubbed(shared: Opened) -> None:
    row = show(shared)
    marks = row["marks"][-1]
    scrub = shared.page.query_selector(".scrub")
    assert scrub.get_attribute("max") == str(len(marks) - 1)
    scrub.focus()
    shared.page.keyboard.press("End")
    shared.page.keyboard.press("ArrowLeft")
    assert shared.text(".moment") == marks[-2]["text"] == scrub.get_attribute("aria-valuetext")
    moment = marks[-2]["at"] * row["end"]
    said = shared.texts("#lanes .standing li")
    for lane, text in zip(row["lanes"], said, strict=True):
        running = [b["text"] for b in lane["blocks"] if b["start"] <= moment < b["end"]]
        assert (running or ["another step"])[0] in text
    [curve] = shared.served.ask("step", question=SPLIT, pp_rank=None)
    share = moment / (row["lanes"][0]["end"] - row["lanes"][0]["begin"])
    near = min(curve["points"], key=lambda p: abs(p["at"] - share))
    assert shared.text("#step .reading b") == near["total"]["text"] and near["what"] in shared.text("#step .reading")
    shared.page.keyboard.press("Home")
    shared.page.click(".play")
    shared.until("Number(document.querySelector('.scrub').value) > 3")
    shared.page.click(".play")
    shared.page.wait_for_selector("text=Play")
    shared.page.wait_for_timeout(100)
    at = shared.text(".moment")
    shared.page.wait_for_timeout(200)
    assert shared.text(".moment") == at and shared.text(".play") == "Play"


def test_another_schedule_is_taken_by_a_click_and_lanes_follow_controls(shared: Opened) -> None:
    show(shared)
    shared.page.click("#schedules .chip >> text=1f1b")
    shared.asked("schedule=1f1b")
    shared.until("document.querySelector('.total .kind').textContent === 'Bubble of 1f1b'")
    shared.page.fill("#c-layout-pp", "2")
    shared.page.press("#c-layout-pp", "Enter")
    shared.asked("pp=2")
    shared.until("document.querySelector('#lanes canvas').getAttribute('aria-valuetext').startsWith('2 lanes')")
    assert shared.state()["view"] == "schedules"


def test_one_rank_is_one_lane_and_a_click_makes_more(shared: Opened) -> None:
    row = show(shared, question())
    assert shared.text(".big") == "-" and row["missing"] in shared.text("#lanes .reading")
    assert shared.page.get_attribute(CANVAS, "aria-valuetext").startswith("1 lane of")
    shared.page.click("#schedules >> text=Show two pipeline ranks")
    shared.asked("pp=2")
    shared.until("document.querySelector('#lanes canvas').getAttribute('aria-valuetext').startsWith('2 lanes')")


def test_a_view_is_a_link_and_a_button(browser: Any, here: Served) -> None:
    with opened(browser, here) as page:
        page.go(SHORT)
        assert page.page.get_attribute('.views [aria-current="page"]', "class") is None
        page.page.click(".views >> text=Schedules")
        page.page.wait_for_selector(CANVAS)
        page.page.wait_for_timeout(100)
        assert page.state() == {"question": SHORT, "pp_rank": None, "view": "schedules"}
        page.page.reload()
        page.page.wait_for_selector(CANVAS)
        page.page.click(".views >> text=Memory")
        page.page.wait_for_selector("#memory svg")
        assert page.said == []


def test_an_impossible_layout_says_why_here_too(shared: Opened) -> None:
    show(shared)
    shared.page.fill("#c-layout-tp", "3")
    shared.page.wait_for_selector(".wrong")
    assert "tp = 3" in shared.text(".wrong") and shared.page.query_selector("#lanes.old")
    shared.page.click(".wrong button")
    shared.page.wait_for_selector(".wrong", state="detached")
    shared.rested()


@pytest.mark.parametrize(("width", "theme"), WIDTHS_AND_THEMES)
def test_every_width_and_theme(browser: Any, here: Served, width: int, theme: str) -> None:
    with opened(browser, here, viewport={"width": width, "height": 900}, color_scheme=theme) as page:
        show(page)
        assert page.page.evaluate("document.documentElement.scrollWidth") <= width
        for selector in (CANVAS, "#step svg", "#schedules .chip", ".views", ".theme", ".lane-tools"):
            box = page.page.query_selector(selector).bounding_box()
            assert box["width"] > 50 and box["x"] >= 0 and box["x"] + box["width"] <= width + 1, selector
        dark, forward = {"light": "2f3e8f", "dark": "6f80e0"}, page.page.query_selector(CANVAS)
        assert forward and tuple(bytes.fromhex(dark[theme])) in colours(page)
        other = "dark" if theme == "light" else "light"
        page.page.click(f".theme >> text={other}")
        page.page.wait_for_timeout(150)
        assert tuple(bytes.fromhex(dark[other])) in colours(page) and page.said == []


def test_names_roles_and_contrast(browser: Any, here: Served, axe: str) -> None:
    with opened(browser, here, bypass_csp=True, color_scheme="light") as page:
        show(page)
        page.page.click("#lanes .tools >> text=Table")
        page.page.focus(".scrub")
        page.page.keyboard.press("ArrowRight")
        assert page.serious(axe) == []
        page.page.click(".theme >> text=dark")
        assert page.serious(axe, rules="['color-contrast']") == []
