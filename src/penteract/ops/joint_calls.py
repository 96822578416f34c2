"""Two ops of the tape that one call computes, forward or back: the fusions "add" and "glu".

The ops stay on the tape, so recomputation, offload and what is kept go by them, one by one. Only one call is shared: of
the first forward, whose first result the other op reads from a register, or of the input gradients, between which there
is no register.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from penteract.ops.declarations import OPS
from penteract.ops.tape import OpCall, Site, Tape

# What a call of two ops is known by: the op whose results come last.
JOINT: Mapping[str, str] = {"add_norm": "rms_norm", "glu_linear": "linear"}


def join_sums(tape: Tape) -> None:
    """add(x, y) -> s; the RMSNorm of s: a forward call of both. Only within a layer, so that layers stay alike."""
    ops = [op for op in tape.ops if op.site.op_name != "fork"]
    root = {v: op.ins[0] for op in tape.ops if op.site.op_name == "fork" for v in op.outs}
    for first, norm in pairwise(ops):
        if _is_normed_sum(first, norm, root):
            tape.ops[tape.ops.index(norm)] = replace(norm, joint=_add_norm(first, norm))


def _is_normed_sum(first: OpCall, norm: OpCall, root: Mapping[int, int]) -> bool:
    """Whether the second is the RMSNorm of whole rows of a sum, which is the first."""
    if first.site.op_name != "add" or norm.site.op_name not in ("rms_norm", "fork_norm"):
        return False
    whole_rows = norm.site.weights[0][0] == norm.site.ins[0].shape[-1]
    read = root.get(norm.ins[0], norm.ins[0])
    return whole_rows and read == first.outs[0] and first.site.layer == norm.site.layer


def _add_norm(first: OpCall, norm: OpCall) -> Site:
    site = norm.site
    outs, extras = OPS["add_norm"].declaration.results(first.site.ins, site.weights, site.attrs)
    return replace(site, op_name="add_norm", ins=first.site.ins, outs=(*outs, *extras))


def join_glus(tape: Tape) -> None:
    """merged_glu(h) -> y; a plain linear layer of y: one call for the input gradients of both, without that of y. Where
    y is recomputed it makes y, too."""
    for glu, reader in pairwise(tape.ops):
        if glu.site.op_name == "merged_glu" and _is_plain(reader) and reader.ins == glu.outs:
            back = _glu_linear(glu, reader)
            again = replace(back, attrs={**back.attrs, "result_again": True})
            tape.ops[tape.ops.index(glu)] = replace(glu, joint_back=back, joint_again=again)


def _is_plain(op: OpCall) -> bool:
    """Whether it is a linear layer without a bias, and not in FP8."""
    return op.site.op_name == "linear" and len(op.site.params) == 1 and not op.site.attrs


def _glu_linear(glu: OpCall, reader: OpCall) -> Site:
    params, weights = (*glu.site.params, *reader.site.params), (*glu.site.weights, *reader.site.weights)
    outs, extras = OPS["glu_linear"].declaration.results(glu.site.ins, weights, glu.site.attrs)
    return replace(glu.site, op_name="glu_linear", outs=(*outs, *extras), params=params, weights=weights)
