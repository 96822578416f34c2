"""The Layouts view in a real browser: it says what the answers say, its controls search anew, and a point is chosen."""

from __future__ import annotations

from typing import Any

import pytest

from explore.drawn_questions import question
from explore.opened import WIDTHS_AND_THEMES, Opened, opened
from explore.served import Served

Json = dict[str, Any]
TINY = question("tiny", "tp=2,mbs=1", sequence_length=256, global_batch_size=16)
CANVAS = "#points canvas"


def show(page: Opened, **more: Any) -> list[Json]:
    """Open the view. -> the rows of the search that it shows, asked for again."""
    page.go(TINY, view="layouts", **more)
    page.rested()
    return page.served.ask("search", question=TINY, **{k: v for k, v in more.items() if k == "search"})


def test_the_screen_says_what_the_answers_say(shared: Opened) -> None:
    first, *_, last = show(shared)
    assert shared.text(".big") == first["number"] and shared.text(".state") == first["verdict"]
    assert shared.texts("#best tbody th") == [row["point"]["name"] for row in first["top"]]
    assert shared.texts("#best .reasons b") == [one["text"] for one in first["left_out"]]
    assert shared.text(".search-line span") == f"{first['found']}. {last['text']}"
    [row] = shared.served.ask("compare", question=TINY)
    assert [text.split("  ")[0] for text in shared.texts("#waterfall text.much")][:-1] == [
        step["text"] for step in row["sides"][0]["waterfall"]
    ]
    others = shared.served.ask("what_if", question=TINY)
    assert shared.texts("#what-if .chip b") == [one["speed"] for one in others if not one["why_not"]]


def test_a_filter_is_held_in_the_command_and_the_link(shared: Opened) -> None:
    show(shared)
    shared.page.click('[aria-label="Pipeline 2"]')
    shared.until("[...document.querySelectorAll('#best tbody th')].every((one) => one.textContent.includes('pp=2'))")
    shared.rested()
    assert shared.state()["search"]["fix"] == {"pp": [2]}
    shared.page.click("#points >> text=any layout")
    shared.until("[...document.querySelectorAll('#best tbody th')].some((one) => !one.textContent.includes('pp=2'))")
    shared.page.click("#points >> text=only what fits")
    shared.until("document.querySelector('[aria-label=\"Pipeline 2\"]').ariaPressed === 'false'")
    shared.page.wait_for_timeout(100)
    assert shared.state()["only"] == "fits"


def test_a_layout_is_chosen_and_another_is_compared(shared: Opened) -> None:
    first = show(shared)[0]
    name = first["top"][1]["point"]["name"]
    shared.page.click('[aria-label="Choose number 2"]')
    shared.until("document.querySelector('#waterfall text.strong')?.textContent === arg", name)
    assert shared.page.query_selector("#best tr.it")
    shared.page.click('[aria-label="Compare with number 1"]')
    shared.page.wait_for_selector("#compare .side >> nth=1")
    assert shared.texts("#compare .side h3") == [name, first["top"][0]["point"]["name"]]
    shared.page.click("text=Compare with nothing")
    shared.page.wait_for_selector("#compare .side", state="detached")


def test_the_keyboard_moves_through_points_and_chooses(shared: Opened) -> None:
    points = show(shared)[-1]["points"]
    least = min((p for p in points if p["simulated"]), key=lambda p: p["amount"]["bytes"])
    shared.page.focus(CANVAS)
    shared.page.keyboard.press("Home")
    shared.until("document.querySelector('#points canvas').ariaValueText.startsWith(arg)", f"{least['name']}: ")
    shared.page.keyboard.press("Enter")
    shared.until("document.querySelector('#waterfall text.strong')?.textContent === arg", least["name"])


def test_a_training_has_a_price_and_a_wrong_one_says_so(shared: Opened) -> None:
    show(shared)
    shared.page.fill("#cost-tokens", "1T")
    shared.page.press("#cost-tokens", "Enter")
    shared.page.fill("#cost-usd", "2.5")
    shared.page.press("#cost-usd", "Enter")
    shared.until("[...document.querySelectorAll('.facts dt')].some((one) => one.textContent === 'USD')")
    shared.page.fill("#cost-tokens", "many")
    shared.page.press("#cost-tokens", "Enter")
    shared.page.wait_for_selector("#points .wrong")
    assert "--tokens" in shared.text("#points .wrong")


def test_a_search_is_stopped_and_the_next_one_answers(shared: Opened) -> None:
    shared.go(question("llama-3.1-405b", "dp=8,tp=8,pp=8,mbs=1", global_batch_size=512), view="layouts")
    shared.until("document.querySelector('.search-line').textContent.includes('priced')", seconds=30)
    shared.page.click("#points >> text=Stop")
    shared.until("document.querySelector('.search-line').textContent.startsWith('Stopped.')")
    show(shared)


@pytest.mark.parametrize(("width", "theme"), WIDTHS_AND_THEMES)
def test_every_width_and_theme(browser: Any, here: Served, width: int, theme: str) -> None:
    with opened(browser, here, viewport={"width": width, "height": 900}, color_scheme=theme) as page:
        show(page, search={"fix": {}, "tokens": "1T", "usd_per_gpu_hour": 2, "against": {"dp": 2}})
        assert page.page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.page.evaluate("performance.getEntriesByName('points').length") == 1
        for selector in (CANVAS, "#best .table", "#waterfall svg", "#compare .side", "#what-if .chip", ".views"):
            box = page.page.query_selector(selector).bounding_box()
            assert box["width"] > 50 and box["x"] >= 0 and box["x"] + box["width"] <= width + 1, selector
        assert page.said == []


def test_names_roles_and_contrast(browser: Any, here: Served, axe: str) -> None:
    with opened(browser, here, bypass_csp=True, color_scheme="light") as page:
        show(page, search={"fix": {"zero": [1]}, "tokens": "1T", "usd_per_gpu_hour": 2, "against": {"dp": 2}})
        page.page.click("#points .tools >> text=Table")
        assert page.serious(axe) == []
        page.page.click(".theme >> text=dark")
        assert page.serious(axe, rules="['color-contrast']") == []
