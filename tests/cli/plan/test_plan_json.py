"""The answer of `penteract plan --json`: its keys, what adds up, and what can be asked again."""

from __future__ import annotations

import json

import pytest

from cli.plan.tiny_step import FEW, TINY_STEP, Tell
from penteract.planner.ask import as_word

MEMORY = {"parameters_gib", "gradients_gib", "optimizer_gib", "activations_gib", "other_gib", "allocated_gib"}


def test_json_is_as_promised(tell: Tell) -> None:
    told = tell("plan", *TINY_STEP, *FEW, "--top", "3", "--json", "--tokens", "1B", "--usd-per-gpu-hour", "2")
    assert (told.code, told.err) == (0, "")
    found = json.loads(told.out)
    assert {"model", "cluster", "counts", "layouts", "schema_version", "basis"} <= found.keys()
    counts = found["counts"]
    assert counts["enumerated"] == counts["fit"] + sum(counts["refused"].values())
    assert len(found["layouts"]) == 3
    times = [layout["time"]["step_s"] for layout in found["layouts"]]
    assert times[0] == min(times)
    for layout in found["layouts"]:
        assert {"layout", "memory", "time", "tokens_per_s_per_gpu", "mfu", "mfu_causal", "limited_by"} <= layout.keys()
        assert layout["memory"].keys() >= MEMORY
        kinds = sum(layout["memory"][kind] for kind in MEMORY - {"allocated_gib"})
        assert kinds == pytest.approx(layout["memory"]["allocated_gib"])
        parts = {k: v for k, v in layout["time"].items() if k not in ("step_s", "at_least_s")}
        assert sum(parts.values()) == pytest.approx(layout["time"]["step_s"])
        settings = layout["layout"]
        assert settings["dp"] * settings["tp"] * settings["pp"] * settings["cp"] == 4
    rate = found["layouts"][0]["tokens_per_s_per_gpu"]
    assert found["budget"]["usd"] == pytest.approx(2 * 1e9 / rate / 3600)


def test_one_layout(tell: Tell) -> None:
    told = tell("plan", *TINY_STEP, "--layout", "tp=2,zero=1,mbs=4", "--json")
    (layout,) = json.loads(told.out)["layouts"]
    assert (layout["layout"]["dp"], layout["layout"]["tp"], layout["layout"]["zero"]) == (2, 2, 1)
    assert layout["gradient_accumulation_steps"] == 2


def test_why_in_json_has_the_terms_of_memory(tell: Tell) -> None:
    """Row by row they are the memory of the layout; without --why they are left out."""
    words = ["plan", *TINY_STEP, "--layout", "tp=2,zero=1,mbs=4", "--json"]
    found = json.loads(tell(*words, "--why", "1").out)
    rows, kinds = found["terms"]["rows"], found["layouts"][0]["memory"]
    gib = sum(row["value"] for row in rows if row["kind"] == "optimizer") / 2**30
    assert gib == pytest.approx(kinds["optimizer_gib"]) and {"formula", "line", "each"} <= rows[0].keys()
    assert "terms" not in json.loads(tell(*words).out)


def test_a_layout_in_json_is_one_of_layout(tell: Tell) -> None:
    """Its keys and values, joined, price the same layout; the accumulation steps are beside it."""
    words = ["plan", "tiny-moe", "--gpus", "8xH200", "--seq", "256", "--batch", "32seqs", "--json"]
    for found in json.loads(tell(*words, "--top", "4").out)["layouts"]:
        text = ",".join(f"{name}={as_word(value)}" for name, value in found["layout"].items())
        assert json.loads(tell(*words, "--layout", text).out)["layouts"] == [found]


def test_layouts_are_ranked_over_several_precisions(tell: Tell) -> None:
    told = tell("plan", *TINY_STEP, *FEW, "--precision", "bf16,bf16_pure", "--top", "8", "--json")
    found = json.loads(told.out)
    assert found["step"]["precisions"] == ["bf16", "bf16_pure"]
    assert {layout["precision"] for layout in found["layouts"]} == {"bf16", "bf16_pure"}
    one = json.loads(tell("plan", *TINY_STEP, *FEW, "--precision", "bf16_pure", "--json").out)
    other = json.loads(tell("plan", *TINY_STEP, *FEW, "--json").out)
    assert found["counts"]["enumerated"] == one["counts"]["enumerated"] + other["counts"]["enumerated"]
    firsts = [one["layouts"][0], other["layouts"][0]]  # as fast as each other where the host cannot launch faster
    least = min(lay["time"]["step_s"] for lay in firsts)
    assert found["layouts"][0] in [lay for lay in firsts if lay["time"]["step_s"] == least]
    assert "bf16_pure" in tell("plan", *TINY_STEP, *FEW, "--precision", "bf16,bf16_pure", "--why", "1").out
