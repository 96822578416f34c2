"""The loss and its gradient, as formulas."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from op_kernels.formulas.truth import Room, Tensors, Truth


def loss_and_gradient(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    logits, targets, g = ins
    leaf = logits.detach().requires_grad_()
    counts = targets >= 0
    log_sum = leaf.logsumexp(-1)
    own = leaf.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    loss, z = ((log_sum - own) * counts).sum(), room.attrs.get("z", 0.0)
    squares = z * (log_sum.square() * counts).sum()
    (made,) = torch.autograd.grad((loss + squares) * g, leaf)
    return Truth([loss.detach(), *([squares.detach()] if z else [])], overwritten={0: made})


def row_max(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    return Truth([ins[0].sort(-1).values[..., -1]])


def exp_sum(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    logits, largest, targets = ins
    columns = logits.shape[-1]
    hit = F.one_hot(targets.clamp(min=0), (room.index + 2) * columns).double() * (targets >= 0)[..., None]
    mine = hit[..., room.index * columns : (room.index + 1) * columns]
    target = (mine * (logits - largest[..., None])).sum(-1)
    return Truth([torch.stack([(logits.exp().sum(-1) / largest.exp()), target])])


def negative_log_likelihood(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    sums, largest, targets = ins
    each = -torch.log(sums[1].exp() / sums[0])
    log_sum = torch.log(sums[0] * largest.exp())
    z = room.attrs.get("z")
    return Truth([each[targets >= 0].sum(), log_sum, *([z * (log_sum[targets >= 0] ** 2).sum()] if z else [])])


def cross_entropy_gradient(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    """Autograd of the whole vocabulary's loss. Other shards are one more column that makes up the log-sum-exp."""
    return Truth([_of_logits(room, ins)])


def logits_gradient(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    return Truth([], overwritten={0: _of_logits(room, ins)})


def _of_logits(room: Room, ins: Tensors) -> torch.Tensor:
    logits, log_sum, targets, g = ins
    logits = logits.detach().requires_grad_()
    columns = logits.shape[-1]
    rest = torch.log(log_sum.exp() - logits.detach().exp().sum(-1))
    local = targets - room.index * columns
    local = torch.where((local < 0) | (local >= columns), columns, local)
    local = torch.where(targets < 0, -1, local)
    with torch.enable_grad():
        whole = torch.cat([logits, rest[..., None]], -1)
        total = F.cross_entropy(whole.flatten(0, 1), local.flatten(), ignore_index=-1, reduction="sum")
        total = total + room.attrs.get("z", 0.0) * whole.exp().sum(-1).log()[targets >= 0].square().sum()
        return torch.autograd.grad(total * g, logits)[0]


def rows(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    return Truth([ins[0][room.attrs["begin"] :][: room.attrs["count"]]])


def join_rows(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    return Truth([torch.stack([row for x in ins for row in x])])


def logits(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    return Truth([torch.einsum("sbd,vd->sbv", ins[0], weights[0])])


def loss(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    """Every copy adds its part of the sum; the gradient is the sum's."""
    term = ins[0] * room.scale
    return Truth([], term, state={"losses": 0.5 + term / room.attrs["copies"]})
