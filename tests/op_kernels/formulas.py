"""Every op once more, as a formula in float64 that autograd can follow: no op's kernel or helper is used here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from op_kernels.fp8 import dequantised, quantised
from penteract.config.model import RopeScaling

Tensors = list[Any]


@dataclass
class Truth:
    """What an op should do.

    outs       results, then extras; None: not looked at
    objective  what the gradients are of; None: the sum of out · its gradient
    kept       what backward is given in place of what this forward made (a part of a whole)
    state      the step's sums and counts afterwards
    overwritten  what is left in an input, by its number
    """

    outs: Tensors
    objective: torch.Tensor | None = None
    kept: dict[str, torch.Tensor] = field(default_factory=dict)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    overwritten: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Room:
    """What a formula knows beside its tensors."""

    attrs: Mapping[str, Any]
    index: int  # this rank's place along the op's axis
    beside: Tensors  # what other ranks hold
    scale: torch.Tensor
    bias: torch.Tensor
    gradients: Tensors  # of the outs that have one
    compute: torch.dtype = torch.float64  # of activations, where their rounding decides more than last bits


Formula = Callable[[Room, Tensors, Tensors], Truth]


# ---- dense -------------------------------------------------------------------------------------------------------


def embedding(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    rows = weights[0].shape[0]
    every = F.one_hot(ins[0], int(max(ins[0].max() + 1, (room.index + 1) * rows))).double()
    return Truth([every[..., room.index * rows : (room.index + 1) * rows] @ weights[0]])


def linear(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    y = torch.einsum("...d,fd->...f", ins[0], weights[0])
    return Truth([y + weights[1] if len(weights) == 2 else y])


def add_bias(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    return Truth([ins[0] + weights[0]])


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


def rope(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    """Each pair of a head's rotated part as a complex number, turned."""
    x, positions = ins
    heads, plain = x.unflatten(-1, (-1, room.attrs["head_size"])), room.attrs["plain_size"]
    size = room.attrs["head_size"] - plain
    rates = torch.tensor(turns(size, room.attrs["theta"], room.attrs["scaling"]), dtype=torch.float64)
    angle = positions[..., None, None] * rates
    a, b = heads[..., plain:].unflatten(-1, (2, size // 2)).unbind(-2)
    length = room.attrs["scaling"].attention_factor if room.attrs["scaling"] else 1.0
    z = torch.complex(a, b) * torch.polar(torch.full_like(angle, length), angle)
    return Truth([torch.cat([heads[..., :plain], z.real, z.imag], -1).flatten(-2)])


def turns(size: int, theta: float, scaling: RopeScaling | None) -> list[float]:
    """How far each pair of `size` features turns with one position. Llama 3.1 stretches by wavelength, YaRN between
    the two features that turn so often over the old positions: the ends of a ramp over whole features."""
    found: list[float] = []
    for i in range(size // 2):
        f = theta ** (-2 * i / size)
        if scaling is not None and scaling.kind == "linear":
            f = f / scaling.factor
        elif scaling is not None and scaling.kind == "yarn":
            old, limits = scaling.original_positions, (scaling.fast_rotations, scaling.slow_rotations)
            low, high = (size * math.log(old / (r * 2 * math.pi)) / (2 * math.log(theta)) for r in limits)
            low, high = max(math.floor(low), 0), min(math.ceil(high), size - 1)
            ramp = min(1, max(0, (i - low) / (high - low if high != low else 0.001)))
            f = f / scaling.factor * ramp + f * (1 - ramp)
        elif scaling is not None:
            wavelength, old = 2 * math.pi / f, scaling.original_positions
            if wavelength > old / scaling.low_frequency_factor:
                f = f / scaling.factor
            elif wavelength > old / scaling.high_frequency_factor:
                low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
                smooth = (old / wavelength - low) / (high - low)
                f = (1 - smooth) * f / scaling.factor + smooth * f
        found.append(f)
    return found


def fork_norm(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    """The norm of x, and x for another reader: gradients of both."""
    outs = rms_norm(room, ins, weights).outs
    of_norm, of_other = room.gradients
    return Truth(outs, (outs[0] * of_norm).sum() + (ins[0] * of_other).sum())


def add_norm(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    """A sum, rounded as activations are, and its norm."""
    total = (ins[0] + ins[1]).to(room.compute).double()
    return Truth([total, *rms_norm(room, [total], weights).outs])


def merged_linear(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    """Gradients are those of the columns before they turn."""
    y = torch.cat([torch.einsum("...d,fd->...f", ins[0], w) for w in weights], -1)
    made = _turn(room, y.detach(), ins[1]) if len(ins) > 1 else y.detach()
    return Truth([made], (y * room.gradients[0]).sum())


def _turn(room: Room, packed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    turned, rest = packed[..., : room.attrs["rotary_columns"]], packed[..., room.attrs["rotary_columns"] :]
    return torch.cat([rope(room, [turned, positions], []).outs[0], rest], -1)


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
    return Truth([_turn(room, y, positions[0]) if positions else y, of_w], objective)


def merged_glu(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    packed = torch.cat([torch.einsum("...d,fd->...f", ins[0], w) for w in weights], -1)
    made = packed_swiglu(room, [packed], []).outs[0]
    return Truth([made.detach(), packed.detach()], (made * room.gradients[0]).sum())


def glu_linear(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    packed = torch.cat([torch.einsum("...d,fd->...f", ins[0], w) for w in weights[:2]], -1)
    made = packed_swiglu(room, [packed], []).outs[0] @ weights[2].t()
    return Truth([made.detach(), packed.detach()], (made * room.gradients[0]).sum())


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


def swiglu(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    return Truth([ins[0] / (1 + torch.exp(-ins[0])) * ins[1]])


def packed_swiglu(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    return swiglu(room, list(ins[0].chunk(2, -1)), weights)


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


def gelu(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    x = ins[0]
    return Truth([0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))])


def add(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    return Truth([ins[0] + ins[1]])


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


# ---- attention ---------------------------------------------------------------------------------------------------


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
    now = packed.detach() + _turn(room, packed - packed.detach(), positions)
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


# ---- loss --------------------------------------------------------------------------------------------------------


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


# ---- experts -----------------------------------------------------------------------------------------------------


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


def balance_loss(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    """Σ over sequences and experts of f·P, P as this rank's tokens make it up."""
    scores, choices = ins
    a = room.attrs
    frequency = choices * a["experts"] / (a["top_k"] * a["sequence_length"])
    share = scores if a["score"] == "softmax" else scores / scores.sum(-1, True)
    return Truth([(frequency * share.sum(0) / a["sequence_length"]).sum()])


def tokens_per_expert(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    return Truth([], state={"tokens_per_expert": 7 + ins[0].sum(0)})


FORMULAS: dict[str, Formula] = {
    f.__name__: f
    for f in (
        embedding, linear, add_bias, rms_norm, fork_norm, add_norm, loss_and_gradient, merged_linear, packed_swiglu,
        quantise, fp8_linear, fp8_glu, merged_glu, glu_linear,
        packed_attention, normed_attention, layer_norm, rope, swiglu, gelu, add, sum_shares, split, join, repeat_heads,
        pack_heads, unpack_heads,
        attention, unfold_heads, merge_attention, row_max, exp_sum, negative_log_likelihood, cross_entropy_gradient,
        rows, join_rows, logits, logits_gradient,
        loss, router, expert_permutation, split_sizes, expert_offsets, permute, sort_chunks, expert_linear, expert_pair,
        unpermute,
        balance_loss,
        tokens_per_expert,
    )
}  # fmt: skip
