"""An independent model: plain torch and autograd, no vocabulary, no tape. What parity is held against."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from op_kernels.formulas.rotary import turns
from penteract.config.model import ModelSpec

Params = dict[str, torch.Tensor]


def loss(
    m: ModelSpec, w: Params, batch: dict[str, torch.Tensor], scale: dict[str, float], biases: Params | None = None
) -> dict[str, torch.Tensor]:
    """batch: tokens, targets, start, positions, each [N, S] -> the loss's terms, already scaled."""
    x = F.embedding(batch["tokens"], w["embedding.weight"])
    if m.positions == "learned":
        x = x + F.embedding(batch["positions"], w["positions.weight"])
    balance = x.new_zeros(())
    for i in range(m.layers):
        x, b = _layer(m, w, i, i, x, batch, biases or {})
        balance = balance + b
    h = _norm(m, w, "norm", x)
    logits, targets = _logits(m, w, h), batch["targets"].flatten()
    ce = F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum")
    z = _z_loss(m, logits, targets) * scale["cross_entropy"]
    ahead, z_ahead, b = _mtp(m, w, h, batch, biases or {})
    terms = {"cross_entropy": ce * scale["cross_entropy"], "balance": (balance + b) * scale.get("balance", 0.0)}
    terms |= {"z_loss": z + z_ahead} if m.z_loss_coefficient else {}
    return {**terms, "mtp": ahead} if m.mtp_layers else terms


def _z_loss(m: ModelSpec, logits, targets):
    """ST-MoE's equation 5 (2202.08906), of the tokens that count, as a sum."""
    return m.z_loss_coefficient * (logits.exp().sum(-1).log() ** 2)[targets >= 0].sum()


def _logits(m: ModelSpec, w: Params, h):
    return F.linear(h, w["embedding.weight" if m.tied else "head.weight"]).flatten(0, 1)


def _layer(m: ModelSpec, w: Params, i: int, like: int, x, batch, biases: Params):
    n = f"layers.{i}"
    x = x + _attention(m, w, f"{n}.attention", _norm(m, w, f"{n}.norm1", x), batch)
    h = _norm(m, w, f"{n}.norm2", x)
    if m.has_experts(like):
        y, balance = _moe(m, w, f"{n}.moe", h, biases)
        return x + y, balance
    return x + _mlp(m, w, f"{n}.mlp", h), 0.0


def _mtp(m: ModelSpec, w: Params, h, batch, biases: Params):
    """DeepSeek-V3's equations 21 to 25 -> the mean over the targets of all depths, that of their z-loss, and their
    layers' balance."""
    logits, targets, balance = [], [], 0.0
    for k in range(1, m.mtp_layers + 1):
        n = f"layers.{m.layers + k - 1}"
        tokens = torch.cat([batch["tokens"][:, k:], batch["tokens"][:, -1:].expand(-1, k)], 1)[:, : h.shape[1]]
        start, target = (F.pad(batch[name], (0, k), value=-1)[:, k:] for name in ("start", "targets"))
        token = _norm(m, w, f"{n}.embedding_norm", F.embedding(tokens, w["embedding.weight"]))
        both = torch.cat([token, _norm(m, w, f"{n}.hidden_norm", h)], -1)
        x, b = _layer(m, w, m.layers + k - 1, m.layers - 1, F.linear(both, w[f"{n}.projection.weight"]), batch, biases)
        h, balance = _norm(m, w, f"{n}.head_norm", x), balance + b
        logits.append(_logits(m, w, h))
        targets.append(target.masked_fill(start != batch["start"], -1).flatten())
    if not logits:
        return h.new_zeros(()), 0.0, 0.0
    count = sum(int((t >= 0).sum()) for t in targets)
    total = F.cross_entropy(torch.cat(logits), torch.cat(targets), ignore_index=-1, reduction="sum")
    scale = m.mtp_loss_coefficient / max(1, count)
    return scale * total, scale * _z_loss(m, torch.cat(logits), torch.cat(targets)), balance


def _norm(m: ModelSpec, w: Params, n: str, x):
    if m.norm == "layer":
        return F.layer_norm(x, x.shape[-1:], w[f"{n}.weight"], w[f"{n}.bias"], m.norm_epsilon)
    return F.rms_norm(x, x.shape[-1:], w[f"{n}.weight"], m.norm_epsilon)


def _rope(m: ModelSpec, x, positions):
    if m.positions != "rope":
        return x
    half = x.shape[-1] // 2
    f = torch.tensor(turns(x.shape[-1], m.rope_theta, m.rope_scaling), dtype=torch.float64)
    a = positions[:, None, :, None].double() * f
    z = torch.view_as_complex(torch.stack([x[..., :half], x[..., half:]], -1).double().contiguous())
    length = m.rope_scaling.attention_factor if m.rope_scaling else 1.0
    z = torch.view_as_real(z * torch.polar(torch.full_like(a, length), a))
    return torch.cat([z[..., 0], z[..., 1]], -1).to(x.dtype)


def _attention(m: ModelSpec, w: Params, n: str, x, batch):
    def project(which, heads):
        y = F.linear(x, w[f"{n}.{which}.weight"], w.get(f"{n}.{which}.bias"))
        return y.unflatten(-1, (heads, -1)).transpose(1, 2)  # [N, H, S, C]

    if m.latent:
        return _attend(m, w, n, *_latent(m, w, n, x, batch), batch)
    q, k, v = project("q", m.heads), project("k", m.kv_heads), project("v", m.kv_heads)
    if m.qk_norm:
        q = F.rms_norm(q, q.shape[-1:], w[f"{n}.q_norm.weight"], m.norm_epsilon)
        k = F.rms_norm(k, k.shape[-1:], w[f"{n}.k_norm.weight"], m.norm_epsilon)
    return _attend(m, w, n, _rope(m, q, batch["positions"]), _rope(m, k, batch["positions"]), v, batch)


def _latent(m: ModelSpec, w: Params, n: str, x, batch):
    """DeepSeek-V2's equations 9 to 19, a head at a time -> q, k, v, each [N, H, S, ..]."""
    size = m.latent
    assert size is not None

    def linear(name, y):
        return F.linear(y, w[f"{n}.{name}.weight"], w.get(f"{n}.{name}.bias"))

    def norm(name, y):
        return F.rms_norm(y, y.shape[-1:], w[f"{n}.{name}.weight"], m.norm_epsilon)

    def turned(y):
        return _rope(m, y[:, None], batch["positions"])[:, 0]

    flat = linear("q_up", norm("q_norm", linear("q_down", x))) if size.query_rank else linear("q", x)
    c, shared = linear("kv_down", x).tensor_split([size.kv_rank], -1)
    unfolded = linear("kv_up", norm("kv_norm", c))
    q, k, v = [], [], []
    for h in range(m.heads):
        query = flat[..., h * m.head_size : (h + 1) * m.head_size]
        both = unfolded.chunk(m.heads, -1)[h]
        q.append(torch.cat([query[..., : size.plain_size], turned(query[..., size.plain_size :])], -1))
        k.append(torch.cat([both[..., : size.plain_size], turned(shared)], -1))
        v.append(both[..., size.plain_size :])
    return torch.stack(q, 1), torch.stack(k, 1), torch.stack(v, 1)


def _attend(m: ModelSpec, w: Params, n: str, q, k, v, batch):
    i = torch.arange(q.shape[2])
    seen = (i[None, None, :] <= i[None, :, None]) & (i[None, None, :] >= batch["start"][:, :, None])
    if m.sliding_window:
        seen &= i[None, None, :] > i[None, :, None] - m.sliding_window
    scale = (m.rope_scaling.softmax_factor if m.rope_scaling else 1) / m.head_size**0.5
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None], enable_gqa=True, scale=scale)
    return F.linear(o.transpose(1, 2).flatten(2), w[f"{n}.o.weight"], w.get(f"{n}.o.bias"))


def _mlp(m: ModelSpec, w: Params, n: str, x):
    up = F.linear(x, w[f"{n}.up.weight"], w.get(f"{n}.up.bias"))
    if m.activation == "gelu":
        h = F.gelu(up, approximate="tanh")
    else:
        h = F.silu(F.linear(x, w[f"{n}.gate.weight"], w.get(f"{n}.gate.bias"))) * up
    return F.linear(h, w[f"{n}.down.weight"], w.get(f"{n}.down.bias"))


def _moe(m: ModelSpec, w: Params, n: str, x, biases: Params):
    spec = m.moe
    assert spec is not None
    logits = F.linear(x, w[f"{n}.router.weight"])
    scores = logits.softmax(-1) if spec.score == "softmax" else logits.sigmoid()
    ranking = scores + biases.get(f"{n}.balance", 0)
    best = torch.stack([g.topk(2 if spec.group_score == "top2" else 1, -1).values.sum(-1) for g in
                        ranking.chunk(spec.groups, -1)], -1)  # fmt: skip
    least = best.topk(spec.top_groups, -1).values[..., -1:]  # groups as good as this one are open
    closed = (best < least).repeat_interleave(spec.experts // spec.groups, -1)
    chosen = ranking.masked_fill(closed, -torch.inf).topk(spec.top_k, -1).indices
    weight = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
    if spec.normalize_weights:
        weight = weight / weight.sum(-1, keepdim=True)
    weight = weight * spec.weight_scale
    y = torch.zeros_like(x)
    for e in range(spec.experts):  # every expert sees every token; unchosen ones weigh nothing
        gate, up, down = (w[f"{n}.experts.{k}"][e] for k in ("gate", "up", "down"))
        y = y + weight[..., e : e + 1] * F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
    if spec.shared_ffn_size:
        y = y + _mlp(m, w, f"{n}.shared", x)
    shares = scores / scores.sum(-1, keepdim=True)
    f = torch.zeros_like(scores).scatter(-1, chosen, 1.0).mean(1) * spec.experts / spec.top_k
    balance = (f * shares.mean(1)).sum() if spec.balance == "loss" else x.new_zeros(())
    return y, balance
