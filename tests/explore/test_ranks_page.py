"""The Ranks view in a real browser: the mesh is drawn and explained, and says what the answers say."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Callable
from typing import Any

import pytest

from explore.drawn_questions import question
from explore.opened import WIDTHS_AND_THEMES, Opened, opened
from explore.served import Served
from explore.test_ranks import group, ranks_of
from penteract.config.layout import Layout

Json = dict[str, Any]
ASKED = question("llama-3.1-8b", "dp=4,tp=4,pp=2,mbs=1,zero=1", global_batch_size=16)
LAYOUT = Layout(dp=4, tp=4, pp=2)
LARGE = question("llama-3.1-405b", "dp=64,tp=8,pp=8,mbs=1,zero=1", global_batch_size=2048)
MESH, HELD = "#mesh canvas", "#holders canvas"


def show(page: Opened, asked: Json = ASKED, **more: Any) -> Json:
    """Open the view on a question. -> the answer that it shows, asked for again."""
    page.page.mouse.move(1, 1)
    page.go(asked, None, "ranks", **more)
    [row] = page.served.ask("ranks", question=asked, **more)
    shown(page, row)
    return row


def shown(page: Opened, row: Json) -> None:
    """Wait until the view shows an answer."""
    page.page.wait_for_selector(MESH, timeout=30_000)
    page.until("document.querySelector('.total .kind').textContent === arg", f"Traffic of rank {row['rank']} in a step")
    page.until("document.querySelector('#parameter').value === arg", row["parameter"]["name"])


def point(page: Opened, rank: int, canvas: str = MESH) -> None:
    """The pointer on a cell: four nodes of eight, in rows of two where there is room."""
    box = page.page.query_selector(canvas).bounding_box()
    size, high = (46, 78) if canvas == MESH else (0, 0)
    node, inside = divmod(rank, 8)
    columns = 2
    left = box["x"] + node % columns * (8 * size + 14) + inside * size
    page.page.mouse.move(left + size / 2, box["y"] + node // columns * high + 18 + size / 2)


def colours(page: Opened) -> dict[int, str]:
    """The colour of each rank's cell, near its corner."""
    places = [(n % 2 * (8 * 46 + 14) + i * 46 + 4, n // 2 * 78 + 18 + 5) for n, i in (divmod(r, 8) for r in range(32))]
    found = page.page.evaluate(
        """(places) => {
          const canvas = document.querySelector('#mesh canvas');
          const copy = Object.assign(document.createElement('canvas'), { width: canvas.width, height: canvas.height });
          const context = copy.getContext('2d', { willReadFrequently: true });
          context.drawImage(canvas, 0, 0);
          return places.map(([x, y]) => Array.from(context.getImageData(x, y, 1, 1).data.slice(0, 3)));
        }""",
        places,
    )
    return {rank: bytes(code).hex() for rank, code in enumerate(found)}


def coloured(page: Opened, right: Callable[[dict[int, str]], bool]) -> None:
    """Wait until the cells have the right colours: a canvas is drawn after the page has changed."""
    end = time.monotonic() + 10
    while not right(found := colours(page)):
        assert time.monotonic() < end, found
        page.page.wait_for_timeout(50)


def saved(page: Opened, figure: str, name: str) -> str:
    page.page.click(f"{figure} .menu summary")
    with page.page.expect_download() as download:
        page.page.click(f"{figure} .menu >> text={name}")
    page.page.click(f"{figure} h2")
    return download.value.path().read_text()


def cells(page: Opened, figure: str) -> list[list[str]]:
    """The rows of a figure's table."""
    page.page.click(f"{figure} .tools >> text=Table")
    lines = page.page.query_selector_all(f"{figure} .table[aria-label$='as a table'] tbody tr")
    found = [[c.text_content() for c in line.query_selector_all("th, td")] for line in lines]
    page.page.click(f"{figure} .tools >> text=Table")
    return found


def test_the_view_is_whole_and_says_what_the_answer_says(shared: Opened) -> None:
    row = show(shared)
    assert shared.texts("h2") == ["Ranks on their nodes", "What rank 0 sends and receives in a step",
                                  "Who holds which part of a parameter"]  # fmt: skip
    assert shared.text(".big") == row["number"] and shared.text(".state") == row["verdict"]
    facts = dict(zip(shared.texts(".verdict .facts dt"), shared.texts(".verdict .facts dd"), strict=True))
    assert facts == {fact["label"]: fact["text"] for fact in row["facts"]}
    assert row["nodes_text"] in shared.text("#mesh") and row["command"] == shared.command()
    assert [[c[1], c[2], c[3], c[6], c[7], c[9]] for c in cells(shared, "#traffic")] == [
        [t["collective"], t["what"], t["text"], t["calls"], t["amount"]["text"], t["seconds"]] for t in row["traffic"]
    ]
    assert shared.texts("#traffic .call .much") == [f"{t['seconds']} · {t['amount']['text']}" for t in row["traffic"]]
    sums = shared.page.query_selector_all("#traffic .table tbody tr")
    assert [[c.text_content() for c in line.query_selector_all("th, td")] for line in sums] == [
        [s["label"], s["link_text"], s["calls"], s["amount"]["text"], s["seconds"], s["share"]] for s in row["sums"]
    ]
    assert [c[2] for c in cells(shared, "#mesh")] == [axis["text"] for axis in row["axes"]]
    assert [c[:3] for c in cells(shared, "#holders")] == [
        [str(p["number"]), p["slice"], p["text"]] for p in row["parameter"]["parts"]
    ]
    assert shared.texts("#parameter option") == [one["text"] for one in row["parameters"]]


def test_groups_have_the_colours_of_their_dimensions(shared: Opened) -> None:
    show(shared, rank=5)
    tokens = {"tp": "b34a00", "dp": "0067a0", "pp": "00734f"}
    expected = dict.fromkeys(range(32), "f0eeea") | dict.fromkeys(range(16), "e3e0da")  # and its pipeline rank
    for axis, code in tokens.items():
        expected |= dict.fromkeys(group(LAYOUT, axis, 5), code)
    expected[5] = "191c22"
    coloured(shared, lambda found: found == expected)
    alone = dict.fromkeys(range(32), "f0eeea") | dict.fromkeys(range(16), "e3e0da")
    alone |= dict.fromkeys(group(LAYOUT, "dp", 5), tokens["dp"]) | {5: "191c22"}
    shared.page.click('[aria-label="Show groups of dp alone"]')
    coloured(shared, lambda found: found == alone)
    shared.page.click('[aria-label="Show groups of dp alone"]')


def test_the_pointer_shows_another_ranks_groups_and_a_click_chooses_it(shared: Opened) -> None:
    show(shared)
    point(shared, 22)
    shared.until("document.querySelector('#mesh .reading').textContent.startsWith('rank 22 ')")
    assert shared.text("#mesh .reading") == "rank 22 · node 2, GPU 6 · pp 1, dp 1, tp 2" == shared.text("#tip")
    coloured(shared, lambda found: all(found[r] == "b34a00" for r in group(LAYOUT, "tp", 22) if r != 22))
    assert shared.page.get_attribute(MESH, "aria-valuetext").startswith("rank 22 ")
    shared.page.mouse.down()
    shared.page.mouse.up()
    [row] = shared.served.ask("ranks", question=ASKED, rank=22)
    shown(shared, row)
    assert shared.text(".state") == row["verdict"]
    shared.page.wait_for_timeout(100)
    assert shared.state()["rank"] == 22 and shared.state()["view"] == "ranks"
    shared.page.mouse.move(1, 1)
    shared.until("document.querySelector('#mesh .reading').textContent.startsWith('rank 22 ')")


def test_the_keyboard_goes_from_rank_to_rank(shared: Opened) -> None:
    show(shared, rank=1)
    shared.page.focus(MESH)
    for key, rank in (
        ("ArrowRight", 2),
        ("PageDown", 10),
        ("ArrowLeft", 9),
        ("PageUp", 1),
        ("End", 31),
        ("ArrowRight", 31),
        ("Home", 0),
    ):
        shared.page.keyboard.press(key)
        shared.until("document.querySelector('#mesh canvas').getAttribute('aria-valuenow') === arg", str(rank))
    shared.page.keyboard.press("PageDown")
    shared.page.keyboard.press("Enter")
    shared.until("document.querySelector('.total .kind').textContent === 'Traffic of rank 8 in a step'")


def test_a_row_of_traffic_shows_its_ranks(shared: Opened) -> None:
    row = show(shared)
    for i, one in enumerate(row["traffic"]):
        if one["collective"] == "reduce_scatter" and one["dimension"] == "dp":
            calls = shared.page.query_selector_all("#traffic .call")
            calls[i].focus()
            shared.page.keyboard.press("Enter")
            assert calls[i].get_attribute("aria-pressed") == "true"
            shared.page.mouse.move(1, 1)
            ranks = {*ranks_of(one["ranks"])} - {0}
            coloured(shared, lambda found: {rank for rank, code in found.items() if code == "0067a0"} == ranks)  # noqa: B023
            calls[i].focus()
            shared.page.keyboard.press("Enter")
            return
    raise AssertionError("no gradients are reduced")


def test_parameters_parts_and_their_holders(shared: Opened) -> None:
    show(shared)
    shared.page.select_option("#parameter", "layers.0.mlp.down.weight")
    [row] = shared.served.ask("ranks", question=ASKED, parameter="layers.0.mlp.down.weight")
    shown(shared, row)
    held = row["parameter"]
    assert shared.texts("#holders .facts dd") == [fact["text"] for fact in held["facts"]]
    assert held["states_text"] in shared.text("#holders")
    shared.page.wait_for_timeout(100)
    assert shared.state()["parameter"] == "layers.0.mlp.down.weight"
    shared.page.focus("#holders .parts")
    shared.page.keyboard.press("ArrowRight")
    one = held["parts"][1]
    assert shared.page.get_attribute(".parts", "aria-valuetext") == f"part 1: {one['slice']}, ranks {one['text']}"
    assert shared.text("#holders .legend b") == one["text"]
    box = shared.page.query_selector("#holders .parts").bounding_box()
    shared.page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + box["height"] / 2)  # cut along its columns
    assert shared.page.get_attribute(".parts", "aria-valuenow") == "3"
    shared.page.mouse.move(1, 1)
    shared.page.focus(HELD)
    shared.page.keyboard.press("End")
    assert shared.text("#holders .halves div + div .reading").endswith("holds none of it")  # the second pipeline rank


def test_the_files_have_the_data(shared: Opened) -> None:
    row = show(shared)
    lines = list(csv.reader(io.StringIO(saved(shared, "#mesh", "CSV"))))
    assert lines[0] == ["Rank", "Node", "GPU", "pp", "dp", "tp"] and len(lines) == 33
    for rank, node, device, *at in lines[1:]:
        assert (int(node), int(device)) == divmod(int(rank), 8)
        for axis, place in zip(("pp", "dp", "tp"), at, strict=True):
            assert group(LAYOUT, axis, int(rank))[int(place)] == int(rank)
    drawing = saved(shared, "#mesh", "SVG")
    assert drawing.startswith("<svg") and drawing.count("<rect") == 33 and "#b34a00" in drawing and "NaN" not in drawing
    assert len(list(csv.reader(io.StringIO(saved(shared, "#traffic", "CSV"))))) == 1 + len(row["traffic"])
    assert saved(shared, "#traffic", "SVG").count("<g") >= len(row["traffic"])


def test_the_view_follows_the_controls_and_says_what_is_wrong(shared: Opened) -> None:
    show(shared, rank=31)
    shared.page.fill("#c-layout-pp", "1")
    shared.page.press("#c-layout-pp", "Enter")
    shared.asked("dp=4 tp=4")
    shared.until("document.querySelector('#mesh canvas').getAttribute('aria-valuemax') === '15'")
    shared.page.fill("#c-layout-tp", "3")
    shared.page.wait_for_selector(".wrong")
    assert shared.page.query_selector("#mesh.old")


def test_one_rank_sends_nothing_and_a_click_makes_eight(shared: Opened) -> None:
    row = show(shared, question("gpt2", "dp=1", sequence_length=256, global_batch_size=4))
    assert row["missing"] in shared.text("#traffic") and shared.text(".big") == "0 B"
    shared.page.click("text=Show eight ranks")
    shared.until("document.querySelector('#mesh canvas').getAttribute('aria-valuemax') === '7'")
    shared.until("document.querySelector('#traffic .call') !== null")


def test_a_page_that_opens_on_one_rank_draws_the_traffic_of_eight(browser: Any, here: Served) -> None:
    """The figure's element is not there when its component begins."""
    with opened(browser, here) as page:
        show(page, question("gpt2", "dp=1", sequence_length=256, global_batch_size=4))
        page.page.click("text=Show eight ranks")
        page.until("document.querySelector('#traffic .call') !== null")
        assert page.said == []


@pytest.mark.parametrize(("width", "theme"), WIDTHS_AND_THEMES)
def test_every_width_and_theme(browser: Any, here: Served, width: int, theme: str) -> None:
    with opened(browser, here, viewport={"width": width, "height": 900}, color_scheme=theme) as page:
        show(page)
        assert page.page.evaluate("document.documentElement.scrollWidth") <= width
        for selector in (MESH, HELD, "#traffic svg", "#holders .parts", "#parameter", ".views", ".theme"):
            box = page.page.query_selector(selector).bounding_box()
            assert box["width"] > 50 and box["x"] >= 0 and box["x"] + box["width"] <= width + 1, selector
        assert page.said == []


def test_names_roles_and_contrast(browser: Any, here: Served, axe: str) -> None:
    with opened(browser, here, bypass_csp=True, color_scheme="light") as page:
        show(page)
        for figure in ("#mesh", "#traffic", "#holders"):
            page.page.click(f"{figure} .tools >> text=Table")
        page.page.focus("#traffic .call")
        page.page.keyboard.press("Enter")
        assert page.serious(axe) == []
        page.page.click(".theme >> text=dark")
        assert page.serious(axe, rules="['color-contrast']") == []
