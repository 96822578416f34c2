"""Casts to FP8 and products of what data stand for, as formulas."""

from __future__ import annotations

import torch

from op_kernels.formulas.dense import packed_swiglu
from op_kernels.formulas.rotary import turn_packed
from op_kernels.formulas.truth import Room, Tensors, Truth
from op_kernels.fp8 import dequantised, quantised


def quantise(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    largest = ins[1].item() if len(ins) > 1 else None
    data, scale = quantised(ins[0], room.attrs["fp8"], room.attrs["fp8"].operand, largest)
    return Truth([data, data.flatten(0, -2).t(), scale])


def fp8_linear(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    """Products of what data stand for. Both data of x are given, and need not be of one x."""
    fp8, (x, data, columnwise, scale, *positions) = room.attrs["fp8"], ins
    w, of_w = quantised(torch.cat([w.detach() for w in weights]), fp8, fp8.operand)
    g, of_g = quantised(room.gradients[0], fp8, fp8.gradient)
    a, b = dequantised(data, scale, fp8.operand), dequantised(columnwise, scale, fp8.operand)
    whole, gradient = dequantised(w, of_w, fp8.operand), dequantised(g, of_g, fp8.gradient)
    y = torch.einsum("...d,fd->...f", a, whole)
    slopes = torch.einsum("tf,dt->fd", gradient.flatten(0, -2), b)
    objective = (x * torch.einsum("...f,fd->...d", gradient, whole)).sum() + (torch.cat(weights) * slopes).sum()
    return Truth([turn_packed(room, y, positions[0]) if positions else y, of_w], objective)


def fp8_glu(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    """Gate and up, and what SwiGLU makes of them; their gradients are data before they are multiplied."""
    fp8, (x, data, columnwise, scale) = room.attrs["fp8"], ins
    w, of_w = quantised(torch.cat([w.detach() for w in weights]), fp8, fp8.operand)
    whole = dequantised(w, of_w, fp8.operand)
    packed = torch.einsum("...d,fd->...f", dequantised(data, scale, fp8.operand), whole).to(room.compute).double()
    leaf = packed.requires_grad_()
    out = packed_swiglu(room, [leaf], []).outs[0]
    (slopes,) = torch.autograd.grad((out * room.gradients[0]).sum(), leaf)
    g, of_g = quantised(slopes.to(room.compute).double(), fp8, fp8.gradient)
    gradient = dequantised(g, of_g, fp8.gradient)
    of_weights = torch.einsum("tf,dt->fd", gradient.flatten(0, -2), dequantised(columnwise, scale, fp8.operand))
    objective = (x * torch.einsum("...f,fd->...d", gradient, whole)).sum() + (torch.cat(weights) * of_weights).sum()
    made, packed = out.detach(), packed.detach()
    return Truth([made, made.abs().max().view(1), of_w, packed], objective)
