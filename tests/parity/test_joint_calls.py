"""Two ops in one call: the bits of the two, with any other fusions; a step and its price on layouts; and where they are
two calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from layouts import Case, _prepare, run_case
from penteract.config.layout import EVERY_FUSION, FUSIONS, PLAIN, Edit, Fusion, Layout
from penteract.config.mesh import Mesh
from penteract.config.model import ModelSpec, MoESpec
from penteract.config.precision.policy import RECIPES
from penteract.engine.comm.groups import ProcessGroups
from penteract.engine.kernels.reference import REFERENCE
from penteract.model.decoder import record
from penteract.ops.lower import lower
from penteract.ops.tape import Call, Tape
from penteract.readings.price import price
from penteract.schedule.registry import ScheduleName
from penteract.step.program import compile_step
from penteract.step.walk import walk
from pool import Pool
from tiny import SIZES

DENSE = ModelSpec(**SIZES)
EXPERTS = replace(DENSE, moe=MoESpec(experts=4, top_k=2, ffn_size=24))
LAYER_NORM = replace(DENSE, norm="layer")
MESHES: list[dict[str, Any]] = [
    {"gradient_accumulation_steps": 2}, {"dp": 2, "tp": 2, "zero": 3},
    {"pp": 2, "gradient_accumulation_steps": 3, "schedule": "zb_h1"},
]  # fmt: skip
# What `merged_glu` makes goes by two names: its result as that of SwiGLU, and gate and up as that of a linear layer.
GLU_NAMES = (("swiglu",), ("linear",), ("linear", "swiglu"), ("*",), ("tp_all_gather", "rms_norm", "swiglu"))
LAYOUTS = [
    (EXPERTS, Layout(gradient_accumulation_steps=2, fuse=("add",))),
    (DENSE, Layout(dp=2, tp=2, zero=3, recompute=("rms_norm",), fuse=("norm", "add"))),
    (DENSE, Layout(dp=2, zero=2, recompute=("*",), fuse=("add", "qkv"))),
    (DENSE, Layout(dp=2, offload=("add", "rms_norm"), fuse=FUSIONS)),
    (DENSE, Layout(pp=2, gradient_accumulation_steps=3, schedule="zb_h1", fuse=("add",))),
    *[(DENSE, Layout(**mesh, recompute=names, fuse=EVERY_FUSION)) for mesh in MESHES for names in GLU_NAMES],
    *[(DENSE, Layout(dp=2, offload=names, fuse=EVERY_FUSION)) for names in (("swiglu",), ("linear",), ("*",))],
    (DENSE, Layout(tp=2, recompute=("swiglu",), offload=("linear",), fuse=EVERY_FUSION, collectives="overlapped")),
    (DENSE, Layout(recompute=("*",), recompute_first=1, recompute_else=("swiglu",), fuse=EVERY_FUSION)),
]


@pytest.mark.parametrize(("model", "layout"), LAYOUTS, ids=str)
def test_a_layout_is_one_process_and_its_price(pool: Pool, model: ModelSpec, layout: Layout) -> None:
    red = [str(v) for v in pool.run(run_case, Case(model, layout, sequence_length=12)) if v.red]
    assert not red, "\n".join(red)


@pytest.mark.parametrize(
    ("names", "joint", "products"),
    [((), 0, 0), (("swiglu",), 1, 0), (("linear",), 0, 1), (("linear", "swiglu"), 0, 1), (("*",), 0, 1)],
)
def test_what_swiglu_made_is_made_again_from_gate_and_up(names: tuple[str, ...], joint: int, products: int) -> None:
    """By the call that reads these for their gradients, before the weight gradient that reads it; where they are not
    kept, the product that makes them makes it too."""
    calls = _back(Layout(recompute=names, fuse=EVERY_FUSION))
    found = [call.site.op_name for call in calls if call.phase == "forward"]
    assert found.count("packed_swiglu") == 0 and found.count("merged_glu") == products * DENSE.layers
    made = {call.outs[-1]: i for i, call in enumerate(calls) if call.site.attrs.get("result_again")}
    read = {call.ins[0]: i for i, call in enumerate(calls) if call.phase == "weight_gradient" and call.ins[0] in made}
    assert len(made) == joint * DENSE.layers
    assert made.keys() == read.keys() and all(read[r] == made[r] + 1 for r in made)


def test_a_call_in_parts_makes_nothing_again() -> None:
    """Then it is a pass over gate and up, before."""
    calls = _back(Layout(tp=2, recompute=("swiglu",), fuse=EVERY_FUSION, collectives="overlapped"))
    assert not [call for call in calls if call.site.attrs.get("result_again")]
    assert [call.site.op_name for call in calls].count("packed_swiglu") == DENSE.layers


def _back(layout: Layout) -> list[Call]:
    p = Case(DENSE, layout, sequence_length=12).compile(0)
    return [i.call for chunk in p.chunks for i in chunk.actions["Bwd"]]


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_to_make_it_again_saves_what_it_is(schedule: ScheduleName) -> None:
    """Also where weight gradients wait: then it waits for them, and not what it is made from."""
    layout = Layout(pp=2, schedule=schedule, gradient_accumulation_steps=4, fuse=EVERY_FUSION)
    case = Case(DENSE, layout, sequence_length=12)
    again = replace(case, layout=replace(layout, recompute=("swiglu",)))
    assert price(again.compile(0)).peak < price(case.compile(0)).peak


def _made(model: ModelSpec, fuse: tuple[Fusion, ...], precision: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    case = Case(model, Layout(fuse=fuse, recompute=("rms_norm",)), 64, precision=RECIPES[precision])
    run = _prepare(case.compile(0), ProcessGroups(), dict(REFERENCE))
    walk(run.p, run)
    return run.state.gradients, run.totals


@pytest.mark.parametrize("fuse", [(), ("norm",), ("mlp", "qkv"), FUSIONS, EVERY_FUSION], ids=str)
@pytest.mark.parametrize("model", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_a_step_has_the_same_bits(model: ModelSpec, fuse: tuple[Fusion, ...]) -> None:
    plain, joint = (
        _made(model, tuple(f for f in EVERY_FUSION if f in {*fuse, *more} - less), "bf16")
        for more, less in (((), {"add"}), (("add",), set[str]()))
    )
    assert plain[0].keys() == joint[0].keys()
    assert all(torch.equal(g, joint[0][name]) for name, g in plain[0].items())
    assert torch.equal(plain[1], joint[1])


def _calls(tape: Tape, action: str, edit: Edit = PLAIN) -> list[str]:
    return [i.call.site.op_name for i in lower(tape, edit).actions[action] if i.call.phase == "forward"]


@pytest.mark.parametrize("fuse", [("add",), ("norm", "add")], ids=str)
def test_a_layer_has_one_call_of_two(fuse: tuple[Fusion, ...]) -> None:
    """The first sum of each layer; the second is of a norm of another layer. What is recomputed is one op."""
    plain, joint = (record(DENSE, Mesh(Layout(fuse=some)), 0, 16).tape for some in (fuse[:-1], fuse))
    norm = "fork_norm" if "norm" in fuse else "rms_norm"
    before, now = _calls(plain, "Fwd"), _calls(joint, "Fwd")
    assert now.count("add_norm") == DENSE.layers
    assert before.count("add") - now.count("add") == before.count(norm) - now.count(norm) == DENSE.layers
    for name in ("rms_norm", "add", "*"):
        assert _calls(joint, "Bwd", Edit((name,))) == _calls(plain, "Bwd", Edit((name,)))


def test_a_layer_norm_is_a_call_of_its_own() -> None:
    assert "add_norm" not in _calls(record(LAYER_NORM, Mesh(Layout(fuse=FUSIONS)), 0, 16).tape, "Fwd")


def test_it_keeps_what_ops_apart_keep() -> None:
    apart, joint = (
        price(compile_step(DENSE, Layout(fuse=fuse), 64, precision=RECIPES["bf16"])) for fuse in ((), ("add",))
    )  # fmt: skip
    assert [bytes_ for _, bytes_ in apart.kept] == [bytes_ for _, bytes_ in joint.kept]
