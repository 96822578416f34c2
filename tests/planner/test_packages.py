"""Which kernels of packages a plan reckons with."""

from __future__ import annotations

import pytest

from penteract import plan
from penteract.config.hardware import cluster
from penteract.config.layout import EVERY_FUSION, FUSIONS
from penteract.config.rules import kernel_packages
from penteract.config.rules.kernel_limits import FA4, QUACK
from penteract.config.rules.kernel_packages import PACKAGES, packages_of, read_packages
from penteract.errors import BadInput
from penteract.planner import question as asking
from penteract.planner.plan import Plan
from penteract.planner.question import question
from penteract.planner.report.as_text import as_text_whole


def planned(gpus: str = "4xH200", model: str = "qwen3-30b-a3b", **more: str) -> Plan:
    return plan(model, gpus, sequence_length=4096, batch="16seqs", layout="zero=3,recompute=full", **more)  # type: ignore[arg-type]


def test_a_plan_for_hopper_has_the_kernels_of_its_packages() -> None:
    found = planned()
    layout = found.best.layout
    assert (layout.attention, layout.experts, layout.fuse) == ("fa4", "quack", EVERY_FUSION)
    assert packages_of(found.ask.model, layout) == PACKAGES and found.packages == tuple(sorted(PACKAGES))
    assert "Kernels of flash-attn-4 and quack-kernels: pip install 'penteract[gpu]'" in as_text_whole(
        found, None, 0, []
    )


def test_a_host_may_lack_some() -> None:
    quicker, without = planned(), planned(packages="none")
    layout = without.best.layout
    assert (layout.attention, layout.experts, layout.fuse) == ("cudnn", "grouped", FUSIONS)
    assert not without.packages and "Kernels of" not in as_text_whole(without, None, 0, [])
    assert quicker.best.time.seconds < 0.95 * without.best.time.seconds
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
    assert question("gpt2", "here").packages == {FA4[0]}
    assert question("gpt2", "1xH200").packages == PACKAGES
    assert question("gpt2", "here", packages="none").packages == frozenset()


def test_only_known_ones_are_taken() -> None:
    assert read_packages("quack-kernels, flash-attn-4") == PACKAGES
    with pytest.raises(BadInput, match="no package of kernels"):
        read_packages("flash-attn")
