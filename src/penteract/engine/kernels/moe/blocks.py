"""Reference kernels on blocks of rows, one for each rank that shares experts. The device alone knows how many rows of
each are there: nothing waits for it."""

from __future__ import annotations

from math import nan

import torch

from penteract.engine.kernels.kernel import Env, Tensors, TorchKernel
from penteract.ops.tape import Site


def block_places(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """Where each copy lies in the blocks, [s·B·k], and how many of each expert have room, [X]."""
    (order, copies), (places, kept), block = ins, outs, int(site.attrs["block"])
    of_ranks = copies.view(site.attrs["ranks"], -1).sum(1)
    if env.overflow is not None:
        env.overflow.masked_fill_(of_ranks.amax() > block, nan)
    _keep(copies.view(len(of_ranks), -1), block, kept)
    ends = of_ranks.cumsum(0)
    begins = torch.sub(ends, of_ranks, out=of_ranks)
    row = torch.arange(len(order), device=order.device)
    rank = torch.searchsorted(ends, row, right=True)
    row.sub_(begins.index_select(0, rank)).clamp_(max=block - 1).add_(rank, alpha=block)
    places.index_copy_(0, order, row)


def _keep(copies: torch.Tensor, block: int, kept: torch.Tensor) -> None:
    """copies [ranks, X/ranks] -> how many of each expert fit behind those of the experts before it on its rank, [X]."""
    until = copies.cumsum(1)
    before = until - copies
    torch.sub(until.clamp_(max=block).view(-1), before.clamp_(max=block).view(-1), out=kept)


def block_permute(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """Token copies at their places: [s, B, D] -> [ranks·block, D]. All else is left as it is."""
    x, places = ins
    outs[0][places.view(-1, site.attrs["top_k"])] = x.view(-1, 1, x.shape[-1])


def block_permute_input(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """The sum of the gradients of a token's copies, added in the order of their experts, as with exact sizes: the bits
    of a step are the same."""
    places, g = ins
    found, copy = places.sort()
    token = copy.div_(site.attrs["top_k"], rounding_mode="floor")
    outs[0].zero_().view(-1, g.shape[1]).index_add_(0, token, g.index_select(0, found))


def block_unpermute(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """Each token's sum of its copies, weighted: [ranks·block, D] -> [s, B, D]."""
    y, w, places = ins
    copies = y.index_select(0, places).view(*w.shape, -1).mul_(w[..., None])
    torch.sum(copies, -2, out=outs[0])


def block_unpermute_input(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """Gradients of the copies, at their places, and of the weights."""
    y, w, places, g = ins
    copies = y.index_select(0, places).view(*w.shape, -1).mul_(g[:, :, None])
    torch.sum(copies, -1, out=outs[1])
    torch.mul(g[:, :, None], w[..., None], out=copies)
    outs[0].index_copy_(0, places, copies.view(-1, y.shape[1]))


def sort_blocks(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """Rows in blocks by sender -> by expert and then sender; `inverse`: the other way. What is not there is copied from
    some row or other."""
    x, coming = ins
    ends, moves = _chunks(coming, int(site.attrs["ranks"]), int(site.attrs["block"]), bool(site.attrs["inverse"]))
    row = torch.arange(len(outs[0]), device=x.device)
    chunk = torch.searchsorted(ends, row, right=True).clamp_(max=len(ends) - 1)
    row.add_(moves.index_select(0, chunk)).clamp_(0, len(x) - 1)
    torch.index_select(x, 0, row, out=outs[0])


def _chunks(coming: torch.Tensor, ranks: int, block: int, inverse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each chunk of one sender and expert, in the order that is wanted: where its rows end, and how far from there
    they lie in the order that there is."""
    table = coming.view(ranks, -1)
    sent_ends = table.cumsum(1).add_(torch.arange(0, ranks * block, block, device=coming.device)[:, None])
    sent = sent_ends - table  # where they begin in blocks
    by_expert = table.t().clone(memory_format=torch.contiguous_format)
    ends = by_expert.view(-1).cumsum(0)
    begins = torch.sub(ends.view_as(by_expert), by_expert, out=by_expert)
    if inverse:
        moves = begins.t().clone(memory_format=torch.contiguous_format).sub_(sent)
        return sent_ends.view(-1), moves.view(-1)
    moves = sent.t().clone(memory_format=torch.contiguous_format).sub_(begins)
    return ends, moves.view(-1)


BLOCKS = {
    "block_places": TorchKernel(block_places),
    "block_permute": TorchKernel(block_permute, block_permute_input),
    "sort_blocks": TorchKernel(sort_blocks),
    "block_unpermute": TorchKernel(block_unpermute, block_unpermute_input),
}
