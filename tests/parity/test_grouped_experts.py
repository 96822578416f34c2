"""Experts' products by groups: layouts that ask for them take the step of one process, and take what their price says;
where all experts are local, nobody looks at routed counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from layouts import Case, run_case
from penteract.config.layout import Layout
from penteract.config.model import ModelSpec, MoESpec
from pool import Pool

MODEL = ModelSpec(
    layers=2, hidden_size=32, heads=4, kv_heads=2, head_size=8, ffn_size=64, vocab_size=64, initial_std=0.3,
    moe=MoESpec(experts=8, top_k=2, ffn_size=16, shared_ffn_size=24),
)  # fmt: skip
LAYOUTS = [
    Layout(gradient_accumulation_steps=2),
    Layout(recompute=("*",), fuse=("norm", "mlp", "qkv")),
    Layout(dp=2, zero=3),
    Layout(dp=2, ep=2, gradient_accumulation_steps=2),
    Layout(dp=2, ep=2, ep_method="all_gather", gradient_accumulation_steps=2),
    Layout(dp=2, ep=2, ep_method="all_gather", zero=3, recompute=("*",)),
    Layout(dp=2, tp=2, ep=2, ep_method="all_gather", recompute=("ep_all_gather", "permute", "expert_linear")),
    Layout(dp=2, tp=2, ep=2, expert_tp=2, ep_method="all_gather"),
    Layout(dp=2, ep=2, ep_method="all_gather", expert_rows="padded", gradient_accumulation_steps=2),
    Layout(dp=2, ep=2, ep_method="all_gather", expert_rows="padded", zero=3, recompute=("*",)),
    Layout(dp=4, tp=2, ep=4, ep_method="all_gather", expert_rows="padded", recompute=("permute", "swiglu")),
    Layout(dp=2, tp=2, ep=2, expert_tp=2, ep_method="all_gather", expert_rows="padded", fuse=("norm", "mlp", "qkv")),
    Layout(dp=2, cp=2, ep=4, ep_method="all_gather", expert_rows="padded", recompute=("unpermute", "expert_linear")),
    Layout(pp=2, dp=2, ep=2, ep_method="all_gather", expert_rows="padded", schedule="zb_h1",
           gradient_accumulation_steps=3),
    Layout(dp=2, ep=2, expert_rows="padded", capacity_percent=200, gradient_accumulation_steps=2),
    Layout(dp=2, ep=2, expert_rows="padded", capacity_percent=200, zero=3, recompute=("*",)),
    Layout(dp=4, tp=2, ep=4, expert_rows="padded", capacity_percent=400, recompute=("permute", "swiglu")),
    Layout(dp=2, tp=2, ep=2, expert_tp=2, expert_rows="padded", capacity_percent=200, fuse=("norm", "mlp", "qkv")),
    Layout(dp=2, cp=2, ep=4, expert_rows="padded", capacity_percent=400, recompute=("dispatch", "unpermute")),
    Layout(pp=2, dp=2, ep=2, expert_rows="padded", capacity_percent=200, schedule="zb_h1",
           gradient_accumulation_steps=3),
    Layout(dp=2, ep=2, zero=2, recompute=("dispatch", "permute", "expert_linear")),
    Layout(dp=2, ep=2, recompute=("tp_all_gather", "expert_offsets", "choices")),
    Layout(tp=2, expert_tp=2),
    Layout(dp=2, tp=2, ep=2),
    Layout(pp=2, schedule="zb_h1", gradient_accumulation_steps=3),
]  # fmt: skip


def _case(layout: Layout) -> Case:
    return Case(MODEL, replace(layout, experts="grouped"), sequence_length=12)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_layout_is_one_process_and_its_price(pool: Pool, layout: Layout) -> None:
    red = [str(v) for v in pool.run(run_case, _case(layout)) if v.red]
    assert not red, "\n".join(red)


@pytest.mark.parametrize(
    ("layout", "looks"), [
        (Layout(), 0), (Layout(dp=2, ep=2), 2), (Layout(dp=2, ep=2, ep_method="all_gather"), 2),
        (Layout(dp=2, ep=2, ep_method="all_gather", expert_rows="padded"), 0),
        (Layout(dp=2, ep=2, expert_rows="padded"), 0),
    ],
)  # fmt: skip
def test_counts_are_looked_at_where_rows_are_exchanged(layout: Layout, looks: int) -> None:
    ops = [op.site.op_name for chunk in _case(layout).compile(0).chunks for op in chunk.tape.ops]
    assert ops.count("split_sizes") == looks
    assert ops.count("expert_offsets") == MODEL.layers


def test_gate_and_up_are_a_pair_where_their_kernel_adds() -> None:
    layout = Layout(experts="quack", fuse=("norm", "mlp", "glu"))
    for experts, pairs in (("quack", 2), ("grouped", 0)):
        p = Case(MODEL, replace(layout, experts=experts), sequence_length=12).compile(0)
        ops = [op.site.op_name for chunk in p.chunks for op in chunk.tape.ops]
        assert (ops.count("expert_pair"), ops.count("expert_linear")) == (pairs, 6 - 2 * pairs)
        assert ops.count("merged_glu") == 2  # of the shared experts
        sums = [
            i.call
            for chunk in p.chunks
            for some in chunk.actions.values()
            for i in some
            if i.call.site.op_name == "add"
        ]
        # Of copies, two a token: of an expert's input.
        assert len([call for call in sums if call.site.outs[0].shape == (24, 32)]) == 2 - pairs
