"""Reference attention: all scores, masked. It keeps the log-sum-exp, to merge partial results and to recompute the
softmax in backward."""

from __future__ import annotations

import torch

from penteract.engine.kernels.kernel import Env, Tensors, TorchKernel
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
    scores = scores.view(b, -1, q.shape[1] // s, s, k.shape[1]).mul_(site.attrs["scale"])
    hidden = key < start.t()[..., None]  # [B, s, t]
    hidden |= key > index[:, None]
    if site.attrs["window"]:
        hidden |= key <= index[:, None] - site.attrs["window"]
    return scores.masked_fill_(hidden[:, None, None], float("-inf"))


def _softmax_(scores: torch.Tensor, log_sum: torch.Tensor) -> torch.Tensor:
    """Softmax of scores [.., t] in place; writes log_sum [..]. A row without keys gives zeros and -inf."""
    largest = scores.amax(-1).clamp_(min=torch.finfo(scores.dtype).min)
    torch.sum(scores.sub_(largest[..., None]).exp_(), -1, out=log_sum)
    scores.div_(log_sum.clamp(min=1)[..., None])  # a row with keys sums to at least one
    log_sum.log_().add_(largest)
    return scores


def attention(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """Causal attention within documents: q [s, B, H·C], k and v [S, B, K·C] -> o like q, and log-sum-exp [B, H, s]."""
    q, k, v, *mask = ins
    size, value_size = int(site.attrs["head_size"]), int(site.attrs["value_size"])
    kv = k.shape[-1] // size
    p = _scores(env, site, _by_kv_head(q, kv, size), _by_kv_head(k, kv, size), mask)
    p = _softmax_(p, outs[1].view(p.shape[:-1])).to(v.dtype).view(q.shape[1] * kv, -1, k.shape[0])
    _put_by_kv_head(torch.bmm(p, _by_kv_head(v, kv, value_size)), outs[0], kv, value_size)


def attention_input(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """Gradients of q, k and v, from q, k, v, o, the log-sum-exp and g."""
    q, k, v, index, start, key, o, log_sum, g = ins
    size, value_size = int(site.attrs["head_size"]), int(site.attrs["value_size"])
    kv = k.shape[-1] // size
    inner = (o * g).unflatten(-1, (-1, value_size)).sum(-1, dtype=env.stat).permute(1, 2, 0)  # [B, H, s]
    qh, kh, gh = _by_kv_head(q, kv, size), _by_kv_head(k, kv, size), _by_kv_head(g, kv, value_size)
    p = _scores(env, site, qh, kh, [index, start, key])
    p.sub_(log_sum.clamp(min=torch.finfo(env.stat).min).view(p.shape[:-1])[..., None]).exp_()
    p = p.view(q.shape[1] * kv, -1, k.shape[0])  # [B·K, r·s, t]
    _put_by_kv_head(torch.bmm(p.to(g.dtype).transpose(1, 2), gh), outs[2], kv, value_size)
    slope = torch.bmm(gh, _by_kv_head(v, kv, value_size).transpose(1, 2)).to(env.stat)
    slope.view(*inner.shape, -1).sub_(inner[..., None])
    p = slope.mul_(p).mul_(site.attrs["scale"])  # d scores, unscaled
    del slope
    p = p.to(q.dtype)
    _put_by_kv_head(torch.bmm(p, kh), outs[0], kv, size)
    _put_by_kv_head(torch.bmm(p.transpose(1, 2), qh), outs[1], kv, size)


def merge_attention(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """Merge two partial attentions, weighted by their log-sum-exp."""
    a, log_a, b, log_b = ins
    torch.logaddexp(log_a, log_b, out=outs[1])
    wa, wb = ((x - outs[1]).exp_().permute(2, 0, 1)[..., None] for x in (log_a, log_b))  # [s, B, H, 1]
    heads = wa.shape[2]
    a, b = (x.unflatten(-1, (heads, -1)) for x in (a, b))
    outs[0].unflatten(-1, (heads, -1)).copy_((a * wa).addcmul_(b, wb))


def _unfolded(kv: torch.Tensor, k: torch.Tensor, v: torch.Tensor, site: Site) -> tuple[tuple[torch.Tensor, ...], ...]:
    """Views by head: (plain key, value) of kv; (plain, rotated) of k; v."""
    plain, value_size = int(site.attrs["plain_size"]), int(site.attrs["value_size"])
    latent = kv.unflatten(-1, (-1, plain + value_size)).split((plain, value_size), -1)
    by_head = k.unflatten(-1, (latent[0].shape[-2], -1))
    return latent, (by_head[..., :plain], by_head[..., plain:]), (v.unflatten(-1, (-1, value_size)),)


def unfold_heads(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """Keys and values of all heads, from an up-projected latent and one rotated key that the heads share."""
    (plain, value), (first, last), (v,) = _unfolded(ins[0], outs[0], outs[1], site)
    first.copy_(plain)
    last.copy_(ins[1][..., None, :].expand_as(last))
    v.copy_(value)


def unfold_heads_input(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """Gradients of the latent and of the shared key, which is summed over heads."""
    (plain, value), (first, last), (v,) = _unfolded(outs[0], ins[0], ins[1], site)
    plain.copy_(first)
    value.copy_(v)
    torch.sum(last, -2, out=outs[1])


ATTENTION = {
    "attention": TorchKernel(attention, attention_input),
    "merge_attention": TorchKernel(merge_attention),
    "unfold_heads": TorchKernel(unfold_heads, unfold_heads_input),
}
