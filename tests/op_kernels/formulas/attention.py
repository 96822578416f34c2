"""Attention row by row, as formulas."""

from __future__ import annotations

import math

import torch

from op_kernels.formulas.norms import rms_norm
from op_kernels.formulas.rotary import rope, turn_packed
from op_kernels.formulas.truth import Room, Tensors, Truth


def attention(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    """Row by row over the keys that the row sees. `beside`: other keys and values of the same whole, and their index;
    the gradients are then of the whole, through this part of it."""
    q, k, v, index, start, key = ins
    o, log_sum = _attend(room, q, [(q, k, v, key)], index, start)
    if not room.beside:
        return Truth([o, log_sum])
    k2, v2, key2 = room.beside
    whole, whole_sum = _attend(room, q, [(q, k, v, key), (q.detach(), k2, v2, key2)], index, start)
    kept = {"out0": whole.detach(), "extra0": whole_sum.detach()}
    return Truth([o, log_sum], (whole * room.gradients[0]).sum(), kept)


def packed_attention(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    """What comes has turned already; its gradient is of what it was before: of a change that turns like it."""
    packed, positions, *rest = ins
    now = packed.detach() + turn_packed(room, packed - packed.detach(), positions)
    return attention(room, [*now.split(room.attrs["widths"], -1), *rest], weights)


def normed_attention(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    """The norm of each query and key head, then as far as its token turns it."""
    packed, positions, *rest = ins
    q, k, v = packed.split(room.attrs["widths"], -1)
    normed = [rms_norm(room, [x], [w]).outs for x, w in zip((q, k), weights, strict=True)]
    heads = [rope(room, [y, positions], []).outs[0] for y, _ in normed]
    truth = attention(room, [*heads, v, *rest], [])
    made = (torch.cat(heads, -1), torch.cat([scale for _, scale in normed], -1))
    return Truth([*truth.outs, *(x.detach() for x in made)])


def _attend(
    room: Room, like: torch.Tensor, parts: list[Tensors], index: torch.Tensor, start: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    size, value_size, window = (room.attrs[n] for n in ("head_size", "value_size", "window"))
    (s, b, width), kv = like.shape, parts[0][1].shape[-1] // room.attrs["head_size"]
    heads = width // size
    rows: list[torch.Tensor] = []
    sums: list[torch.Tensor] = []
    for n, h, i in ((n, h, i) for n in range(b) for h in range(heads) for i in range(s)):
        scores: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for q, k, v, key in parts:
            at, first = int(index[i]), int(start[i, n])
            seen = [j for j, p in enumerate(key.tolist()) if first <= p <= at and not (window and p <= at - window)]
            g = h // (heads // kv)
            row = q[i, n].view(heads, size)[h]
            scores.append(k[seen, n].view(-1, kv, size)[:, g] @ row * room.attrs["scale"])
            values.append(v[seen, n].view(-1, kv, value_size)[:, g])
        score, value = torch.cat(scores), torch.cat(values)
        rows.append(torch.softmax(score, 0) @ value)
        sums.append(score.exp().sum().log() if len(score) else torch.tensor(-math.inf, dtype=torch.float64))
    o = torch.stack(rows).view(b, heads, s, value_size).permute(2, 0, 1, 3).flatten(2)
    return o, torch.stack(sums).view(b, heads, s)


def unfold_heads(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    """Head by head: its key is its plain part and the shared rotated one, its value what is left."""
    plain, value_size = room.attrs["plain_size"], room.attrs["value_size"]
    heads = ins[0].split(plain + value_size, -1)
    keys = [torch.cat([h[..., :plain], ins[1]], -1) for h in heads]
    return Truth([torch.cat(keys, -1), torch.cat([h[..., plain:] for h in heads], -1)])


def merge_attention(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    a, log_a, b, log_b = ins
    share = torch.softmax(torch.stack([log_a, log_b]), 0).permute(0, 3, 1, 2)[..., None]  # [2, s, B, H, 1]
    both = torch.stack([a, b]).unflatten(-1, (share.shape[-2], -1))
    return Truth([(both * share).sum(0).flatten(-2), torch.log(log_a.exp() + log_b.exp())])
