"""An order of layouts by simplicity."""

from __future__ import annotations

from penteract.config.layout import Layout
from penteract.config.recompute import NONE
from penteract.schedule.registry import SCHEDULES

Effort = tuple[int, ...]  # an order
_PLAIN = Layout()


def effort(layout: Layout) -> Effort:
    """How far a layout is from plain data parallelism: the number of techniques in use, then the degree of each."""
    lay, plain = layout, _PLAIN
    degrees = (lay.tp, lay.pp, lay.cp, lay.ep)
    recomputed = lay.recompute != NONE or lay.recompute_else != NONE
    extras = (lay.zero > 0, recomputed, lay.expert_tp > 1, lay.schedule != plain.schedule,
              lay.shard_group > 0, lay.last_stage_less_layers > 0,
              lay.reduce_scatter_once, lay.reshard_after_step, bool(lay.offload), lay.offload_optimizer)  # fmt: skip
    used = sum(n > 1 for n in degrees) + sum(extras)
    rank = (plain.schedule, *SCHEDULES).index(lay.schedule)
    return (used, lay.tp * lay.pp * lay.cp, rank, lay.vpp, lay.last_stage_less_layers, lay.cp, lay.tp, lay.ep, lay.zero,
            recomputed, lay.expert_tp, lay.cp_method != plain.cp_method, lay.micro_batch_size)  # fmt: skip
