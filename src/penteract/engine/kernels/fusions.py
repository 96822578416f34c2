"""Reference kernels of fused ops, in plain torch: what their parts do, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch

from penteract.engine.kernels.attention import attention, attention_input
from penteract.engine.kernels.dense import put_largest_of, rms_norm, rms_norm_input
from penteract.engine.kernels.kernel import (
    Bindable,
    Bound,
    Env,
    Tensors,
    TorchKernel,
    bound,
    in_turn,
    put,
    put_product,
)
from penteract.engine.kernels.loss import exp_sum, logits_gradient, negative_log_likelihood, row_max
from penteract.engine.kernels.rotary import angles
from penteract.ops.declarations.fusions import columns
from penteract.ops.spec import Spec
from penteract.ops.tape import Site


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def rotate_(env: Env, site: Site, packed: torch.Tensor, positions: torch.Tensor, sign: int) -> None:
    """Rotate the first `rotary_columns` columns of a packed register by position, in place; back with sign -1."""
    cos, sin = angles(site, positions, env.stat)  # [s, B, 1, C/2]
    heads = packed[..., : site.attrs["rotary_columns"]].unflatten(-1, (-1, site.attrs["head_size"]))
    a, b = heads[..., site.attrs["plain_size"] :].chunk(2, -1)
    sin = sin.mul_(sign)
    first = (a * cos).addcmul_(b, sin, value=-1)
    b.copy_((b * cos).addcmul_(a, sin))
    a.copy_(first)


Rotate = Callable[[Env, Site, torch.Tensor, torch.Tensor, int], None]


@Bindable
def rotate_on_gpu_(env: Env, site: Site, packed: torch.Tensor, positions: torch.Tensor, sign: int) -> Bound:
    """The same by one kernel; Triton is imported when a run first asks for it."""
    from penteract.engine.kernels.triton.fusions import rotate_ as in_one_pass

    return in_one_pass.bind(env, site, packed, positions, sign)


# ---- norm ----------------------------------------------------------------------------------------------------------


def fork_norm_input(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """The norm's gradient of x and that of x's other reader, summed; the weight's in the first of the partial sums.
    With a third out: the largest absolute value of that sum."""
    x, scale, g, other = ins
    gradient, parts, *largest = outs
    rms_norm_input(env, site, [x, scale, g], weights, [gradient])
    gradient.add_(other)
    parts.zero_()
    slopes = (x.unsqueeze(-2) * scale[..., None]).mul_(g.unsqueeze(-2))
    torch.sum(_rows(slopes), 0, out=parts[0])
    for found in largest:
        put_largest_of(gradient, found)


def add_norm(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """x + y, and the norm of this sum."""
    torch.add(ins[0], ins[1], out=outs[0])
    rms_norm(env, site, outs[:1], weights, outs[1:])


def fork_norm_weight(env: Env, site: Site, ins: Tensors, into: Tensors, add: bool) -> None:
    """The sum of the partial sums, [D]."""
    put(into[0], ins[0].sum(0), add)


# ---- linear ----------------------------------------------------------------------------------------------------------


def merged_linear(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """x·wᵀ for each weight, side by side; heads are rotated by position."""
    x, out = _rows(ins[0]), _rows(outs[0])
    for (begin, end), w in zip(columns([len(w) for w in weights]), weights, strict=True):
        torch.mm(x, w.t(), out=out[:, begin:end])
    if len(ins) > 1:
        rotate_(env, site, outs[0], ins[1], 1)


def merged_linear_input(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """The sum over weights of g·w."""
    g, out = _rows(ins[0]), _rows(outs[0])
    for i, ((begin, end), w) in enumerate(zip(columns([len(w) for w in weights]), weights, strict=True)):
        if i == 0:
            torch.mm(g[:, begin:end], w, out=out)
        else:
            torch.addmm(out, g[:, begin:end], w, out=out)


def merged_linear_weight(env: Env, site: Site, ins: Tensors, into: Tensors, add: bool) -> None:
    """gᵀ·x for each weight."""
    x, g = _rows(ins[0]), _rows(ins[1])
    for (begin, end), y in zip(columns([len(y) for y in into]), into, strict=True):
        put_product(y, g[:, begin:end].t(), x, add)


# ---- swiglu ----------------------------------------------------------------------------------------------------------


def packed_swiglu(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """silu(gate)·up of the two halves."""
    put_swiglu(ins[0], outs[0])


def put_swiglu(packed: torch.Tensor, out: torch.Tensor) -> None:
    """silu(gate)·up of a packed tensor [.., 2·F], into [.., F]."""
    gate, up = packed.chunk(2, -1)
    torch.ops.aten.silu.out(gate, out=out).mul_(up)


def packed_swiglu_input(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """The gradients of both halves, side by side."""
    put_swiglu_input(*ins, *outs)


def put_swiglu_input(packed: torch.Tensor, g: torch.Tensor, out: torch.Tensor) -> None:
    """The gradients of gate and up [.., 2·F], from both and g [.., F]."""
    gate, up = packed.chunk(2, -1)
    of_gate, of_up = out.chunk(2, -1)
    torch.ops.aten.silu.out(gate, out=of_up).mul_(g)
    torch.mul(g, up, out=of_gate)
    torch.ops.aten.silu_backward.grad_input(of_gate, gate, grad_input=of_gate)


# ---- attention -------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def plain_site(site: Site) -> Site:
    """The attention that a packed one stands for: query, key and value apart, and no positions."""
    rows = site.ins[0].shape[:-1]
    ins = (*(Spec((*rows, w)) for w in site.attrs["widths"]), *site.ins[2:])
    return replace(site, op_name="attention", ins=ins)


def _split(site: Site, x: torch.Tensor) -> list[torch.Tensor]:
    return list(x.split(site.attrs["widths"], -1))


def packed(kernel: TorchKernel, rotate: Rotate = rotate_) -> TorchKernel:
    """An attention kernel on packed registers: it reads and writes views of them. `rotate` turns gradients back."""
    assert kernel.input_gradient is not None
    inner = kernel.input_gradient

    def forward(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> Bound:
        return bound(kernel.forward, env, plain_site(site), [*_split(site, ins[0]), *ins[2:]], weights, outs)

    def input_gradient(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> Bound:
        apart, into = [*_split(site, ins[0]), *ins[2:]], _split(site, outs[0])
        attend = bound(inner, env, plain_site(site), apart, weights, into)
        return in_turn(attend, bound(rotate, env, site, outs[0], ins[1], -1))

    return TorchKernel(Bindable(forward), Bindable(input_gradient))


def packed_attention(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """Attention of contiguous copies."""
    apart = [x.clone(memory_format=torch.contiguous_format) for x in _split(site, ins[0])]
    attention(env, plain_site(site), [*apart, *ins[2:]], weights, outs)


def packed_attention_input(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """The gradient of query, key and value before they were rotated."""
    apart = [x.clone(memory_format=torch.contiguous_format) for x in _split(site, ins[0])]
    made = [torch.empty_like(x) for x in apart]
    attention_input(env, plain_site(site), [*apart, *ins[2:]], weights, made)
    torch.cat(made, -1, out=outs[0])
    del apart, made
    rotate_(env, site, outs[0], ins[1], -1)


# ---- loss ------------------------------------------------------------------------------------------------------------


def loss_and_gradient(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """The loss of whole rows of logits, which become its gradient."""
    logits, targets, g = ins
    of_rows = [torch.empty(targets.shape, dtype=outs[0].dtype, device=logits.device)]
    row_max(env, site, [logits], weights, of_rows)
    sums = torch.empty((2, *targets.shape), dtype=outs[0].dtype, device=logits.device)
    exp_sum(env, site, [logits, *of_rows, targets], weights, [sums])
    log_sums = torch.empty_like(sums[0])
    negative_log_likelihood(env, site, [sums, *of_rows, targets], weights, [outs[0], log_sums, *outs[1:]])
    del of_rows, sums
    logits_gradient(env, site, [logits, log_sums, targets, g], weights, [])


FUSIONS = {
    "add_norm": TorchKernel(add_norm),
    "fork_norm": TorchKernel(rms_norm, fork_norm_input, fork_norm_weight),
    "merged_linear": TorchKernel(merged_linear, merged_linear_input, merged_linear_weight),
    "packed_swiglu": TorchKernel(packed_swiglu, packed_swiglu_input),
    "loss_and_gradient": TorchKernel(loss_and_gradient),
    "packed_attention": TorchKernel(packed_attention, packed_attention_input),
}
