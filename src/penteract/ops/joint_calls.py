"""Two ops of the tape whose forward is one call: the fusion "add".

The ops stay on the tape, so backward, recomputation and offload go by them, one by one. Only the call of the first
forward is shared: what one of them made is in registers when the other reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from penteract.ops.declarations import OPS
from penteract.ops.tape import OpCall, Site, Tape

# What a call of two ops is known by: the op whose results come last.
JOINT: Mapping[str, str] = {"add_norm": "rms_norm"}


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
