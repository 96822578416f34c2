"""Which of two layouts is the simpler."""

from __future__ import annotations

from penteract.spec.layout import SCHEDULES, Layout
from penteract.spec.recompute import NONE

Effort = tuple[int, ...]  # an order
_PLAINEST_FIRST = ("1f1b", "afab", "interleaved", "zb_h1")


def effort(layout: Layout) -> Effort:
    """How much a layout is beyond plain data parallelism: techniques in use, then how far each goes."""
    lay = layout
    degrees = (lay.tp, lay.pp, lay.cp, lay.ep)
    remade = lay.remake != NONE or lay.remake_else != NONE
    extras = (lay.zero > 0, remade, lay.expert_tp > 1, lay.schedule != _PLAINEST_FIRST[0], lay.shard_group > 0,
              lay.whole_gradients, lay.keep_gathered, bool(lay.offload), lay.offload_optimizer)  # fmt: skip
    used = sum(n > 1 for n in degrees) + sum(extras)
    rank = (*_PLAINEST_FIRST, *SCHEDULES).index(lay.schedule)
    return (used, lay.tp * lay.pp * lay.cp, rank, lay.vpp, lay.cp, lay.tp, lay.ep, lay.zero, remade, lay.expert_tp,
            lay.context_method != Layout().context_method, lay.micro_batch_size)  # fmt: skip
