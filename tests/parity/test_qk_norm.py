"""QK-norm fused with rotary positions and attention: the step of one process, and what its price says; where the
pattern does not fit, ops stay apart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from layouts import Case, run_case
from penteract.config.layout import FUSIONS, Layout
from penteract.config.mesh import Mesh
from penteract.config.model import ModelSpec, MoESpec
from penteract.config.precision.policy import RECIPES
from penteract.model.decoder import record
from penteract.readings.price import price
from penteract.step.program import compile_step
from pool import Pool
from tiny import SIZES

DENSE = ModelSpec(**SIZES, qk_norm=True)
EXPERTS = replace(DENSE, moe=MoESpec(experts=4, top_k=2, ffn_size=24))
LAYOUTS = [
    (EXPERTS, Layout(gradient_accumulation_steps=2)),
    (DENSE, Layout(dp=2, tp=2, zero=3, recompute=("attention",))),
    (DENSE, Layout(dp=2, zero=2, recompute=("*",))),
    (DENSE, Layout(dp=2, offload=("attention", "linear"))),
    (DENSE, Layout(pp=2, gradient_accumulation_steps=3, schedule="zb_h1")),
]


@pytest.mark.parametrize(("model", "layout"), LAYOUTS, ids=str)
def test_a_layout_is_one_process_and_its_price(pool: Pool, model: ModelSpec, layout: Layout) -> None:
    red = [str(v) for v in pool.run(run_case, Case(model, replace(layout, fuse=FUSIONS), sequence_length=12)) if v.red]
    assert not red, "\n".join(red)


def test_linear_layers_in_fp8_are_merged_too() -> None:
    in_fp8 = RECIPES["fp8_tensorwise"].linear_layers(DENSE.layers)
    tape = record(DENSE, Mesh(Layout(fuse=FUSIONS)), 0, 16, in_fp8).tape
    readers = {op.ins[0]: op for op in tape.ops if op.site.op_name == "normed_attention"}
    merged = [op for op in tape.ops if op.outs and op.outs[0] in readers]
    assert len(merged) == DENSE.layers
    assert {(op.site.op_name, len(op.site.params)) for op in merged} == {("fp8_linear", 3)}


def _ops(model: ModelSpec, layout: Layout) -> list[str]:
    return [op.site.op_name for op in record(model, Mesh(layout), 0, 16).tape.ops]


@pytest.mark.parametrize(
    ("model", "layout", "one"),
    [
        (DENSE, Layout(), True),
        (DENSE, Layout(tp=2), True),
        (replace(DENSE, qkv_bias=True), Layout(), False),
        (DENSE, Layout(cp=2), False),
        (replace(DENSE, positions="learned", max_positions=16), Layout(), False),
    ],
)
def test_where_it_fits(model: ModelSpec, layout: Layout, one: bool) -> None:
    found = _ops(model, replace(layout, fuse=("qkv",)))
    times = model.layers if one else 0
    assert [found.count(name) for name in ("normed_attention", "merged_linear")] == [times, times]
    apart = 0 if one else 2 * model.layers
    assert found.count("rms_norm") == _ops(model, layout).count("rms_norm") - 2 * model.layers + apart


def test_it_keeps_what_ops_apart_keep() -> None:
    """The same bytes wait for backward: query, key and value of the products, and what attention reads of them."""
    apart, fused = (
        max(bytes_ for _, bytes_ in price(compile_step(DENSE, Layout(fuse=fuse), 64, precision=RECIPES["bf16"])).kept)
        for fuse in ((), ("qkv",))
    )  # fmt: skip
    assert apart == fused
