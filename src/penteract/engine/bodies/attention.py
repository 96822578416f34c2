"""Reference attention: scores in full, masked; its log-sum-exp lets parts be merged and backward start anew."""

from __future__ import annotations

import torch

from penteract.engine.bodies.body import Env, Tensors, TorchBody
from penteract.ops.tape import Site


def _by_kv_head(x: torch.Tensor, kv_heads: int, head_size: int) -> torch.Tensor:
    """[s, B, K·r·C] -> [B·K, r·s, C]: the r query heads of a KV head are rows of one matrix."""
    s, b, width = x.shape
    r = width // (kv_heads * head_size)
    return x.view(s, b, kv_heads, r, head_size).permute(1, 2, 3, 0, 4).reshape(b * kv_heads, r * s, head_size)


def _put_by_kv_head(y: torch.Tensor, out: torch.Tensor, kv_heads: int, head_size: int) -> None:
    """The inverse, written into out."""
    s, b, width = out.shape
    r = width // (kv_heads * head_size)
    out.view(s, b, kv_heads, r, head_size).copy_(y.view(b, kv_heads, r, s, head_size).permute(3, 0, 1, 2, 4))


def _scores(env: Env, site: Site, q: torch.Tensor, k: torch.Tensor, ins: Tensors) -> torch.Tensor:
    """q [B·K, r·s, C], k [B·K, t, C] -> scaled scores [B, K, r, s, t], -inf where a key is hidden."""
    index, start, key = ins
    s, b = start.shape
    scores = torch.bmm(q, k.transpose(1, 2)).to(env.stat)
    scores = scores.view(b, -1, q.shape[1] // s, s, k.shape[1]).mul_(site.attrs["head_size"] ** -0.5)
    hidden = (key > index[:, None]) | (key < start.t()[..., None])  # [B, s, t]
    if site.attrs["window"]:
        hidden |= key <= index[:, None] - site.attrs["window"]
    return scores.masked_fill_(hidden[:, None, None], float("-inf"))


def attention(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    q, k, v, *mask = ins
    size = int(site.attrs["head_size"])
    kv = k.shape[-1] // size
    scores = _scores(env, site, _by_kv_head(q, kv, size), _by_kv_head(k, kv, size), mask)
    log_sum = outs[1].view(scores.shape[:-1])
    torch.logsumexp(scores, -1, out=log_sum)
    seen = log_sum.masked_fill(log_sum == float("-inf"), 0)  # a row without keys in this part
    p = scores.sub_(seen[..., None]).exp_().to(v.dtype).view(q.shape[1] * kv, -1, k.shape[0])
    _put_by_kv_head(torch.bmm(p, _by_kv_head(v, kv, size)), outs[0], kv, size)


def attention_input(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    q, k, v, index, start, key, o, log_sum, g = ins
    size = int(site.attrs["head_size"])
    kv = k.shape[-1] // size
    qh, kh, gh = (_by_kv_head(x, kv, size) for x in (q, k, g))
    p = _scores(env, site, qh, kh, [index, start, key])
    p.sub_(log_sum.view(p.shape[:-1])[..., None]).exp_()
    p = p.view(q.shape[1] * kv, -1, k.shape[0])  # [B·K, r·s, t]
    _put_by_kv_head(torch.bmm(p.to(g.dtype).transpose(1, 2), gh), outs[2], kv, size)
    inner = (_by_kv_head(o, kv, size) * gh).sum(-1, keepdim=True, dtype=env.stat)
    slope = torch.bmm(gh, _by_kv_head(v, kv, size).transpose(1, 2)).to(env.stat).sub_(inner)
    slope = slope.mul_(p).mul_(size**-0.5).to(q.dtype)  # d scores, unscaled
    _put_by_kv_head(torch.bmm(slope, kh), outs[0], kv, size)
    _put_by_kv_head(torch.bmm(slope.transpose(1, 2), qh), outs[1], kv, size)


def merge_attention(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    a, log_a, b, log_b = ins
    torch.logaddexp(log_a, log_b, out=outs[1])
    wa, wb = ((x - outs[1]).exp_().permute(2, 0, 1)[..., None] for x in (log_a, log_b))  # [s, B, H, 1]
    heads = wa.shape[2]
    a, b = (x.unflatten(-1, (heads, -1)) for x in (a, b))
    outs[0].unflatten(-1, (heads, -1)).copy_((a * wa).add_(b * wb))


ATTENTION = {"attention": TorchBody(attention, attention_input), "merge_attention": TorchBody(merge_attention)}
