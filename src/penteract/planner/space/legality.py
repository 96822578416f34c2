"""Which of very many layouts are legal, by the rules of `config/rules/breaches.py`.

A rule depends on few settings. So a layout is checked in parts: (tp, cp, method), the pipeline with its micro-batches,
the experts, the batch. Each part is checked once, however many layouts share it, and the first illegal part gives the
reason. No rule is repeated here. A test compares the counts with `breaches` of every whole layout.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from penteract.config.layout import Layout
from penteract.config.model import ModelSpec
from penteract.config.rules.breaches import Breach, breaches, not_padded
from penteract.config.rules.case import Case
from penteract.config.rules.expert_kernels import expert_breaches
from penteract.config.rules.kernel_limits import kernel_breaches

CROSSES = "tp crosses a node"

_PLAIN = Layout()
_TAIL = re.compile(r", and \w+$")
_NUMBER = re.compile(r" = [\d·]+|(?:^| )\d+\b(?!·)")


def reason(breach: Breach) -> str:
    """A breach without its numbers, so that equal ones are counted together: "tp = 3 does not divide attention heads =
    32" becomes "tp does not divide attention heads"."""
    return _TAIL.sub("", _NUMBER.sub("", breach[1]).strip())


@dataclass(frozen=True, slots=True)
class Legality:
    """The reason why a part of a layout is illegal, or ""; each part is checked once."""

    model: ModelSpec
    sequence_length: int
    global_batch_size: int
    _seen: dict[Hashable, str] = field(default_factory=dict[Hashable, str], compare=False, repr=False)

    def split(self, tp: int, cp: int, method: Any) -> str:
        """Why heads, widths or tokens cannot be split."""
        return self._first(tp=tp, cp=cp, cp_method=method)

    def pipeline(self, pp: int, schedule: Any, vpp: int, less: int, num_micro_batches: int) -> str:
        """Why a pipeline of the layers, or its schedule of `num_micro_batches`, is illegal.
        `less`: last_stage_less_layers."""
        settings: dict[str, Any] = {"schedule": schedule, "pp": pp, "vpp": vpp, "last_stage_less_layers": less}
        return self._first(**settings, gradient_accumulation_steps=num_micro_batches)

    def experts(self, tp: int, rows: int, **experts: Any) -> str:
        """Why experts cannot be shared so over `rows` = dp·cp times `tp` ranks."""
        of_kernels = experts.pop("expert_rows")  # which `expert_kernel` looks at too
        why = self._first(dp=rows, tp=tp, **experts)
        layout = _PLAIN.put(**experts, expert_rows=of_kernels)
        return why or reason(("expert_rows", not_padded(self.model, layout)))

    def shards(self, rows: int, ep: int, sharing: tuple[int, int, bool, bool]) -> str:
        """Why state cannot be sharded over `rows` = dp·cp ranks: `sharing` is (zero, shard_group, reduce_scatter_once,
        reshard_after_step)."""
        zero, group, whole, gathered = sharing
        ep = ep if group else 1
        return self._first(
            dp=rows, ep=ep, zero=zero, shard_group=group, reduce_scatter_once=whole, reshard_after_step=gathered
        )

    def batch(self, dp: int, micro_batch_size: int, num_micro_batches: int) -> str:
        """Why the global batch cannot be split over replicas and micro-batches."""
        settings: dict[str, Any] = {"dp": dp, "micro_batch_size": micro_batch_size}
        return self._first(self.global_batch_size, gradient_accumulation_steps=num_micro_batches, **settings)

    def kernel(self, cp: int, method: Any, attention: Any, determinism: Any) -> str:
        """Why the attention kernel does not support the layout."""
        settings = {"cp": cp, "cp_method": method, "attention": attention, "determinism": determinism}
        key = ("kernel", *settings.items())
        if key not in self._seen:
            self._seen[key] = next((what for _, what in kernel_breaches(self.model, _PLAIN.put(**settings))), "")
        return self._seen[key]

    def expert_kernel(self, experts: Any, expert_tp: int, expert_rows: Any, determinism: Any) -> str:
        """Why the kernel of experts' products does not support experts over `expert_tp` ranks, or their rows."""
        key = ("experts", experts, expert_tp, expert_rows, determinism)
        if key not in self._seen:
            settings = {"expert_tp": expert_tp, "expert_rows": expert_rows, "determinism": determinism}
            layout = _PLAIN.put(experts=experts, **settings)
            self._seen[key] = next(map(reason, expert_breaches(self.model, layout)), "")
        return self._seen[key]

    def _first(self, global_batch_size: int | None = None, /, **settings: Any) -> str:
        """The reason for a layout with these settings; they are the key of the cache, too."""
        key = (global_batch_size, *settings.items())
        if key not in self._seen:
            case = Case(
                model=self.model, layout=_PLAIN.put(**settings), sequence_length=self.sequence_length,
                global_batch_size=global_batch_size,
            )  # fmt: skip
            self._seen[key] = next(map(reason, breaches(case)), "")
        return self._seen[key]


def crosses_node(tp: int, gpus: int, gpus_per_node: int) -> bool:
    """Whether some tensor group has ranks on two nodes. Tensor groups are consecutive ranks."""
    return gpus > gpus_per_node and gpus_per_node % tp != 0
