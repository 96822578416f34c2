"""Reference kernels of the mixture of experts. Registers have exact sizes: the host reads routed counts once a layer.
No token is dropped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from penteract.engine.kernels.kernel import Env, Tensors, TorchKernel, put_product
from penteract.ops.declarations.moe.experts import sharing
from penteract.ops.tape import Site


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[.., D] -> [n, D]: a view, as all registers are contiguous."""
    return x.view(-1, x.shape[-1])


@dataclass(frozen=True, slots=True)
class Splits:
    """Host sizes of one all-to-all. `table[sender][expert]`: rows that each local expert gets from each rank."""

    sent: list[int]
    received: list[int]
    table: list[list[int]]

    @property
    def rows(self) -> list[int]:
        """Rows of each local expert."""
        return [sum(column) for column in zip(*self.table, strict=True)]


def split_sizes(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """Rows to send to and receive from each rank, on the host: the only place in a step where it waits for the
    device."""
    copies, coming = ins
    n = int(site.attrs["ranks"])
    both = torch.cat([copies, coming]).tolist()  # synchronises with the device once
    to, of = both[: len(copies)], both[len(copies) :]
    each = len(to) // n
    table = [of[i * each : (i + 1) * each] for i in range(n)]
    outs[0] = Splits([sum(to[i * each : (i + 1) * each]) for i in range(n)], [sum(t) for t in table], table)


def expert_offsets(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """Where the rows of each of this rank's experts begin, [X/ep + 1], on the device."""
    coming, n = ins[0], int(site.attrs["ranks"])
    own = coming.view(n, -1).sum(0) if n > 1 else coming
    outs[0][:1].zero_()
    torch.cumsum(own, 0, out=outs[0][1:])


def router(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """x [S, B, D] -> weights and experts [S, B, k], scores and choices [S, B, X]. Scores in `stat`, as logits."""
    put_logits(env, ins, weights, outs)
    choose_experts(env, site, outs)


def put_logits(env: Env, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """The logits, in `stat`, into where scores belong."""
    torch.mm(_rows(ins[0]).to(env.stat), weights[0].to(env.stat).t(), out=_rows(outs[2]))


def choose_experts(env: Env, site: Site, outs: Tensors) -> None:
    """The outs of a router, of which scores [S, B, X] are logits yet."""
    (chosen, experts, scores, choices), a = outs, site.attrs
    if a["score"] == "softmax":
        _softmax_(scores)
    else:
        scores.sigmoid_()
    _choose(a, scores, _ranking(env, a, scores), experts, chosen)
    choices.zero_().scatter_(1, experts.permute(1, 0, 2).flatten(1), 1, reduce="add")  # by sequence: [B, s·k]


def _softmax_(x: torch.Tensor) -> None:
    x.sub_(x.amax(-1, keepdim=True)).exp_()
    x.div_(x.sum(-1, keepdim=True))


def _ranking(env: Env, attrs: Mapping[str, Any], scores: torch.Tensor) -> torch.Tensor:
    """The scores by which experts are chosen: with the balancing bias, and -inf outside of a token's best groups."""
    ranking = scores + env.biases[attrs["bias"]] if attrs["bias"] else scores
    if attrs["groups"] == 1:
        return ranking
    ranking = ranking if attrs["bias"] else ranking.clone()
    groups = ranking.unflatten(-1, (attrs["groups"], -1))
    best = groups.topk(2, -1).values.sum(-1) if attrs["group_score"] == "top2" else groups.amax(-1)
    chosen = best.topk(attrs["top_groups"], -1).indices
    others = torch.ones_like(best, dtype=torch.bool).scatter_(-1, chosen, False)
    groups.masked_fill_(others[..., None], float("-inf"))
    return ranking


def _choose(
    attrs: Mapping[str, Any], scores: torch.Tensor, ranking: torch.Tensor, experts: torch.Tensor, chosen: torch.Tensor
) -> None:
    """The top k experts of `ranking`, and their weights from `scores`."""
    w = torch.empty(experts.shape, dtype=scores.dtype, device=scores.device)
    torch.topk(ranking, attrs["top_k"], out=(w, experts))
    torch.gather(scores, -1, experts, out=w)
    if attrs["normalize"]:
        w.div_(w.sum(-1, keepdim=True))
    chosen.copy_(w.mul_(attrs["scale"]) if attrs["scale"] != 1 else w)


def router_input(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """The gradient of x, from those of the weights and, with a balance loss, of the scores; keeps that of the
    logits."""
    slope = outs[1]
    put_logits_gradient(env, site, ins, slope)
    put_product(_rows(outs[0]), _rows(slope), weights[0].to(env.stat), False)


def put_logits_gradient(env: Env, site: Site, ins: Tensors, slope: torch.Tensor) -> None:
    """The gradient of the logits into `slope` [S, B, X], from what `router_input` reads."""
    experts, scores, g, *g_scores = ins  # `slope` is that of the scores first
    slope.copy_(g_scores[0]) if g_scores else slope.zero_()
    scale = site.attrs["scale"]
    g = _before_normalizing(scores, experts, g) if site.attrs["normalize"] else g.to(env.stat, copy=scale != 1)
    slope.scatter_add_(-1, experts, g.mul_(scale) if scale != 1 else g)
    del g
    if site.attrs["score"] == "softmax":
        slope.sub_((slope * scores).sum(-1, keepdim=True)).mul_(scores)
    else:
        slope.mul_(scores).addcmul_(slope, scores, value=-1)


def _before_normalizing(scores: torch.Tensor, experts: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """The gradient of the chosen scores before normalisation, from that of the normalised ones."""
    w = scores.gather(-1, experts)
    total = w.sum(-1, keepdim=True)
    inner = w.div_(total).mul_(g).sum(-1, keepdim=True)
    return torch.sub(g, inner, out=w).div_(total)


def router_weight(env: Env, site: Site, ins: Tensors, into: Tensors, add: bool) -> None:
    """gᵀ·x, [X, D], of the logits' gradient."""
    x, logits = ins
    put_product(into[0], _rows(logits).t(), _rows(x).to(env.stat), add)


def expert_permutation(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """The order that sorts token copies by expert, [s·B·k], and how many each expert has, [X]. Of several ranks, this
    one's experts come first, and only these are counted."""
    flat, (order, copies), experts = ins[0].reshape(-1), outs, int(site.attrs["experts"])
    if sharing(site.attrs) == 1:
        torch.sort(flat, stable=True, out=(torch.empty_like(flat), order))
        copies.zero_().scatter_(0, flat, 1, reduce="add")
        return
    own = len(copies)
    flat = torch.sub(flat, env.index("ep") * own).remainder_(experts).clamp_(max=own)  # all others count as one
    torch.sort(flat, stable=True, out=(torch.empty_like(flat), order))
    counted = torch.zeros(own + 1, dtype=copies.dtype, device=copies.device)
    copies.copy_(counted.scatter_(0, flat, 1, reduce="add")[:own])


def permute(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """Token copies in the order of their experts: [s, B, D] -> [s·B·k, D], or the first of them."""
    x, order = ins
    torch.index_select(_rows(x), 0, (order // site.attrs["top_k"])[: len(outs[0])], out=outs[0])


def permute_input(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """The sum of the gradients of a token's copies."""
    order, g = ins
    _rows(outs[0].zero_()).index_add_(0, (order // site.attrs["top_k"])[: len(g)], g)


def unpermute(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """Each token's sum of its copies, weighted: [s·B·k, D] -> [s, B, D]. Copies that other ranks have add nothing."""
    y, w, order = ins
    if sharing(site.attrs) > 1:
        copies = torch.zeros(len(order), y.shape[1], dtype=y.dtype, device=y.device)
        copies[order[: len(y)]] = y
    else:
        copies = torch.empty_like(y)
        copies[order] = y
    copies = copies.view(*w.shape, -1).mul_(w[..., None])
    torch.sum(copies, -2, out=outs[0])


def unpermute_input(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """Gradients of the copies and of the weights; of a weight whose copy another rank has, zero."""
    y, w, order, g = ins
    torch.index_select(_rows(g), 0, (order // site.attrs["top_k"])[: len(y)], out=outs[0])
    if sharing(site.attrs) > 1:
        outs[1].zero_()
        order = order[: len(y)]
    outs[1].view(-1)[order] = (outs[0] * y).sum(-1)
    outs[0].mul_(w.reshape(-1)[order][:, None])


def each_expert(splits: Splits) -> Iterator[tuple[int, slice]]:
    """(expert, its rows) of this rank, in order."""
    at = 0
    for e, n in enumerate(splits.rows):
        yield e, slice(at, at + n)
        at += n


def expert_linear(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """Rows [R, K] times their expert's matrix: w [X, N, K] -> [R, N]."""
    x, splits = ins
    for e, rows in each_expert(splits):
        if rows.stop > rows.start:
            torch.mm(x[rows], weights[0][e].t(), out=outs[0][rows])


def expert_linear_input(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """The gradient of the rows, [R, K]."""
    splits, g = ins
    for e, rows in each_expert(splits):
        if rows.stop > rows.start:
            torch.mm(g[rows], weights[0][e], out=outs[0][rows])


def expert_linear_weight(env: Env, site: Site, ins: Tensors, into: Tensors, add: bool) -> None:
    """gᵀ·x of each expert, [X, N, K]; zeros for one without rows."""
    x, splits, g = ins
    for e, rows in each_expert(splits):
        if rows.stop > rows.start:
            put_product(into[0][e], g[rows].t(), x[rows], add)
        elif not add:
            into[0][e].zero_()


def expert_pair(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """Rows [R, K] times both matrices of their expert: w1, w2 [X, N, K] -> [R, N] each."""
    for w, out in zip(weights, outs, strict=True):
        expert_linear(env, site, ins, [w], [out])


def expert_pair_input(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """The gradient of the rows, [R, K]: a sum of two products."""
    splits, first, second = ins
    expert_linear_input(env, site, [splits, first], weights[:1], outs)
    for e, rows in each_expert(splits):
        if rows.stop > rows.start:
            torch.addmm(outs[0][rows], second[rows], weights[1][e], out=outs[0][rows])


def expert_pair_weight(env: Env, site: Site, ins: Tensors, into: Tensors, add: bool) -> None:
    """gᵀ·x of each expert, for both matrices, [X, N, K] each."""
    x, splits, *gradients = ins
    for g, each in zip(gradients, into, strict=True):
        expert_linear_weight(env, site, [x, splits, g], [each], add)


def sort_chunks(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """Rows by sender and then expert -> by expert and then sender; `inverse`: the other way."""
    x, coming = ins
    places = _places_by_expert(coming.view(site.attrs["ranks"], -1), len(x))
    if site.attrs["inverse"]:
        torch.index_select(x, 0, places, out=outs[0])
    else:
        outs[0].index_copy_(0, places, x)


def _places_by_expert(table: torch.Tensor, rows: int) -> torch.Tensor:
    """Rows of each [sender, expert] -> where each of the `rows` by sender lies by expert, [rows]. The host knows their
    number alone: it waits for nothing."""
    ends = table.view(-1).cumsum(0)
    by_expert = table.t().clone(memory_format=torch.contiguous_format)
    begins = by_expert.view(-1).cumsum(0).view_as(by_expert).sub_(by_expert)
    moves = begins.t().clone(memory_format=torch.contiguous_format).view(-1)
    del by_expert, begins
    moves.sub_(ends).add_(table.view(-1))
    row = torch.arange(rows, device=table.device)
    return row.add_(moves.index_select(0, torch.searchsorted(ends, row, right=True)))


EXPERTS = {
    "router": TorchKernel(router, router_input, router_weight),
    "expert_permutation": TorchKernel(expert_permutation),
    "split_sizes": TorchKernel(split_sizes),
    "expert_offsets": TorchKernel(expert_offsets),
    "permute": TorchKernel(permute, permute_input),
    "unpermute": TorchKernel(unpermute, unpermute_input),
    "expert_linear": TorchKernel(expert_linear, expert_linear_input, expert_linear_weight),
    "expert_pair": TorchKernel(expert_pair, expert_pair_input, expert_pair_weight),
    "sort_chunks": TorchKernel(sort_chunks),
}
