"""Fused ops on GPUs: one product for weights that lie behind each other, and kernels that pass over packed registers
once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from penteract.engine.kernels.fusions import merged_linear, merged_linear_input
from penteract.engine.kernels.kernel import Bindable, Bound, Env, Tensors, TorchKernel, in_turn
from penteract.engine.kernels.triton.fork_norm import fork_norm_input, fork_norm_weight
from penteract.engine.kernels.triton.fused_loss.loss_and_gradient import loss_and_gradient
from penteract.engine.kernels.triton.norm import add_norm, rms_norm
from penteract.engine.kernels.triton.rotary import rotate
from penteract.engine.kernels.triton.swiglu import put_swiglu, put_swiglu_input
from penteract.engine.kernels.wide_product import wide_product
from penteract.ops.declarations.fusions import columns
from penteract.ops.tape import Site


@Bindable
def rotate_(env: Env, site: Site, packed: torch.Tensor, positions: torch.Tensor, sign: int) -> Bound:
    """Rotate the first `rotary_columns` columns of a packed register by position, in place; back with sign -1."""
    heads = packed[..., : site.attrs["rotary_columns"]]
    return rotate.bind(site, heads, positions, sign, heads)


def as_one(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Matrices [Fi, D] that lie behind each other in one buffer, as [F1 + F2 + …, D]; None where they do not."""
    first, at = parts[0], parts[0].storage_offset()
    for x in parts:
        if not x.is_contiguous() or x.untyped_storage()._cdata != first.untyped_storage()._cdata:
            return None
        if x.storage_offset() != at:
            return None
        at += x.numel()
    return first.as_strided((sum(len(x) for x in parts), first.shape[1]), first.stride())


@Bindable
def _linear(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> Bound:
    """x·wᵀ of all weights; heads are rotated by position."""
    whole = as_one(weights)
    if whole is None:
        product = partial(merged_linear, env, site, ins[:1], weights, outs)
    else:
        product = partial(torch.mm, _rows(ins[0]), whole.t(), out=_rows(outs[0]))
    return in_turn(product, *[rotate_.bind(env, site, outs[0], positions, 1) for positions in ins[1:]])


@Bindable
def _linear_input(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> Bound:
    """g·w of all weights."""
    whole = as_one(weights)
    if whole is None:
        return partial(merged_linear_input, env, site, ins, weights, outs)
    return partial(torch.mm, _rows(ins[0]), whole, out=_rows(outs[0]))


def _linear_weight(aten: Any, env: Env, site: Site, ins: Tensors, into: Tensors, add: bool) -> Bound:
    """gᵀ·x of all weights."""
    x, g, whole = _rows(ins[0]), _rows(ins[1]), as_one(into)
    if whole is not None:
        return wide_product(aten, whole, g.t(), x, add)
    parts = zip(columns([len(w) for w in into]), into, strict=True)
    return in_turn(*[wide_product(aten, part, g[:, begin:end].t(), x, add) for (begin, end), part in parts])


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1, x.shape[-1])  # never a copy: a bound call would keep it


@Bindable
def _swiglu(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> Bound:
    """silu(gate)·up of the two halves."""
    gate, up = ins[0].chunk(2, -1)
    return put_swiglu.bind(gate, up, outs[0])


@Bindable
def _swiglu_input(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> Bound:
    """The gradients of both halves, side by side."""
    (gate, up), (of_gate, of_up) = ins[0].chunk(2, -1), outs[0].chunk(2, -1)
    return put_swiglu_input.bind(gate, up, ins[1], of_gate, of_up)


def fusions(aten: Any) -> dict[str, TorchKernel]:
    """The kernels, over the operators of `aten`."""
    return {
        "add_norm": TorchKernel(add_norm),
        "fork_norm": TorchKernel(rms_norm, fork_norm_input, fork_norm_weight),
        "merged_linear": TorchKernel(_linear, _linear_input, Bindable(partial(_linear_weight, aten))),
        "packed_swiglu": TorchKernel(_swiglu, _swiglu_input),
        "loss_and_gradient": TorchKernel(loss_and_gradient),
    }


FUSIONS = fusions(torch.ops.aten)
