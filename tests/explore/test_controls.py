"""The page's controls: each part of a layout has one, and what it says of a choice is what the planner says."""

from __future__ import annotations

import pytest

from explore.drawn_questions import question
from explore.test_answers import OPENING, Json, ask
from penteract.errors import BadInput
from penteract.explore.answers.controls import leaf, names
from penteract.explore.answers.questions import read_question
from penteract.planner.ask import LAYOUT_SETTINGS
from penteract.planner.plan import exact


def test_every_part_of_a_layout_has_a_control() -> None:
    assert {leaf(name) for name in names() if name.startswith("layout.")} == {*LAYOUT_SETTINGS}
    assert len({*names()}) == len(names())
    controls = [c for group in ask("opening")[0]["controls"] for c in group["controls"]]
    assert all(c["about"] and c["label"] for c in controls)


@pytest.mark.parametrize(
    ("name", "gpu"),
    [("llama-3.1-8b", "H200"), ("llama-3.1-8b", "A100-80GB"), ("tiny-moe", "H200"), ("qwen3-30b-a3b", "B200")],
)
def test_a_choice_is_refused_exactly_where_it_says_so(name: str, gpu: str) -> None:
    """The reason beside a choice is right, and a choice without one is legal."""
    length, batch = (256, 64) if name == "tiny-moe" else (4096, 128)
    asked = question(name, "dp=4,tp=2,mbs=1,zero=1", sequence_length=length, global_batch_size=batch) | {"gpu": gpu}
    wrong, refusals = list[str](), 0
    for control, setting in ask("memory", asked)[0]["settings"].items():
        section, _, field = control.rpartition(".")
        if section == "parts" or field in ("model", "gpu", "precision", "optimizer"):
            continue
        for choice in setting["choices"]:
            changed = {section: {**asked[section], field: choice["value"]}} if section else {field: choice["value"]}
            refused = is_refused({**asked, **changed})
            refusals += refused
            if refused != bool(choice["why_not"]):
                wrong.append(f"{control} = {choice['value']}: {choice['why_not']}")
    assert wrong == [] and refusals > 10


def test_bitwise_is_refused_where_no_run_was_seen_to_repeat() -> None:
    """Beside the choice, and beside those that would make it so."""

    def why_not(control: str, value: str, gpu: str, **layout: str) -> str:
        asked = dict(OPENING) | {"gpu": gpu, "layout": dict(OPENING["layout"]) | layout}
        choices = ask("memory", asked)[0]["settings"][control]["choices"]
        return next(choice["why_not"] for choice in choices if choice["value"] == value)

    assert why_not("layout.determinism", "bitwise", "H200") == ""
    assert "compute capability 8.0" in why_not("layout.determinism", "bitwise", "A100-80GB")
    assert "not seen to repeat" in why_not("layout.elementwise", "reference", "H200", determinism="bitwise")
    assert "adds gradients in any order" in why_not("layout.attention", "cudnn", "H200", determinism="bitwise")


def test_a_kernel_of_other_gpus_is_a_broken_rule_of_its_control() -> None:
    kernels = dict(OPENING["layout"]) | {"attention": "fa4"}
    row = ask("memory", dict(OPENING) | {"gpu": "A100-80GB", "layout": kernels})[0]
    (broken,) = row["broken"]
    assert broken["control"] == "layout.attention" and row["figures"] is None
    assert broken["text"].startswith("the attention kernel 'fa4' is for other GPUs: A100-80GB")
    assert broken["allowed"] == "9.0 (H100, H100-PCIe, H200)"


def is_refused(asked: Json) -> bool:
    try:
        found = read_question(asked)
        exact(found.ask, found.settings)
    except BadInput:
        return True
    return False


def test_a_repair_is_legal_and_near() -> None:
    for layout, text in (("dp=8,tp=3,mbs=1", "tp = 4"), ("dp=5,mbs=1", "global_batch_size = 130")):
        row = ask("memory", question(layout=layout))[0]
        assert row["figures"] is None and row["broken"]
        assert row["repair"]["text"] == text
        assert ask("memory", row["repair"]["question"])[0]["figures"]


def test_packages_that_kernels_need_are_named() -> None:
    notes = ask("memory")[0]["figures"]["notes"]
    assert "Needs flash-attn-4 and quack-kernels on the GPUs' hosts: pip install 'penteract[gpu]'" in notes
    assert not ask("memory", dict(OPENING) | {"gpu": "A100-80GB"})[0]["figures"]["notes"]


def test_a_default_of_the_planner_is_not_a_choice() -> None:
    found = ask("memory")[0]["settings"]
    assert (found["layout.attention"]["value"], found["layout.attention"]["chosen"]) == ("fa4", False)
    assert found["layout.zero"]["chosen"] and found["layout.ep"]["idle"] == "this model has no experts"
    assert found["layout.cp"]["choices"][1]["why_not"] == ""  # the kernel of attention follows
