"""An independent model: plain torch and autograd, no vocabulary, no tape. What parity is held against."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from penteract.spec.model import ModelSpec

Params = dict[str, torch.Tensor]


def loss(
    m: ModelSpec, w: Params, batch: dict[str, torch.Tensor], scale: dict[str, float], biases: Params | None = None
):
    """batch: tokens, targets, start, positions, each [N, S] -> (cross entropy, balance) already scaled."""
    x = F.embedding(batch["tokens"], w["embedding.weight"])
    if m.positions == "learned":
        x = x + F.embedding(batch["positions"], w["positions.weight"])
    balance = x.new_zeros(())
    for i in range(m.layers):
        n = f"layers.{i}"
        x = x + _attention(m, w, f"{n}.attention", _norm(m, w, f"{n}.norm1", x), batch)
        h = _norm(m, w, f"{n}.norm2", x)
        if m.has_experts(i):
            y, b = _moe(m, w, f"{n}.moe", h, biases or {})
            x, balance = x + y, balance + b
        else:
            x = x + _mlp(m, w, f"{n}.mlp", h)
    logits = F.linear(_norm(m, w, "norm", x), w["embedding.weight" if m.tied else "head.weight"])
    ce = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=-1, reduction="sum")
    return ce * scale["cross_entropy"], balance * scale.get("balance", 0.0)


def _norm(m: ModelSpec, w: Params, n: str, x):
    if m.norm == "layer":
        return F.layer_norm(x, x.shape[-1:], w[f"{n}.weight"], w[f"{n}.bias"], m.norm_epsilon)
    return F.rms_norm(x, x.shape[-1:], w[f"{n}.weight"], m.norm_epsilon)


def _rope(m: ModelSpec, x, positions):
    half = m.head_size // 2
    f = m.rope_theta ** (-torch.arange(half, dtype=torch.float64) * 2 / m.head_size)
    a = positions[:, None, :, None].double() * f
    z = torch.view_as_complex(torch.stack([x[..., :half], x[..., half:]], -1).double().contiguous())
    z = torch.view_as_real(z * torch.polar(torch.ones_like(a), a))
    return torch.cat([z[..., 0], z[..., 1]], -1).to(x.dtype)


def _attention(m: ModelSpec, w: Params, n: str, x, batch):
    def project(which, heads):
        y = F.linear(x, w[f"{n}.{which}.weight"], w.get(f"{n}.{which}.bias"))
        return y.unflatten(-1, (heads, m.head_size)).transpose(1, 2)  # [N, H, S, C]

    q, k, v = project("q", m.heads), project("k", m.kv_heads), project("v", m.kv_heads)
    if m.qk_norm:
        q = F.rms_norm(q, q.shape[-1:], w[f"{n}.q_norm.weight"], m.norm_epsilon)
        k = F.rms_norm(k, k.shape[-1:], w[f"{n}.k_norm.weight"], m.norm_epsilon)
    if m.positions == "rope":
        q, k = _rope(m, q, batch["positions"]), _rope(m, k, batch["positions"])
    i = torch.arange(x.shape[1])
    seen = (i[None, None, :] <= i[None, :, None]) & (i[None, None, :] >= batch["start"][:, :, None])
    if m.sliding_window:
        seen &= i[None, None, :] > i[None, :, None] - m.sliding_window
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None], enable_gqa=True)
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
    chosen = ranking.topk(spec.top_k, -1).indices
    weight = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
    if spec.normalize_weights:
        weight = weight / weight.sum(-1, keepdim=True)
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
