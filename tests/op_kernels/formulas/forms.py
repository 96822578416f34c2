"""Parts, copies and other orders of the same numbers, as formulas."""

from __future__ import annotations

import torch

from op_kernels.formulas.truth import Room, Tensors, Truth


def split(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    return Truth([ins[0][..., : room.attrs["first"]], ins[0][..., room.attrs["first"] :]])


def join(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    return Truth([torch.cat(ins, -1)])


def repeat_heads(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    x = ins[0].unflatten(-1, (-1, room.attrs["head_size"]))
    return Truth([x.repeat_interleave(room.attrs["times"], -2).flatten(-2)])


def sum_shares(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    shares = ins[1].unflatten(0, (room.attrs["shares"], -1)).clone()
    shares[room.index] = ins[0].unflatten(0, (room.attrs["shares"], -1))[room.index]
    return Truth([shares.sum(0)])


def pack_heads(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    return Truth([torch.cat(ins[0].chunk(room.attrs["ranks"], 2), 0)])


def unpack_heads(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    return Truth([torch.cat(ins[0].chunk(room.attrs["ranks"], 0), 2)])
