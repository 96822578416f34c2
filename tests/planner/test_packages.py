"""Which kernels of packages a plan reckons with."""

from __future__ import annotations

from typing import Any

import pytest

from penteract import plan
from penteract.config.hardware import cluster
from penteract.config.layout import EVERY_FUSION, FUSIONS, Layout
from penteract.config.rules import kernel_packages
from penteract.config.rules.kernel_limits import FA4, QUACK
from penteract.config.rules.kernel_packages import PACKAGES, packages_needed, read_packages
from penteract.errors import BadInput
from penteract.planner import question as asking
from penteract.planner.ask import as_text, parse_settings
from penteract.planner.plan import PLAIN_ATTENTION, Plan, exact
from penteract.planner.question import question
from penteract.planner.report.as_text import as_text_whole


def planned(gpus: str = "4xH200", model: str = "qwen3-30b-a3b", **more: str) -> Plan:
    return plan(model, gpus, sequence_length=4096, batch="16seqs", layout="zero=3,recompute=full", **more)  # type: ignore[arg-type]


def test_a_plan_for_hopper_has_the_kernels_of_its_packages() -> None:
    found = planned()
    layout = found.best.layout
    assert (layout.attention, layout.experts, layout.fuse) == ("fa4", "quack", EVERY_FUSION)
    assert packages_needed(found.ask.model, layout) == PACKAGES and found.packages == tuple(sorted(PACKAGES))
    assert "Needs flash-attn-4 and quack-kernels on the GPUs' hosts: pip install" in as_text_whole(found, None, 0, [])


def test_a_host_may_lack_some() -> None:
    quicker, without = planned(), planned(packages="none")
    layout = without.best.layout
    assert (layout.attention, layout.experts, layout.fuse) == ("cudnn", "grouped", FUSIONS)
    assert not without.packages and "Needs" not in as_text_whole(without, None, 0, [])
    fast, slow = (one.best.time.parts for one in (quicker, without))
    assert fast["compute"] + fast["attention"] < 0.9 * (slow["compute"] + slow["attention"])
    half = planned(packages=QUACK[0]).best.layout
    assert (half.attention, half.experts) == ("cudnn", "quack")


@pytest.mark.parametrize("gpus", ["8xA100", "8xMI300X", "8xB200"])
def test_other_gpus_have_none(gpus: str) -> None:
    assert not planned(gpus, "llama-3.2-1b").packages


def test_a_search_without_packages_says_what_it_leaves_out() -> None:
    asked = {"sequence_length": 1024, "batch": "8seqs", "top": 1}
    assert any("flash-attn-4" in what for what in plan("gpt2", "1xH200", packages="none", **asked).not_tried)  # type: ignore[arg-type]
    assert not any("flash-attn-4" in what for what in plan("gpt2", "1xA100", packages="none", **asked).not_tried)  # type: ignore[arg-type]
    assert not any("flash-attn-4" in what for what in plan("gpt2", "1xH200", **asked).not_tried)  # type: ignore[arg-type]


def test_here_means_what_is_installed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = cluster("1xH200")
    monkeypatch.setattr(asking, "cluster", lambda _: machine)
    monkeypatch.setattr(kernel_packages, "installed_packages", lambda *_: frozenset({FA4[0]}))
    for here in ("here", "8xhere", " HERE "):
        assert question("gpt2", here).packages == {FA4[0]}
    assert question("gpt2", "1xH200").packages == PACKAGES
    assert question("gpt2", "here", packages="none").packages == frozenset()


def test_only_kernels_that_are_called_need_a_package() -> None:
    """The fusion glu finds nothing in an MLP without a gate, nor in torch's experts; other GPUs have none."""
    torches = plan("qwen3-30b-a3b", "4xH200", sequence_length=1024, batch="8seqs",
                   layout="zero=3,recompute=full,attention=cudnn,experts=grouped,fuse=all+glu")  # fmt: skip
    assert not torches.packages
    without_gate = plan("gpt2", "8xH200", sequence_length=1024, batch="16seqs", layout="attention=cudnn")
    assert without_gate.best.layout.fuse == FUSIONS and not without_gate.packages


@pytest.mark.parametrize(
    ("model", "gpus", "held", "told"),
    [
        ("llama-3.2-1b", "1xA100", "attention=fa4", "the attention kernel 'fa4' is for other GPUs"),
        (
            "llama-3.2-1b",
            "1xB200",
            "attention=cudnn/fa4_documents",
            "the attention kernel 'fa4_documents' is for other",
        ),
        ("llama-3.2-1b", "1xMI300X", "fuse=all+glu", "the fusion 'glu' is for other GPUs"),
        ("qwen3-30b-a3b", "8xB200", "experts=quack", "the experts' kernel 'quack' is for other GPUs"),
        ("qwen3-30b-a3b", "8xA100", "experts=grouped", "the experts' kernel 'grouped' is for other GPUs"),
    ],
)
def test_kernels_of_other_gpus_are_refused(model: str, gpus: str, held: str, told: str) -> None:
    """Pinned, or of one layout; with the GPUs that they are for, and the fastest kernel here."""
    asked: dict[str, Any] = {"sequence_length": 1024, "batch": "8seqs"}
    setting = held.partition("=")[0]
    with pytest.raises(BadInput, match=told) as found:
        plan(model, gpus, fix=held, **asked)
    assert found.value.where == f"--fix {setting}" and "H200" in found.value.allowed
    fastest = found.value.fix.removeprefix("--fix ").partition(",")[0]
    if "/" not in held:
        with pytest.raises(BadInput, match=told) as one:
            plan(model, gpus, layout=f"zero=3,recompute=full,{held}", **asked)
        assert one.value.where == f"--layout {setting}" and one.value.allowed == found.value.allowed
    assert plan(model, gpus, layout=f"zero=3,recompute=full,{fastest}", **asked).best.time.seconds > 0


def test_what_finds_nothing_is_for_every_gpu() -> None:
    """The fusion glu without a gate, or with element-wise kernels of torch; experts' kernels without experts."""
    asked: dict[str, Any] = {"sequence_length": 1024, "batch": "8seqs"}
    for model, layout in (
        ("gpt2", "fuse=all+glu"), ("llama-3.2-1b", "fuse=all+glu,elementwise=reference"), ("gpt2", "experts=quack"),
    ):  # fmt: skip
        assert not plan(model, "1xA100", layout=layout, **asked).packages


@pytest.mark.parametrize("packages", ["none", ",".join(sorted(PACKAGES))])
def test_a_text_of_a_layout_has_the_kernels_that_are_not_the_default(packages: str) -> None:
    found = planned(packages=packages)
    layout = found.best.layout
    assert "attention" not in found.ask.text(layout) and "fuse" not in found.ask.text(layout)
    settings = parse_settings(as_text(layout, Layout()), flag="--layout", several=False)
    assert exact(question("qwen3-30b-a3b", "4xH200", sequence_length=4096, batch="16seqs"), settings) == layout


def test_each_precision_has_fusions_of_its_own() -> None:
    """FP8 has no glu: that is its default, so nothing is said of it."""
    found = plan("llama-3.1-8b", "8xH200", precision="bf16,fp8_tensorwise", top=2, fix="dp=8,pp=1")
    assert found.best.estimate.precision.fp8 is not None
    assert "fuse" not in as_text_whole(found, found.best, 0, [])


def test_only_known_ones_are_taken() -> None:
    assert read_packages("quack-kernels, flash-attn-4") == PACKAGES
    assert read_packages("Flash_Attn_4") == {FA4[0]}
    with pytest.raises(BadInput, match="no package of kernels") as refused:
        read_packages("flash-attn")
    assert refused.value.fix == "--packages flash-attn-4"


def test_what_bitwise_costs_is_planned() -> None:
    """A little of attention with a kernel that repeats; where there is none, a line says that attention is torch's."""
    asked: dict[str, Any] = {"sequence_length": 4096, "batch": "16seqs"}
    layout = "dp=4,mbs=2,zero=1"
    off, bitwise, plain = (
        plan("llama-3.2-1b", "4xH200", layout=f"{layout}{more}", packages=packages, **asked)
        for more, packages in (("", None), (",determinism=bitwise", None), (",determinism=bitwise", "none"))
    )
    assert (
        off.best.layout.attention == bitwise.best.layout.attention == "fa4"
        and plain.best.layout.attention == "reference"
    )
    assert 1 < bitwise.best.time.seconds / off.best.time.seconds < 1.02
    assert PLAIN_ATTENTION in plain.notes and PLAIN_ATTENTION not in (*off.notes, *bitwise.notes)
