"""The controls of the page in a real browser: each changes the question that is asked, as the command has it."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from draws import further
from explore.drawn_questions import DEEP, EXPERTS, question
from explore.opened import Opened

Json = dict[str, Any]
GATHERED = question(
    "tiny-moe", "dp=8,ep=2,ep_method=all_gather,mbs=1,experts=grouped", sequence_length=256, global_batch_size=64
)
IN_BLOCKS = question(
    "tiny-moe", "dp=8,ep=2,ep_method=all_to_all,expert_rows=padded,mbs=1,experts=grouped", sequence_length=256,
    global_batch_size=64,
)  # fmt: skip
HALF = question(layout="dp=8,mbs=1,recompute=tp_all_gather+attention,recompute_every=2")
# control -> a question in which it matters, what is done to it, and what the command then has.
CONTROLS: list[tuple[str, Json, Any, str]] = [
    ("model", question(), "llama-3.2-1b", "plan llama-3.2-1b "),
    ("sequence_length", question(), 4096, "--seq 4096"),
    ("global_batch_size", question(), 256, "--batch 256seqs"),
    ("layout.micro_batch_size", question(), 1, "mbs=1"),
    ("layout.dp", question(), 4, "dp=4"),
    ("layout.tp", question(), 2, "tp=2"),
    ("layout.pp", question(), 2, "pp=2"),
    ("layout.cp", question(), 2, "cp=2"),
    ("layout.ep", EXPERTS, 4, "ep=4"),
    ("layout.zero", question(), "3", "zero=3"),
    ("layout.recompute", question(), "full", "recompute=full"),
    ("layout.offload", question(layout="dp=8,mbs=1,recompute=full"), "layer_inputs", "offload=layer_inputs"),
    ("layout.offload_optimizer", question(), True, "offload_optimizer=true"),
    ("precision", question(), "fp8_tensorwise", "--precision fp8_tensorwise"),
    ("layout.loss", question(), "reference", "loss=reference"),
    ("gpu", question(), "B200", "--gpus 8xB200"),
    ("headroom", question(), 0.2, "--headroom 0.2"),
    ("tp_across_nodes", question(layout="dp=2,tp=8,mbs=1"), True, "--tp-across-nodes"),
    ("layout.schedule", EXPERTS, "gpipe", "schedule=gpipe"),
    ("layout.vpp", question(layout="dp=4,pp=2,vpp=2,schedule=interleaved,mbs=1"), 4, "vpp=4"),
    ("layout.last_stage_less_layers", question(layout="dp=4,pp=2,mbs=1"), 1, "last_stage_less_layers=1"),
    ("layout.cp_method", DEEP, "ring", "cp_method=ring"),
    ("layout.expert_tp", EXPERTS, 2, "expert_tp=2"),
    ("layout.ep_method", EXPERTS, "all_gather", "ep_method=all_gather"),
    ("layout.expert_rows", GATHERED, "padded", "expert_rows=padded"),
    ("layout.capacity_percent", IN_BLOCKS, 125, "capacity_percent=125"),
    ("layout.shard_group", DEEP, 2, "shard_group=2"),
    ("layout.reshard_after_step", DEEP, True, "reshard_after_step=true"),
    ("layout.reduce_scatter_once", DEEP, True, "reduce_scatter_once=true"),
    ("layout.collectives", question(layout="dp=4,tp=2,mbs=1"), "library", "collectives=library"),
    ("layout.determinism", question(), "bitwise", "determinism=bitwise"),
    ("layout.bucket_bytes", question(), 1048576, "bucket_bytes=1048576"),
    ("layout.recompute_every", DEEP, 2, "recompute_every=2"),
    ("layout.recompute_first", DEEP, 4, "recompute_first=4"),
    ("layout.recompute_else", HALF, "full", "recompute_else=full"),
    ("layout.offload_every", question(layout="dp=8,mbs=1,recompute=full,offload=layer_inputs"), 2, "offload_every=2"),
    ("parts.master", question(), "fp32", "--precision.master fp32"),
    ("parts.moments", question(), "int8", "--precision.moments int8"),
    ("parts.gradient", question(), "bf16", "--precision.gradient bf16"),
    ("parts.reduce", question(), "bf16", "--precision.reduce bf16"),
    ("optimizer", question(), "muon", "--optimizer muon"),
    ("layout.attention", question(), "reference", "attention=reference"),
    ("layout.elementwise", question(), "reference", "elementwise=reference"),
    ("layout.fuse", question(), "none", "fuse=none"),
    ("layout.experts", EXPERTS, "grouped", "experts=grouped"),
    ("layout.loss_chunk", question(), 1024, "loss_chunk=1024"),
]  # fmt: skip


def test_every_control_is_tried(shared: Opened) -> None:
    controls = [c["name"] for group in shared.served.ask("opening")[0]["controls"] for c in group["controls"]]
    assert sorted(controls) == sorted(name for name, *_ in CONTROLS)


@pytest.fixture
def priced(shared: Opened) -> Generator[Opened]:
    """A page that asks for no changes: those of each question cost its server more than its price."""

    def answered(route: Any) -> None:
        if '"fits"' in route.request.post_data:
            route.fulfill(status=200, body="")
        else:
            route.continue_()

    shared.page.route("**/api/ask", answered)
    yield shared
    shared.page.unroute("**/api/ask", answered)


# Numbers, choices and switches of every group; the others are as these.
NAMES = [name for name, *_ in CONTROLS]
FEW = [*NAMES[:20], *NAMES[20::5], "parts.master"]


@pytest.mark.parametrize("name", [*FEW, *further((name,) for name in NAMES if name not in FEW)])
def test_a_control_changes_what_it_should(priced: Opened, name: str) -> None:
    (base, value, expected) = next(rest for control, *rest in CONTROLS if control == name)
    priced.go(base)
    assert f"{expected} " not in f"{priced.command()} ".replace(",", " ")
    priced.page.evaluate("document.querySelectorAll('details.group').forEach((d) => (d.open = true))")
    field = f"#c-{name.replace('.', '-')}"
    if isinstance(value, bool):
        priced.page.set_checked(field, value)
    elif isinstance(value, str):
        priced.page.select_option(field, value)
    else:
        priced.page.fill(field, str(value))
        priced.page.press(field, "Enter")
    priced.asked(expected)
    assert not priced.page.query_selector(".wrong"), priced.text(".wrong")
    at = priced.state()["question"]
    for key in name.split("."):
        at = at[key]
    assert (at["name"] if name == "model" else at) == (int(value) if name == "layout.zero" else value)


def test_a_slider_moves_by_keys(shared: Opened) -> None:
    shared.go()
    slider = shared.page.query_selector('input[data-for="c-layout-tp"]')
    slider.focus()
    shared.page.keyboard.press("ArrowRight")
    shared.asked("tp=2")
    assert shared.page.input_value("#c-layout-tp") == "2"
    assert slider.get_attribute("aria-valuetext") == "2"
