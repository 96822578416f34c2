"""The Memory view in a real browser: it loads, follows its controls, and shows what the command line says."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from draws import seeds
from explore.drawn_questions import DEEP, EXPERTS, drawn, question
from explore.opened import WIDTHS_AND_THEMES, Opened, opened
from explore.served import Served, link, served
from penteract.cli import main
from penteract.units import show_bytes, show_step, show_whole

Json = dict[str, Any]


# ---- opening ---------------------------------------------------------------------------------------------------------


def test_the_printed_address_opens_the_page_and_leaves_no_token(browser: Any) -> None:
    with served("tiny", "--gpus", "2xH200") as running, opened(browser, running) as page:
        page.page.goto(f"{running.origin}/?token={running.token}")
        page.settled()
        assert page.text(".sum .headline").startswith("tiny · 855k parameters · 2xH200")
        page.until("location.hash.length > 10")
        assert running.token not in page.page.url and "?" not in page.page.url
        (cookie,) = page.page.context.cookies()
        assert cookie["httpOnly"] and cookie["sameSite"] == "Strict"
        assert page.page.evaluate("document.cookie") == ""
        page.page.reload()
        page.settled()
        assert page.said == []


def test_without_the_cookie_the_page_says_what_to_do(browser: Any, here: Served) -> None:
    stranger = Served(here.process, here.port, here.token)
    with opened(browser, stranger) as page:
        page.page.goto(here.origin)
        page.page.wait_for_selector("text=open the address that it prints")


def test_the_view_is_whole(shared: Opened) -> None:
    shared.go()
    shared.rested()
    assert shared.texts("h2") == ["Where the memory of every rank goes", "Memory over the step", "Each distinct rank",
                                  "What else would fit"]  # fmt: skip
    assert len(shared.page.query_selector_all("#memory .block")) > 20
    assert shared.page.query_selector("#step path.live")
    assert len(shared.page.query_selector_all("#fits .chip")) > 10
    assert "125.19 GiB" in shared.text(".big")


# ---- what the command line says --------------------------------------------------------------------------------------


@seeds(5, first=100, wide=50)
def test_the_screen_says_what_the_command_line_says(
    shared: Opened, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    shared.go(drawn(seed))
    if shared.page.query_selector(".wrong"):
        assert not shared.page.query_selector(".sum:not(.old)")
        return
    assert main([*shlex.split(shared.command())[1:], "--json"]) in (0, 2)
    told = json.loads(capsys.readouterr().out)
    (layout,) = told["layouts"]
    memory = layout["memory"]
    assert shared.text(".big") == shown(memory["allocated_gib"])
    owners = ("parameters", "gradients", "optimizer", "activations", "other")
    assert shared.texts("#memory .legend b") == [shown(memory[f"{name}_gib"]) for name in owners]
    facts = dict(zip(shared.texts(".facts dt"), shared.texts(".facts dd"), strict=True))
    assert facts["Step"] == show_step(layout["time"]["step_s"])
    assert facts["Tokens/s/GPU"] == show_whole(layout["tokens_per_s_per_gpu"])
    assert facts["MFU"] == f"{layout['mfu']:.1%}"
    pp_ranks = [shown(gib) for gib in memory["by_pp_rank_gib"]]
    assert [text for i, text in enumerate(pp_ranks) if not i or text != pp_ranks[i - 1]] == [
        text for i, text in enumerate(shared.texts("#ranks text.much"))
        if not i or text != shared.texts("#ranks text.much")[i - 1]
    ]  # fmt: skip
    assert ("yes" in shared.page.get_attribute(".total", "class")) == bool(told["counts"]["fit"])


def shown(gib: float) -> str:
    return show_bytes(int(gib * 2**30))


def test_a_block_opens_to_its_formula_and_its_line(shared: Opened) -> None:
    shared.go(DEEP)
    blocks = shared.page.query_selector_all("#memory .block")
    next(p for p in blocks if p.query_selector("title").text_content().startswith("layers.*.mlp.gate.weight")).click()
    [row] = shared.served.ask("memory", question=DEEP)
    label = shared.text(".detail h3")
    blocks = [b for owner in row["figures"]["owners"] for b in owner["blocks"] if b["what"] == label]
    detail = shared.text(".detail")
    block = next(b for b in blocks if b["amount"]["text"] in detail and b["formula"] in detail.replace("\n", ""))
    assert block["times"].strip() in detail and f"{block['numbers']} B" in detail
    assert shared.text(".code figcaption") == block["line"]
    source = row["figures"]["sources"][block["line"]]
    assert source["lines"][source["line"] - source["first"]].strip() in shared.text(".code code.it")


def test_another_rank_can_be_looked_into(shared: Opened) -> None:
    shared.go(EXPERTS)
    assert "pipeline rank 0 (the fullest)" in shared.text("#memory h2") or "rank 1" in shared.text("#memory h2")
    other = shared.page.query_selector('#ranks .rank[aria-pressed="false"]')
    label = other.query_selector("text").text_content()
    other.click()
    shared.until("document.querySelector('#memory h2').textContent.includes(arg)", label)
    shared.until("location.hash.length > 10")
    assert shared.state()["pp_rank"] == int(label.split()[-1])


# ---- controls --------------------------------------------------------------------------------------------------------


def test_an_impossible_layout_says_why_and_offers_the_nearest(shared: Opened) -> None:
    shared.go()
    shared.page.fill("#c-layout-tp", "3")
    shared.page.wait_for_selector(".wrong")
    assert "tp = 3 does not divide attention heads = 32" in shared.text(".wrong")
    assert "tp = 3" in shared.text(".row.fault .note")
    shared.page.click(".wrong button")
    shared.page.wait_for_selector(".wrong", state="detached")
    assert "tp=4" in shared.command() and shared.page.input_value("#c-layout-tp") == "4"


def test_what_would_fit_is_taken_by_a_click(shared: Opened) -> None:
    shared.go(question(layout="dp=8,mbs=2,zero=1", gpu="H100"))
    shared.rested()
    assert "Does not fit" in shared.text(".state")
    chip = shared.page.query_selector("#fits .chip.yes")
    amount = chip.query_selector("b").inner_text()
    chip.click()
    shared.until("document.querySelector('.big').textContent === arg", amount)
    assert "Fits" in shared.text(".state")


def test_an_older_answer_never_comes_after_a_newer_one(browser: Any, here: Served) -> None:
    """The first answers are held back: what is shown is still the last question's."""
    with opened(browser, here) as page:
        page.go()
        held = list[Any]()

        def hold(route: Any) -> None:
            if '"memory"' in route.request.post_data and not held:
                held.append(route)
            else:
                route.continue_()

        page.page.route("**/api/ask", hold)
        page.page.fill("#c-layout-micro_batch_size", "4")
        page.page.press("#c-layout-micro_batch_size", "Enter")
        page.page.wait_for_timeout(300)
        page.page.fill("#c-layout-micro_batch_size", "1")
        page.page.press("#c-layout-micro_batch_size", "Enter")
        page.page.wait_for_timeout(300)
        assert held
        held[0].continue_()
        page.asked("mbs=1")
        page.settled()
        page.page.wait_for_timeout(300)
        assert "mbs=1" in page.command() and page.page.input_value("#c-layout-micro_batch_size") == "1"


def test_a_link_opens_the_same_state(browser: Any, here: Served) -> None:
    asked = question("llama-3.1-70b", "dp=2,tp=8,pp=4,mbs=1,zero=1,recompute=full", gpu="H100", global_batch_size=64)
    with opened(browser, here) as page:
        page.go(asked, 2)
        page.page.wait_for_timeout(100)
        assert page.state() == {"question": asked, "pp_rank": 2, "view": "memory"}
        assert page.page.input_value("#c-layout-pp") == "4" and "pipeline rank 2" in page.text("#memory h2")
        page.page.evaluate(
            "(hash) => (location.hash = hash)", link(question("tiny", "dp=1,mbs=1", sequence_length=256))
        )
        page.asked("plan tiny")
        for broken in ("#q=AAAA", "#q=!!", "#other"):
            page.page.goto("about:blank")
            page.page.goto(here.origin + "/" + broken)
            page.settled()
            assert "llama-3.1-8b" in page.command()
            assert page.text("main > .noted").startswith("The address is no link of this page")
        page.page.evaluate("(hash) => (location.hash = hash)", link(asked))
        page.asked("plan llama-3.1-70b")
        assert not page.texts("main > .noted")
        page.page.evaluate("(hash) => (location.hash = hash)", "#q=BBBB")
        page.page.wait_for_selector("main > .noted")
        assert "llama-3.1-70b" in page.command()
        assert page.said == []


HOSTILE = "<img src=x onerror=alert(1)>"


def test_a_dropped_config_is_priced_and_its_name_is_text(browser: Any, here: Served) -> None:
    config = {"model_type": "llama", "_name_or_path": HOSTILE, "hidden_size": 1024, "num_hidden_layers": 8,
              "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 4096, "vocab_size": 32000,
              "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "rope_theta": 1e4,
              "tie_word_embeddings": False}  # fmt: skip
    drop = """(text) => {
      const data = new DataTransfer();
      data.items.add(new File([text], 'config.json', { type: 'application/json' }));
      window.dispatchEvent(new DragEvent('drop', { dataTransfer: data, cancelable: true }));
    }"""
    with opened(browser, here) as page:
        page.go(question("tiny", "dp=2,mbs=1", sequence_length=256, global_batch_size=16))
        page.page.on("dialog", lambda dialog: page.said.append("a dialog"))
        page.page.evaluate(drop, json.dumps(config))
        page.asked("plan config.json")
        page.settled()
        assert HOSTILE in page.text("#c-model option:checked") or HOSTILE in page.page.evaluate(
            "document.querySelector('#c-model').selectedOptions[0].textContent"
        )
        assert page.page.query_selector("img[src='x']") is None
        assert page.state()["question"]["model"]["config"] == config
        page.page.evaluate(drop, "not json")
        page.page.wait_for_selector(".wrong")
        assert page.said == []


# ---- for people ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "theme"), WIDTHS_AND_THEMES)
def test_every_width_and_theme(browser: Any, here: Served, width: int, theme: str) -> None:
    with opened(browser, here, viewport={"width": width, "height": 900}, color_scheme=theme) as page:
        page.go(DEEP)
        page.rested()
        assert page.page.evaluate("document.documentElement.scrollWidth") <= width
        dark = page.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(16, 18, 22)"
        assert dark == (theme == "dark")
        for selector in ("#memory svg", "#step svg", "#ranks svg", "#fits .chip"):
            box = page.page.query_selector(selector).bounding_box()
            assert box["width"] > 100 and box["x"] >= 0 and box["x"] + box["width"] <= width + 1, selector
        page.page.click(f".theme >> text={'light' if dark else 'dark'}")
        page.until("(getComputedStyle(document.body).backgroundColor === 'rgb(16, 18, 22)') !== arg", dark)
        assert page.said == []


def test_names_and_roles(browser: Any, here: Served, axe: str) -> None:
    """axe finds nothing serious or critical, with all controls and a table open, and with an error."""
    with opened(browser, here, bypass_csp=True) as page:
        page.go(DEEP)
        page.rested()
        page.page.click("#ranks .tools >> text=Table")
        page.page.evaluate("document.querySelectorAll('details.group').forEach((d) => (d.open = true))")
        assert page.serious(axe) == []
        page.page.fill("#c-layout-tp", "3")
        page.page.wait_for_selector(".wrong")
        assert page.serious(axe, "['.verdict', '.controls']") == []


def test_contrast_in_the_dark(browser: Any, here: Served, axe: str) -> None:
    with opened(browser, here, color_scheme="dark", bypass_csp=True) as page:
        page.go(DEEP)
        page.rested()
        assert page.serious(axe, rules="['color-contrast']") == []


def test_the_keyboard_reaches_blocks_and_the_curve(shared: Opened) -> None:
    shared.go()
    shared.rested()
    shared.page.focus("#memory .block >> nth=3")
    shared.page.keyboard.press("Enter")
    assert shared.page.get_attribute("#memory .block >> nth=3", "aria-pressed") == "true"
    shared.page.focus("#step svg.curve")
    before = shared.page.get_attribute("#step svg.curve", "aria-valuetext")
    shared.page.keyboard.press("PageDown")
    after = shared.page.get_attribute("#step svg.curve", "aria-valuetext")
    assert before != after and after in shared.text("#step .reading").replace(" in use  · ", ": ").replace(
        " in use · ", ": "
    )


def test_words_are_explained_on_focus(shared: Opened) -> None:
    shared.go()
    shared.page.focus(".row.dim-tp .help")
    assert shared.text("#tip").startswith("Tensor parallelism, with sequence parallelism")
    shared.page.keyboard.press("Escape")
    assert "hidden" in shared.page.get_attribute("#tip", "class")


def test_a_figure_is_a_table_too_and_files(shared: Opened) -> None:
    shared.go()
    shared.rested()
    shared.page.click("#ranks .tools >> text=Table")
    assert shared.texts("#ranks .table td")[1] == "125.19 GiB"
    for name, check in (("CSV", lambda text: text.startswith("Rank,GPUs,Memory,Bytes")),
                        ("SVG", lambda text: text.startswith("<svg") and "rgb(" in text)):  # fmt: skip
        shared.page.click("#ranks .menu summary")
        with shared.page.expect_download() as download:
            shared.page.click(f"#ranks .menu >> text={name}")
        assert check(download.value.path().read_text())
        shared.page.click("#ranks h2")
    with shared.page.expect_download() as download:
        shared.page.click(".sum .tools >> text=Save run file")
    assert "[parallel]" in download.value.path().read_text()


def test_it_prints_without_controls(shared: Opened) -> None:
    shared.go()
    shared.page.emulate_media(media="print")
    assert not shared.page.is_visible("aside") and shared.page.is_visible("#memory svg")
    shared.page.emulate_media(media="screen")
