"""How tokens get to the experts of other ranks, by arithmetic: a token chooses top_k experts. By all-to-all,
top_k·(ep - 1)/ep copies of it go to other ranks; by all-gather, it goes to each of ep - 1."""

from __future__ import annotations

from penteract.config.layout import EP_METHODS, EpMethod
from penteract.config.model import ModelSpec


def lighter_ep_method(model: ModelSpec, ep: int) -> EpMethod:
    """The one that sends less; where both send as much, all-to-all."""
    return "all_gather" if model.moe is not None and 1 < ep < model.moe.top_k else "all_to_all"


def close_ep_methods(model: ModelSpec, ep: int) -> tuple[EpMethod, ...]:
    """Both, where gathering sends as much as all-to-all or up to twice that: links, and what runs beside them, decide.
    Else the lighter one: where gathering sends less, there is less to sort, too."""
    top_k = model.moe.top_k if model.moe is not None else 0
    return EP_METHODS if ep > 1 and top_k <= ep <= 2 * top_k else (lighter_ep_method(model, ep),)
