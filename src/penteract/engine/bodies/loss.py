"""Reference bodies of the loss: vocabulary-parallel cross entropy in three steps, and loss terms."""

from __future__ import annotations

import torch

from penteract.engine.bodies.body import Env, Tensors, TorchBody
from penteract.ops.tape import Site


def _local_targets(env: Env, site: Site, targets: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Targets as columns of this shard, and where they are that: the rest, and ignored targets (< 0), get any."""
    local = targets - env.index(str(site.attrs["axis"])) * columns
    here = (local >= 0).logical_and_(local < columns)
    return local.clamp_(0, columns - 1), here


def row_max(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    outs[0].copy_(ins[0].amax(-1))


def exp_sum(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    logits, largest, targets = ins
    local, here = _local_targets(env, site, targets, logits.shape[-1])
    shifted = logits - largest[..., None]
    torch.gather(shifted, -1, local[..., None], out=outs[0][1][..., None])
    outs[0][1].mul_(here)
    torch.sum(shifted.exp_(), -1, out=outs[0][0])


def negative_log_likelihood(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    (total, target), largest, targets = ins
    log_total = total.log()
    torch.add(log_total, largest, out=outs[1])
    torch.sum(log_total.sub_(target).mul_(targets >= 0), (0, 1), out=outs[0])


def cross_entropy_gradient(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    logits, log_sum, targets, g = ins
    local, here = _local_targets(env, site, targets, logits.shape[-1])
    p = (logits - log_sum[..., None]).exp_()
    p.scatter_add_(-1, local[..., None], here[..., None].to(p.dtype).neg_())
    outs[0].copy_(p.mul_(g * (targets >= 0)[..., None]))


def loss(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    name = str(site.attrs["name"])
    env.losses[name].addcmul_(ins[0], env.scale[name], value=1 / site.attrs["copies"])


def loss_input(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    outs[0].copy_(env.scale[str(site.attrs["name"])])
    if env.loss_scale is not None:
        outs[0].mul_(env.loss_scale)


LOSS = {
    "row_max": TorchBody(row_max),
    "exp_sum": TorchBody(exp_sum),
    "negative_log_likelihood": TorchBody(negative_log_likelihood),
    "cross_entropy_gradient": TorchBody(cross_entropy_gradient),
    "loss": TorchBody(loss, loss_input),
}
