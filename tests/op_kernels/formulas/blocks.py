"""Rows in blocks, one for each rank that shares experts, as formulas."""

from __future__ import annotations

import torch

from op_kernels.formulas.truth import Room, Tensors, Truth


def block_places(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    """Copies one by one, in their order; those that a block has no room for, in its last row."""
    order, copies, block = ins[0].tolist(), ins[1].tolist(), room.attrs["block"]
    own, filled = len(copies) // room.attrs["ranks"], [0] * room.attrs["ranks"]
    places, kept = [-1] * len(order), [0] * len(copies)
    experts = [e for e, n in enumerate(copies) for _ in range(n)]
    for copy, expert in zip(order, experts, strict=True):
        rank = expert // own
        places[copy] = rank * block + min(filled[rank], block - 1)
        kept[expert] += filled[rank] < block
        filled[rank] += 1
    return Truth([torch.tensor(places), torch.tensor(kept)], overflows=max(filled) > block)


def block_permute(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    x, places = ins[0].flatten(0, 1), ins[1].tolist()
    token = {place: i // room.attrs["top_k"] for i, place in enumerate(places)}
    nothing = torch.zeros_like(x[0])
    rows = [x[token[i]] if i in token else nothing for i in range(room.attrs["ranks"] * room.attrs["block"])]
    return Truth([torch.stack(rows)], rows={"out0": sorted(places)})


def sort_blocks(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    """Rows in blocks are numbered as they are sent, and sorted by expert, then sender."""
    x, table, block = ins[0], ins[1].view(room.attrs["ranks"], -1).tolist(), room.attrs["block"]
    sent = [
        (e, r, i) for r, row in enumerate(table) for i, e in enumerate(e for e, n in enumerate(row) for _ in range(n))
    ]
    place = {r * block + i: at for at, (_, r, i) in enumerate(sorted(sent))}  # in a block -> by expert
    if not room.attrs["inverse"]:
        place = {at: row for row, at in place.items()}
    made = len(table) * block if room.attrs["inverse"] else room.attrs["rows"]
    nothing = torch.zeros_like(x[0])
    return Truth([torch.stack([x[place[i]] if i in place else nothing for i in range(made)])],
                 rows={"out0": sorted(place)})  # fmt: skip


def block_unpermute(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    y, w, places = ins
    made = torch.einsum("sbkd,sbk->sbd", y[places].view(*w.shape, -1), w)
    return Truth([made], rows={"gradient of in0": sorted(places.tolist())})
