"""Reference kernels of what keeps experts evenly busy."""

from __future__ import annotations

import torch

from penteract.engine.kernels.kernel import Env, Tensors, TorchKernel
from penteract.ops.tape import Site


def _shares(site: Site, scores: torch.Tensor) -> torch.Tensor:
    """Scores as shares of one: they are already, unless they are sigmoids."""
    return scores / scores.sum(-1, keepdim=True) if site.attrs["score"] == "sigmoid" else scores


def _load(site: Site, choices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """f of each sequence and expert, over the sequence's length: [B, X]."""
    s, k, x = (int(site.attrs[n]) for n in ("sequence_length", "top_k", "experts"))
    return choices.to(dtype).mul_(x / (k * s) / s)


def balance_loss(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """The sum over sequences of f·P: how unevenly tokens spread over experts. DeepSeek-V3 (2412.19437) eq. 17."""
    scores, choices = ins
    share = _shares(site, scores).sum(0)
    torch.sum(share.mul_(_load(site, choices, scores.dtype)), (0, 1), out=outs[0])


def balance_loss_input(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """The gradient of the scores."""
    scores, choices, g = ins
    f = _load(site, choices, scores.dtype).mul_(g)
    if site.attrs["score"] == "sigmoid":
        total = scores.sum(-1, keepdim=True)
        mean = torch.mul(f, scores, out=outs[0]).sum(-1, keepdim=True).div_(total)
        torch.sub(f, mean, out=outs[0]).div_(total)
    else:
        outs[0].copy_(f.expand_as(outs[0]))


def tokens_per_expert(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """Adds up how many tokens chose each expert, [X], for the bias that balances."""
    env.tokens_per_expert[str(site.attrs["name"])].add_(ins[0].sum(0))


BALANCE = {
    "balance_loss": TorchKernel(balance_loss, balance_loss_input),
    "tokens_per_expert": TorchKernel(tokens_per_expert),
}
