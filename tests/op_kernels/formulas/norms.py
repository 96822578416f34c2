"""Norms, and those that a fusion made one op with what is beside them, as formulas."""

from __future__ import annotations

import torch.nn.functional as F

from op_kernels.formulas.truth import Room, Tensors, Truth


def rms_norm(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    x = ins[0].unflatten(-1, (-1, weights[0].shape[0]))
    y = F.rms_norm(x, x.shape[-1:], weights[0], room.attrs["epsilon"])
    y, largest = y.flatten(-2), []
    if room.attrs.get("largest"):
        largest = [y.detach().abs().max().to(room.compute).double().view(1)]
    return Truth([y, 1 / (x.pow(2).mean(-1) + room.attrs["epsilon"]).sqrt(), *largest])


def layer_norm(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    x, epsilon = ins[0], room.attrs["epsilon"]
    y = F.layer_norm(x, x.shape[-1:], *weights, epsilon)
    return Truth([y, x.mean(-1, True), 1 / (x.var(-1, correction=0, keepdim=True) + epsilon).sqrt()])


def fork_norm(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    """The norm of x, and x for another reader: gradients of both."""
    outs = rms_norm(room, ins, weights).outs
    of_norm, of_other = room.gradients
    return Truth(outs, (outs[0] * of_norm).sum() + (ins[0] * of_other).sum())


def add_norm(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    """A sum, rounded as activations are, and its norm."""
    total = (ins[0] + ins[1]).to(room.compute).double()
    return Truth([total, *rms_norm(room, [total], weights).outs])
