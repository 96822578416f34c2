"""Attention of packed registers whose query and key heads are normalised and rotated first: kernels of the heads, in
plain torch and on GPUs, around any kernel of attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from penteract.engine.kernels.attention import attention, attention_input
from penteract.engine.kernels.dense import rms_norm, rms_norm_input
from penteract.engine.kernels.fusions import plain_site, rotate_
from penteract.engine.kernels.kernel import Bindable, Bound, Env, Tensors, TorchKernel, bound, in_turn, put
from penteract.ops.tape import Site


class HeadKernels(NamedTuple):
    """What is done to query and key heads around attention.

    put(env, site, [packed, positions], weights, [heads, scales]): forward
    take_back(env, site, [packed, positions, scales], weights, [gradient, sums]): the first columns of a packed
        gradient, of heads as attention reads them, become those of the product; partial sums of the weights'
    put_sums(env, site, [sums], into, add): gradients of both weights
    """

    put: Callable[[Env, Site, Tensors, Tensors, Tensors], None]
    take_back: Callable[[Env, Site, Tensors, Tensors, Tensors], None]
    put_sums: Callable[[Env, Site, Tensors, Tensors, bool], None]


# ---- plain torch -----------------------------------------------------------------------------------------------------


def _each(site: Site, x: torch.Tensor, size: int = 1) -> list[torch.Tensor]:
    """Query and key of a packed register; of one number for each head, with their size."""
    q, k, *_ = (width // size for width in site.attrs["widths"])
    return [x[..., :q], x[..., q : q + k]]


def _put(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """Norms of query and key, then positions in place."""
    (packed, positions), (heads, scales) = ins, outs
    size = int(site.attrs["head_size"])
    parts = zip(_each(site, packed), weights, _each(site, heads), _each(site, scales, size), strict=True)
    for x, w, y, scale in parts:
        rms_norm(env, site, [x], [w], [y, scale])
    rotate_(env, site, heads, positions, 1)


def _take_back(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """Positions in place, then both norms; each weight's gradient in the first of its partial sums."""
    (packed, positions, scales), (gradient, sums) = ins, outs
    size = int(site.attrs["head_size"])
    rotate_(env, site, gradient, positions, -1)
    sums.zero_()
    parts = zip(_each(site, packed), _each(site, scales, size), _each(site, gradient), weights, sums, strict=True)
    for x, scale, g, w, total in parts:
        slopes = (x.unflatten(-1, (-1, size)) * scale[..., None]).mul_(g.unflatten(-1, (-1, size)))
        torch.sum(slopes.view(-1, size), 0, out=total[0])
        del slopes
        rms_norm_input(env, site, [x, scale, g], [w], [g])


def _put_sums(env: Env, site: Site, ins: Tensors, into: Tensors, add: bool) -> None:
    for total, y in zip(ins[0], into, strict=True):
        put(y, total.sum(0), add)


PLAIN = HeadKernels(_put, _take_back, _put_sums)


def _forward(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """Attention of contiguous copies."""
    o, log_sum, heads, scales = outs
    _put(env, site, ins[:2], weights, [heads, scales])
    apart = [x.clone(memory_format=torch.contiguous_format) for x in _read(site, ins[0], heads)]
    attention(env, plain_site(site), [*apart, *ins[2:]], [], [o, log_sum])


def _input_gradient(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    packed, positions, *rest, heads, scales, g = ins
    apart = [x.clone(memory_format=torch.contiguous_format) for x in _read(site, packed, heads)]
    made = [torch.empty_like(x) for x in apart]
    attention_input(env, plain_site(site), [*apart, *rest, g], [], made)
    torch.cat(made, -1, out=outs[0])
    del apart, made
    _take_back(env, site, [packed, positions, scales], weights, outs)


# ---- any attention ---------------------------------------------------------------------------------------------------


def _read(site: Site, packed: torch.Tensor, heads: torch.Tensor) -> list[torch.Tensor]:
    """What attention reads: query and key of the heads, and the value as it lies."""
    return [*_each(site, heads), packed[..., site.attrs["rotary_columns"] :]]


def normed(kernel: TorchKernel, of_heads: HeadKernels) -> TorchKernel:
    """An attention kernel between kernels of heads: it reads and writes views of registers."""
    assert kernel.input_gradient is not None
    inner = kernel.input_gradient

    def forward(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> Bound:
        *made, heads, scales = outs
        put = bound(of_heads.put, env, site, ins[:2], weights, [heads, scales])
        apart = [*_read(site, ins[0], heads), *ins[2:]]
        return in_turn(put, bound(kernel.forward, env, plain_site(site), apart, [], made))

    def input_gradient(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> Bound:
        packed, positions, *rest, heads, scales, g = ins
        apart, into = [*_read(site, packed, heads), *rest, g], list(outs[0].split(site.attrs["widths"], -1))
        attend = bound(inner, env, plain_site(site), apart, [], into)
        return in_turn(attend, bound(of_heads.take_back, env, site, [packed, positions, scales], weights, outs))

    return TorchKernel(Bindable(forward), Bindable(input_gradient), of_heads.put_sums)


@Bindable
def _put_on_gpu(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> Bound:
    from penteract.engine.kernels.triton.heads import put_heads

    return put_heads.bind(env, site, ins, weights, outs)


@Bindable
def _take_back_on_gpu(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> Bound:
    from penteract.engine.kernels.triton.heads import take_back

    return take_back.bind(env, site, ins, weights, outs)


@Bindable
def _put_sums_on_gpu(env: Env, site: Site, ins: Tensors, into: Tensors, add: bool) -> Bound:
    from penteract.engine.kernels.triton.heads import put_sums

    return put_sums.bind(env, site, ins, into, add)


ON_GPU = HeadKernels(
    _put_on_gpu, _take_back_on_gpu, _put_sums_on_gpu
)  # each imports Triton when a run first asks for it

NORMED_ATTENTION = {"normed_attention": TorchKernel(_forward, _input_gradient, _put_sums)}
