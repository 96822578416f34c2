"""Routers, orders of tokens and experts, as formulas."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from op_kernels.formulas.truth import Room, Tensors, Truth


def router(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    a = room.attrs
    logits = torch.einsum("sbd,xd->sbx", ins[0], weights[0])
    scores = logits.exp() / logits.exp().sum(-1, True) if a["score"] == "softmax" else 1 / (1 + (-logits).exp())
    ranking = scores + room.bias if a["bias"] else scores
    groups = ranking.unflatten(-1, (a["groups"], -1)).sort(-1, descending=True).values
    best = groups[..., 0] + (groups[..., 1] if a["group_score"] == "top2" else 0)
    place = best.argsort(-1, descending=True).argsort(-1)  # of each group
    open_ = (place < a["top_groups"]).repeat_interleave(logits.shape[-1] // a["groups"], -1)
    ranking = torch.where(open_, ranking, -math.inf)
    experts = ranking.sort(-1, descending=True).indices[..., : a["top_k"]]
    mask = F.one_hot(experts, logits.shape[-1])  # [s, B, k, X]
    chosen = (mask * scores[..., None, :]).sum(-1)
    if a["normalize"]:
        chosen = chosen / chosen.sum(-1, True)
    return Truth([chosen * a["scale"], experts, scores, mask.sum((0, 2))])


def expert_permutation(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    own = room.attrs["experts"] // room.attrs.get("ranks", 1)
    here = range(room.index * own, (room.index + 1) * own)
    flat = ins[0].flatten().tolist()
    order = sorted(range(len(flat)), key=lambda i: here.index(flat[i]) if flat[i] in here else own)
    return Truth([torch.tensor(order), torch.tensor([flat.count(e) for e in here])])


def split_sizes(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    sent, table = (t.view(room.attrs["ranks"], -1) for t in ins)
    return Truth([(sent.sum(1).tolist(), table.sum(1).tolist(), table.tolist(), table.sum(0).tolist())])


def expert_offsets(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    own = ins[0].view(room.attrs["ranks"], -1).sum(0).tolist()
    return Truth([torch.tensor([sum(own[:e]) for e in range(len(own) + 1)])])


def permute(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    tokens = ins[0].flatten(0, 1)
    rows = ins[1].tolist()[: room.attrs.get("rows")]
    return Truth([torch.stack([tokens[i // room.attrs["top_k"]] for i in rows])])


def sort_chunks(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    x, table = ins[0], ins[1].view(room.attrs["ranks"], -1).tolist()
    names = [(e, r, i) for r, row in enumerate(table) for e, n in enumerate(row) for i in range(n)]
    place = sorted(range(len(names)), key=lambda i: names[i])  # by expert, then sender
    if room.attrs["inverse"]:
        place = [place.index(i) for i in range(len(place))]
    return Truth([x[place]])


def expert_linear(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    x, rows = ins
    if isinstance(rows, torch.Tensor):  # offsets
        owner = [e for e, n in enumerate(rows.diff().tolist()) for _ in range(n)]
    else:
        owner = [e for e in range(weights[0].shape[0]) for row in rows.table for _ in range(row[e])]
    return Truth([torch.einsum("rd,rfd->rf", x, weights[0][owner])])


def expert_pair(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    return Truth([expert_linear(room, ins, [w]).outs[0] for w in weights])


def unpermute(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    y, w, order = ins
    back = [order.tolist().index(i) for i in range(len(order))]
    y = torch.cat([y, y.new_zeros(len(order) - len(y), y.shape[1])])
    return Truth([torch.einsum("sbkd,sbk->sbd", y[back].view(*w.shape, -1), w)])


def padded_permute(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    """Rows that came; behind them anything may be, and none of it is read."""
    n = int(ins[2][-1])
    there = permute(room, ins, weights).outs[0]
    return Truth([torch.cat([there[:n], torch.zeros_like(there[n:])])], rows={"out0": n})


def padded_swiglu(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    gate, up, n = ins[0], ins[1], int(ins[2][-1])
    there = gate[:n] / (1 + (-gate[:n]).exp()) * up[:n]
    rows = dict.fromkeys(("out0", "gradient of in0", "gradient of in1"), n)
    return Truth([torch.cat([there, torch.zeros_like(gate[n:])])], rows=rows)


def padded_unpermute(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    n = int(ins[3][-1])
    return Truth(unpermute(room, [ins[0][:n], *ins[1:3]], weights).outs, rows={"gradient of in0": n})


def balance_loss(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    """Σ over sequences and experts of f·P, P as this rank's tokens make it up."""
    scores, choices = ins
    a = room.attrs
    frequency = choices * a["experts"] / (a["top_k"] * a["sequence_length"])
    share = scores if a["score"] == "softmax" else scores / scores.sum(-1, True)
    return Truth([(frequency * share.sum(0) / a["sequence_length"]).sum()])


def tokens_per_expert(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    return Truth([], state={"tokens_per_expert": 7 + ins[0].sum(0)})
