"""Reference kernels of the dense ops: embedding, linear, norms, rope, activations."""

from __future__ import annotations

import torch

from penteract.engine.kernels.kernel import Env, Tensors, TorchKernel, put, put_product
from penteract.engine.kernels.rotary import angles
from penteract.ops.tape import Site


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


# ---- embedding ---------------------------------------------------------------------------------------------------


def _local_ids(env: Env, site: Site, ids: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Row numbers in this rank's shard, and a mask of ids that belong to other shards (None: the table is not
    sharded)."""
    axis = str(site.attrs["axis"])
    if not axis:
        return ids.reshape(-1), None
    local = ids.reshape(-1) - env.index(axis) * rows
    elsewhere = (local < 0).logical_or_(local >= rows)
    return local.masked_fill_(elsewhere, 0), elsewhere


def embedding(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """ids [S, B] -> rows of the table [S, B, D]; zeros for ids of other shards."""
    local, elsewhere = _local_ids(env, site, ins[0], weights[0].shape[0])
    out = _rows(outs[0])
    torch.index_select(weights[0], 0, local, out=out)
    if elsewhere is not None:
        out.masked_fill_(elsewhere[:, None], 0)


def embedding_weight(env: Env, site: Site, ins: Tensors, into: Tensors, add: bool) -> None:
    """Adds the gradients [S, B, D] to the rows of their ids."""
    ids, g = ins
    local, elsewhere = _local_ids(env, site, ids, into[0].shape[0])
    g = _rows(g).to(into[0].dtype, copy=elsewhere is not None)
    if elsewhere is not None:
        g.masked_fill_(elsewhere[:, None], 0)
    if not add:
        into[0].zero_()
    into[0].index_add_(0, local, g)


# ---- linear ------------------------------------------------------------------------------------------------------


def linear(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """x [S, B, K] -> x·wᵀ (+ b) [S, B, N], with w [N, K]."""
    out = _rows(outs[0])
    torch.mm(_rows(ins[0]), weights[0].t(), out=out)
    if len(weights) == 2:
        out.add_(weights[1])


def linear_input(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """g [S, B, N] -> g·w [S, B, K]."""
    torch.mm(_rows(ins[0]), weights[0], out=_rows(outs[0]))


def linear_weight(env: Env, site: Site, ins: Tensors, into: Tensors, add: bool) -> None:
    """gᵀ·x [N, K], and the sum of g over tokens for a bias [N]."""
    x, g = _rows(ins[0]), _rows(ins[1])
    put_product(into[0], g.t(), x, add)
    if len(into) == 2:
        put(into[1], g.sum(0, dtype=into[1].dtype), add)


def add_bias(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """x [S, B, N] + b [N]."""
    torch.add(ins[0], weights[0], out=outs[0])


def add_bias_weight(env: Env, site: Site, ins: Tensors, into: Tensors, add: bool) -> None:
    """The sum of g over tokens, [N]."""
    put(into[0], _rows(ins[0]).sum(0, dtype=into[0].dtype), add)


# ---- norms -------------------------------------------------------------------------------------------------------


def _groups(x: torch.Tensor, width: int) -> torch.Tensor:
    """[.., n·C] -> [.., n, C]: groups of features that are normalised together."""
    return x.unflatten(-1, (-1, width))


def _put_rms(scale: torch.Tensor, x: torch.Tensor, epsilon: float, *, keepdim: bool = False) -> None:
    """1 / sqrt(mean of squares + epsilon) of the last dim into `scale`; by the norm, so that squares take no memory."""
    torch.linalg.vector_norm(x, dim=-1, keepdim=keepdim, dtype=scale.dtype, out=scale)
    scale.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()


def put_largest_of(x: torch.Tensor, largest: torch.Tensor) -> None:
    """The largest absolute value of x into `largest` [1], where a NaN is the largest of all."""
    torch.linalg.vector_norm(x, torch.inf, dtype=largest.dtype, out=largest[0])


def rms_norm(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """x / sqrt(mean(x²) + ε)·w over the last dim, or over each head; keeps 1 / the root. Zhang 2019 (1910.07467).
    With a third out: the largest absolute value of the result."""
    x = _groups(ins[0], weights[0].shape[0])
    y = _groups(outs[0], weights[0].shape[0])
    scale = outs[1]
    _put_rms(scale, x, site.attrs["epsilon"])
    if x.dtype == env.stat:
        torch.mul(x, scale[..., None], out=y).mul_(weights[0])
    else:
        y.copy_((x * scale[..., None]).mul_(weights[0]))
    for largest in outs[2:]:
        put_largest_of(outs[0], largest)


def rms_norm_input(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """The gradient of x, from x, the kept scale and g."""
    x, scale, g = ins
    width = weights[0].shape[0]
    x, scale = _groups(x, width), scale[..., None]
    slope = _groups(g, width) * weights[0].to(env.stat)
    other = slope * x
    mean = other.mean(-1, keepdim=True).mul_(scale).mul_(scale)
    torch.mul(x, mean, out=other)
    _groups(outs[0], width).copy_(slope.sub_(other).mul_(scale))


def rms_norm_weight(env: Env, site: Site, ins: Tensors, into: Tensors, add: bool) -> None:
    """The sum over tokens of x·scale·g, [width]."""
    x, scale, g = ins
    width = into[0].shape[0]
    put(into[0], (_groups(x, width) * scale[..., None]).mul_(_groups(g, width)).reshape(-1, width).sum(0), add)


def layer_norm(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """(x - mean)·scale·w + b over the last dim; keeps mean and scale. Ba 2016 (1607.06450)."""
    y, mean, scale = outs
    torch.mean(ins[0], -1, keepdim=True, dtype=env.stat, out=mean)
    centred = ins[0] - mean
    _put_rms(scale, centred, site.attrs["epsilon"], keepdim=True)
    y.copy_(centred.mul_(scale).mul_(weights[0]).add_(weights[1]))


def layer_norm_input(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """The gradient of x, from x, the kept mean and scale, and g."""
    x, mean, scale, g = ins
    slope = g * weights[0].to(env.stat)
    slope.sub_(slope.mean(-1, keepdim=True))
    other = (x - mean).mul_(slope)
    inner = other.mean(-1, keepdim=True).mul_(scale).mul_(scale)
    torch.sub(x, mean, out=other).mul_(inner)
    outs[0].copy_(slope.sub_(other).mul_(scale))


def layer_norm_weight(env: Env, site: Site, ins: Tensors, into: Tensors, add: bool) -> None:
    """Sums over tokens: of the normalised x times g for w, of g for b."""
    x, mean, scale, g = ins
    put(into[0], _rows((x - mean).mul_(scale).mul_(g)).sum(0), add)
    put(into[1], _rows(g).sum(0, dtype=into[1].dtype), add)


# ---- positions ---------------------------------------------------------------------------------------------------


def _rotate(env: Env, site: Site, x: torch.Tensor, positions: torch.Tensor, sign: int, out: torch.Tensor) -> None:
    cos, sin = angles(site, positions, env.stat)  # [s, B, 1, C/2]
    x, out = (_groups(t, site.attrs["head_size"]) for t in (x, out))
    if plain := int(site.attrs["plain_size"]):
        out[..., :plain].copy_(x[..., :plain])
    a, b = x[..., plain:].chunk(2, -1)
    ya, yb = out[..., plain:].chunk(2, -1)
    sin = sin.mul_(sign)
    ya.copy_((a * cos).addcmul_(b, sin, value=-1))
    yb.copy_((b * cos).addcmul_(a, sin))


def rope(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """Rotates heads, or a part of each, by position. Su 2021 (2104.09864)."""
    _rotate(env, site, ins[0], ins[1], 1, outs[0])


def rope_input(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """Rotates the gradient back."""
    _rotate(env, site, ins[1], ins[0], -1, outs[0])


# ---- element-wise ------------------------------------------------------------------------------------------------


def swiglu(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """silu(gate)·up, [S, B, F]. Shazeer 2020 (2002.05202)."""
    torch.ops.aten.silu.out(ins[0], out=outs[0]).mul_(ins[1])


def swiglu_input(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """Gradients of gate and up, from both and g."""
    gate, up, g = ins
    torch.ops.aten.silu.out(gate, out=outs[1]).mul_(g)
    torch.mul(g, up, out=outs[0])
    torch.ops.aten.silu_backward.grad_input(outs[0], gate, grad_input=outs[0])


def gelu(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """GELU in its tanh form."""
    torch.ops.aten.gelu.out(ins[0], approximate="tanh", out=outs[0])


def gelu_input(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """The gradient of GELU in its tanh form."""
    torch.ops.aten.gelu_backward.grad_input(ins[1], ins[0], approximate="tanh", grad_input=outs[0])


def add(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """The sum of two values."""
    torch.add(ins[0], ins[1], out=outs[0])


def split(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """The last dim in two."""
    for y, part in zip(outs, ins[0].split([y.shape[-1] for y in outs], -1), strict=True):
        y.copy_(part)


def join(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """Two values side by side in the last dim."""
    torch.cat(ins, -1, out=outs[0])


def repeat_heads(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """Repeats each KV head `times` times, side by side."""
    x = _groups(ins[0], site.attrs["head_size"])
    outs[0].view(*x.shape[:-1], site.attrs["times"], x.shape[-1]).copy_(
        x[..., None, :].expand(*x.shape[:-1], site.attrs["times"], -1)
    )


def repeat_heads_input(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """The sum of the gradients of a head's copies."""
    out = _groups(outs[0], site.attrs["head_size"])
    torch.sum(ins[0].view(*out.shape[:-1], site.attrs["times"], out.shape[-1]), -2, out=out)


def sum_shares(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """This rank's share of x [n·S, B, D], and all others of `ins[1]` -> their sum [S, B, D]."""
    n, me = site.attrs["shares"], env.index(str(site.attrs["axis"]))
    first, *others = [share for i, share in enumerate(ins[1].chunk(n)) if i != me]
    torch.add(ins[0].chunk(n)[me], first, out=outs[0])
    for share in others:
        outs[0].add_(share)


def pack_heads(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """[S, B, n·W] -> [n·S, B, W]: the heads for each of n ranks become contiguous."""
    n = site.attrs["ranks"]
    outs[0].unflatten(0, (n, -1)).copy_(ins[0].unflatten(2, (n, -1)).movedim(2, 0))


def unpack_heads(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """[n·S, B, W] -> [S, B, n·W]: the heads from n ranks side by side."""
    n = site.attrs["ranks"]
    outs[0].unflatten(2, (n, -1)).copy_(ins[0].unflatten(0, (n, -1)).movedim(0, 2))


DENSE = {
    "embedding": TorchKernel(embedding, None, embedding_weight),
    "linear": TorchKernel(linear, linear_input, linear_weight),
    "add_bias": TorchKernel(add_bias, None, add_bias_weight),
    "rms_norm": TorchKernel(rms_norm, rms_norm_input, rms_norm_weight),
    "layer_norm": TorchKernel(layer_norm, layer_norm_input, layer_norm_weight),
    "rope": TorchKernel(rope, rope_input),
    "swiglu": TorchKernel(swiglu, swiglu_input),
    "gelu": TorchKernel(gelu, gelu_input),
    "add": TorchKernel(add),
    "sum_shares": TorchKernel(sum_shares),
    "split": TorchKernel(split, join),  # each is the other's gradient
    "join": TorchKernel(join, split),
    "repeat_heads": TorchKernel(repeat_heads, repeat_heads_input),
    "pack_heads": TorchKernel(pack_heads),
    "unpack_heads": TorchKernel(unpack_heads),
}
