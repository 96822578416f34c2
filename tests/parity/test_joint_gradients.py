"""The way back through SwiGLU and the linear layer after it, in one call: the bits of two, a step and its price on
layouts; what is never made; and where they are two calls."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from layouts import Case, _prepare, run_case
from penteract.config.layout import EVERY_FUSION, PLAIN, Edit, Fusion, Layout
from penteract.config.mesh import Mesh
from penteract.config.model import ModelSpec, MoESpec
from penteract.config.precision.policy import RECIPES
from penteract.engine.comm.groups import ProcessGroups
from penteract.engine.kernels.reference import REFERENCE
from penteract.model.decoder import record
from penteract.ops.lower import lower
from penteract.ops.tape import Call, Tape
from penteract.readings.price import price
from penteract.step.program import compile_step
from penteract.step.walk import walk
from pool import Pool
from tiny import SIZES

DENSE = ModelSpec(**SIZES)
EXPERTS = replace(DENSE, moe=MoESpec(experts=4, top_k=2, ffn_size=24, shared_ffn_size=40))
BIASED = replace(DENSE, mlp_bias=True)
GLU: tuple[Fusion, ...] = ("norm", "mlp", "glu")
LAYOUTS = [
    (EXPERTS, Layout(gradient_accumulation_steps=2, fuse=GLU)),
    (DENSE, Layout(dp=2, tp=2, zero=3, recompute=("linear",), fuse=GLU)),
    (DENSE, Layout(tp=2, recompute=("tp_all_gather",), fuse=EVERY_FUSION)),
    (DENSE, Layout(dp=2, zero=2, recompute=("*",), fuse=GLU)),
    (DENSE, Layout(dp=2, offload=("linear",), fuse=EVERY_FUSION)),
    (DENSE, Layout(pp=2, tp=2, gradient_accumulation_steps=3, schedule="zb_h1", fuse=GLU)),
]


@pytest.mark.parametrize(("model", "layout"), LAYOUTS, ids=str)
def test_a_layout_is_one_process_and_its_price(pool: Pool, model: ModelSpec, layout: Layout) -> None:
    red = [str(v) for v in pool.run(run_case, Case(model, layout, sequence_length=12)) if v.red]
    assert not red, "\n".join(red)


def _made(model: ModelSpec, fuse: tuple[Fusion, ...]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    case = Case(model, Layout(fuse=fuse), 64, precision=RECIPES["bf16"])
    run = _prepare(case.compile(0), ProcessGroups(), dict(REFERENCE))
    walk(run.p, run)
    return run.state.gradients, run.totals


@pytest.mark.parametrize("model", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_a_step_has_the_same_bits(model: ModelSpec) -> None:
    apart, joint = _made(model, ("mlp",)), _made(model, ("mlp", "glu"))
    assert apart[0].keys() == joint[0].keys()
    assert all(torch.equal(g, joint[0][name]) for name, g in apart[0].items())
    assert torch.equal(apart[1], joint[1])


def _tape(model: ModelSpec, fuse: tuple[Fusion, ...], precision: str = "bf16") -> Tape:
    linear_layers = RECIPES[precision].linear_layers(model.layers, model.mtp_layers)
    return record(model, Mesh(Layout(fuse=fuse)), 0, 16, linear_layers).tape


def _calls(tape: Tape, action: str, *, split: bool = False, edit: Edit = PLAIN) -> list[Call]:
    return [i.call for i in lower(tape, edit, split=split).actions[action]]


def _named(calls: list[Call]) -> list[tuple[str, str]]:
    return [(c.site.op_name, c.phase) for c in calls]


def test_a_layer_has_one_call_of_two() -> None:
    """After down's weight gradient, which frees what it alone reads. What is recomputed is what was."""
    apart, joint = (_named(_calls(_tape(DENSE, fuse), "Bwd")) for fuse in (("norm", "mlp"), GLU))
    assert joint.count(("glu_linear", "input_gradient")) == DENSE.layers
    assert not joint.count(("merged_glu", "input_gradient"))
    assert apart.count(("linear", "input_gradient")) - joint.count(("linear", "input_gradient")) == DENSE.layers
    at = joint.index(("glu_linear", "input_gradient"))
    assert joint[at - 1 : at + 2 : 2] == [("linear", "weight_gradient"), ("merged_glu", "weight_gradient")]
    again = _named(_calls(_tape(DENSE, GLU), "Bwd", edit=Edit(("linear",))))
    assert again.count(("merged_glu", "forward")) == DENSE.layers
    assert ("glu_linear", "forward") not in again


def test_weight_gradients_are_put_off() -> None:
    found, later = (_named(_calls(_tape(DENSE, GLU), action, split=True)) for action in ("Inp", "Wgt"))
    assert found.count(("glu_linear", "input_gradient")) == DENSE.layers
    assert later.count(("merged_glu", "weight_gradient")) == DENSE.layers
    assert {phase for _, phase in later} == {"weight_gradient"}


def test_what_is_between_has_no_gradient() -> None:
    """Nothing back has the shape of SwiGLU's result; forward has one in each layer."""
    model = replace(DENSE, ffn_size=72)  # as nothing else is
    chunk = lower(_tape(model, GLU))
    ends = {
        action: [chunk.specs[r].shape[-1:] for i in some for r in i.call.outs]
        for action, some in chunk.actions.items()
    }  # fmt: skip
    assert ends["Fwd"].count((72,)) == model.layers
    assert (72,) not in ends["Bwd"]


@pytest.mark.parametrize(
    ("model", "precision"),
    [(BIASED, "bf16"), (replace(DENSE, activation="gelu"), "bf16"), (DENSE, "fp8_rowwise")],
    ids=str,
)
def test_other_layers_are_calls_of_their_own(model: ModelSpec, precision: str) -> None:
    fuse = tuple(f for f in EVERY_FUSION if f != "fp8")
    calls = _named(_calls(_tape(model, fuse, precision), "Bwd"))
    assert "glu_linear" not in {op_name for op_name, _ in calls}
    assert ("linear", "input_gradient") in calls


def test_it_keeps_what_ops_apart_keep_and_multiplies_as_much() -> None:
    apart, joint = (
        price(compile_step(DENSE, Layout(fuse=fuse), 64, precision=RECIPES["bf16"])) for fuse in (("norm", "mlp"), GLU)
    )  # fmt: skip
    assert [bytes_ for _, bytes_ in apart.kept] == [bytes_ for _, bytes_ in joint.kept]
    assert apart.flops == joint.flops
