"""Which names a layout may recompute and offload: those that some tape has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penteract.config.layout import EVERY_FUSION, FUSIONS, Layout
from penteract.config.mesh import Mesh
from penteract.config.model import LatentSpec, ModelSpec, MoESpec
from penteract.config.precision.policy import RECIPES
from penteract.errors import BadInput
from penteract.model.decoder import record
from penteract.ops.declarations import OPS
from penteract.ops.fuse import STANDS_FOR
from penteract.ops.lower import ONCE
from penteract.ops.tape import Tape
from penteract.step.program import INSIDE, REDISTRIBUTIONS, check_op_names
from tiny import SIZES

PLAIN = ModelSpec(**SIZES)
BIASED = replace(PLAIN, norm="layer", activation="gelu", qkv_bias=True, output_bias=True, mlp_bias=True)
LATENT = replace(
    PLAIN, kv_heads=8, head_size=12, latent=LatentSpec(kv_rank=8, query_rank=8, rope_size=4, plain_size=8, value_size=4)
)
LOSS = replace(PLAIN, z_loss_coefficient=1e-4, moe=MoESpec(experts=4, top_k=2, ffn_size=24))
BIAS = replace(PLAIN, moe=MoESpec(experts=4, top_k=2, ffn_size=24, balance="bias"))
AHEAD = replace(PLAIN, mtp_layers=1)
ALL = Layout(fuse=FUSIONS, elementwise="triton")
GLU = replace(ALL, fuse=EVERY_FUSION, experts="quack")
CASES = [
    (PLAIN, Layout(), "bf16"), (BIASED, Layout(), "bf16"), (LATENT, Layout(), "bf16"), (BIAS, Layout(), "bf16"),
    (AHEAD, Layout(), "bf16"),
    (PLAIN, ALL, "bf16"), (PLAIN, ALL, "fp8_tensorwise"), (PLAIN, replace(ALL, loss="chunked", loss_chunk=8), "bf16"),
    (PLAIN, Layout(tp=2, loss="chunked", loss_chunk=8), "bf16"), (PLAIN, Layout(tp=2), "bf16"),
    (PLAIN, Layout(tp=2, collectives="overlapped"), "bf16"),
    (PLAIN, Layout(cp=2), "bf16"), (PLAIN, Layout(cp=2, cp_method="ring"), "bf16"),
    (PLAIN, Layout(cp=4, cp_method="ulysses"), "bf16"), (LOSS, Layout(dp=2, ep=2, cp=2), "bf16"),
    (LOSS, Layout(dp=2, ep=2, ep_method="all_gather"), "bf16"),
    (LOSS, Layout(dp=2, ep=2, ep_method="all_gather", expert_rows="padded", experts="grouped"), "bf16"),
    (LOSS, Layout(dp=2, ep=2, expert_rows="padded", experts="grouped"), "bf16"),
    (LOSS, Layout(experts="grouped"), "bf16"), (replace(PLAIN, qk_norm=True), ALL, "bf16"),
    (PLAIN, GLU, "bf16"), (LOSS, GLU, "bf16"),
]  # fmt: skip


def tapes() -> list[Tape]:
    return [
        record(m, Mesh(layout), 0, 16, RECIPES[p].linear_layers(m.layers, m.mtp_layers)).tape for m, layout, p in CASES
    ]


def allowed(name: str) -> bool:
    try:
        check_op_names(Layout(recompute=(name,), offload=(name,)))
    except BadInput:
        return False
    return True


def test_names_are_those_that_a_tape_has() -> None:
    """Every name that is allowed is on some tape, and every name on a tape is allowed, but for those of `ONCE`."""
    ops = [op for tape in tapes() for op in tape.ops if op.outs and op.site.op_name != "fork"]
    inside = {c.site.op_name for tape in tapes() for op in tape.ops if op.program
              for c in (*op.program.forward, *op.program.backward)}  # fmt: skip
    named = {op.name for op in ops}
    every = {*OPS, *(r.name for r in REDISTRIBUTIONS)}
    assert named - {*ONCE} == {name for name in every if allowed(name)}
    both = (some for tape in tapes() for op in tape.ops if op.program for some in (op.parts, op.parts_back))
    parts = {some.second.op_name for some in both if some is not None}
    assert ((inside & OPS.keys()) | parts) - named - {*ONCE} == {*INSIDE}
    joint = {op.joint.op_name: op.name for op in ops if op.joint is not None}
    joint |= {op.joint_back.op_name: op.name for op in ops if op.joint_back is not None}
    assert {op.site.op_name: op.name for op in ops if op.stands_for} | joint == dict(STANDS_FOR)


@pytest.mark.parametrize("name", sorted(STANDS_FOR))
def test_a_fused_op_goes_by_what_it_stands_for(name: str) -> None:
    with pytest.raises(BadInput) as caught:
        check_op_names(Layout(recompute=(name,)))
    assert caught.value.fix == f"--memory.recompute {STANDS_FOR[name]}"
    check_op_names(Layout(recompute=(STANDS_FOR[name],)))
