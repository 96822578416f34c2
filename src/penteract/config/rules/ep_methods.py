"""How tokens get to the experts of other ranks, by arithmetic."""

from __future__ import annotations

from penteract.config.layout import EpMethod
from penteract.config.model import ModelSpec


def fastest_ep_method(model: ModelSpec, ep: int) -> EpMethod:
    """The one that sends less. A token chooses top_k experts: by all-to-all, top_k·(ep - 1)/ep copies of it go to other
    ranks; by all-gather, ep - 1 do. Where both send as much, an all-to-all takes less time than a gather and a sum."""
    return "all_gather" if model.moe is not None and 1 < ep < model.moe.top_k else "all_to_all"
