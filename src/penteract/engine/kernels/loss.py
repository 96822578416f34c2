"""Kernels of the loss: vocabulary-parallel cross entropy in three steps, with z-loss, of all tokens or of some at a
time; and loss terms. Temporaries wider than the logits hold `at_once` tokens at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from penteract.engine.kernels.dense import linear, linear_input
from penteract.engine.kernels.kernel import Env, Tensors, TorchKernel, put_product
from penteract.ops.declarations.loss import at_once
from penteract.ops.tape import Site


def _local_targets(env: Env, site: Site, targets: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Targets as columns of this shard, and a mask of those in it. Others, and ignored targets (< 0), get any
    column."""
    local = targets - env.index(str(site.attrs["axis"])) * columns
    here = (local >= 0).logical_and_(local < columns)
    return local.clamp_(0, columns - 1), here


def row_max(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """The largest logit of each token: [S, B, V/tp] -> [S, B]."""
    outs[0].copy_(ins[0].amax(-1))


def exp_sum(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """For each token, the sum of exp(logit - largest), and the target's logit - largest: [2, S, B]."""
    logits, largest, targets = ins
    local, here = _local_targets(env, site, targets, logits.shape[-1])
    for some in _some(site, logits, largest, local, *outs[0]):
        _put_exp_sum(*some)
    outs[0][1].mul_(here)


def _some(site: Site, logits: torch.Tensor, *others: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Views of `at_once` tokens at a time: logits [n, V], and others [n]."""
    n = at_once(logits.shape, site.attrs)
    return zip(logits.flatten(0, 1).split(n), *(t.flatten().split(n) for t in others), strict=True)


def _put_exp_sum(
    logits: torch.Tensor, largest: torch.Tensor, local: torch.Tensor, total: torch.Tensor, target: torch.Tensor
) -> None:
    shifted = logits - largest[:, None]
    torch.gather(shifted, -1, local[:, None], out=target[:, None])
    torch.sum(shifted.exp_(), -1, out=total)


def negative_log_likelihood(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """The loss's sum over targets [B], the log-sum-exp [S, B] and, where z is set, the z-loss."""
    (total, target), largest, targets = ins
    log_total, counts = total.log(), targets >= 0
    torch.add(log_total, largest, out=outs[1])
    torch.sum(log_total.sub_(target).mul_(counts), (0, 1), out=outs[0])
    if z := site.attrs.get("z"):
        torch.square(outs[1], out=log_total)
        torch.sum(log_total.mul_(counts), (0, 1), out=outs[2]).mul_(z)


def cross_entropy_gradient(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """softmax - target, scaled: [S, B, V/tp]."""
    _put_gradients(env, site, ins, outs[0])


def logits_gradient(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """The same, written over the logits."""
    _put_gradients(env, site, ins, ins[0])


def _put_gradients(env: Env, site: Site, ins: Tensors, out: torch.Tensor) -> None:
    logits, log_sum, targets, g = ins
    local, here = _local_targets(env, site, targets, logits.shape[-1])
    places = out.flatten(0, 1).split(at_once(logits.shape, site.attrs))
    for place, some in zip(places, _some(site, logits, log_sum, targets, local, here), strict=True):
        _put_gradient(place, some, g, site.attrs.get("z", 0.0))


def _put_gradient(out: torch.Tensor, some: tuple[torch.Tensor, ...], g: torch.Tensor, z: float) -> None:
    """The gradient of some tokens' logits; `out` may be the logits."""
    logits, log_sum, targets, local, here = some
    p = (logits - log_sum[:, None]).exp_()
    if z:
        p.mul_((log_sum * (2 * z)).add_(1)[:, None])
    p.scatter_add_(-1, local[:, None], here[:, None].to(p.dtype).neg_())
    out.copy_(p.mul_(g * (targets >= 0)[:, None]))


def rows(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """`count` tokens from `begin` on."""
    outs[0].copy_(ins[0].narrow(0, site.attrs["begin"], site.attrs["count"]))


def join_rows(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """Concatenates chunks of tokens."""
    torch.cat(ins, out=outs[0])


def logits_weight(env: Env, site: Site, ins: Tensors, into: Tensors, add: bool) -> None:
    """gᵀ·x, computed for `columns` columns of the vocabulary at a time."""
    x, g = (t.flatten(0, -2) for t in ins)
    columns = site.attrs["columns"]
    for place, some in zip(into[0].split(columns), g.split(columns, -1), strict=True):
        put_product(place, some.t(), x, add)


def loss(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """Adds a term of the loss, scaled, to those of the step."""
    name = str(site.attrs["name"])
    env.losses[name].addcmul_(ins[0], env.scale[str(site.attrs["scale"])], value=1 / site.attrs["copies"])


def loss_input(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """The gradient of the term: its scale, times the loss scale. Backward begins here."""
    outs[0].copy_(env.scale[str(site.attrs["scale"])])
    if env.loss_scale is not None:
        outs[0].mul_(env.loss_scale)


LOSS = {
    "row_max": TorchKernel(row_max),
    "exp_sum": TorchKernel(exp_sum),
    "negative_log_likelihood": TorchKernel(negative_log_likelihood),
    "cross_entropy_gradient": TorchKernel(cross_entropy_gradient),
    "rows": TorchKernel(rows),
    "join_rows": TorchKernel(join_rows),
    "logits": TorchKernel(linear, linear_input, logits_weight),
    "logits_gradient": TorchKernel(logits_gradient),
    "loss": TorchKernel(loss, loss_input),
}
