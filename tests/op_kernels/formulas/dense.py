"""Products, sums and activations, as formulas."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from op_kernels.formulas.rotary import turn_packed
from op_kernels.formulas.truth import Room, Tensors, Truth


def embedding(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    rows = weights[0].shape[0]
    every = F.one_hot(ins[0], int(max(ins[0].max() + 1, (room.index + 1) * rows))).double()
    return Truth([every[..., room.index * rows : (room.index + 1) * rows] @ weights[0]])


def linear(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    y = torch.einsum("...d,fd->...f", ins[0], weights[0])
    return Truth([y + weights[1] if len(weights) == 2 else y])


def add_bias(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    return Truth([ins[0] + weights[0]])


def merged_linear(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    """Gradients are those of the columns before they turn."""
    y = torch.cat([torch.einsum("...d,fd->...f", ins[0], w) for w in weights], -1)
    made = turn_packed(room, y.detach(), ins[1]) if len(ins) > 1 else y.detach()
    return Truth([made], (y * room.gradients[0]).sum())


def merged_glu(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    packed = torch.cat([torch.einsum("...d,fd->...f", ins[0], w) for w in weights], -1)
    made = packed_swiglu(room, [packed], []).outs[0]
    return Truth([made.detach(), packed.detach()], (made * room.gradients[0]).sum())


def glu_linear(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    packed = torch.cat([torch.einsum("...d,fd->...f", ins[0], w) for w in weights[:2]], -1)
    made = packed_swiglu(room, [packed], []).outs[0] @ weights[2].t()
    return Truth([made.detach(), packed.detach()], (made * room.gradients[0]).sum())


def swiglu(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    return Truth([ins[0] / (1 + torch.exp(-ins[0])) * ins[1]])


def packed_swiglu(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    return swiglu(room, list(ins[0].chunk(2, -1)), weights)


def gelu(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    x = ins[0]
    return Truth([0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))])


def add(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    return Truth([ins[0] + ins[1]])
