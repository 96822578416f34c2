"""Every layout that is looked at: the values tried of each axis, and the legal ones of their product."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, cast

from penteract.errors import BadInput
from penteract.plan.ask import EDITS, RECOMPUTE, Ask, Values, budget_of, edits_of
from penteract.plan.legality import CROSSES, Legality, crosses_node
from penteract.spec.kernels import kernel_breaches
from penteract.spec.layout import (
    CONTEXT_METHODS,
    SCHEDULES,
    ZERO_STAGES,
    AttentionBody,
    ContextMethod,
    Layout,
    Schedule,
)
from penteract.step.program import check_words

SEARCHED_STAGES = ZERO_STAGES[:2]  # of ZeRO, where none is asked for
Family = tuple[Layout, ...]  # alike in all but the micro-batch, which grows


def divisors(n: int) -> tuple[int, ...]:
    """Ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return tuple(sorted({*small, *(n // d for d in small)}))


@dataclass(frozen=True)
class Space:
    """The layouts of a question. Of each axis these values are tried, unless the question pins it:

    dp tp pp cp        every ordered factorisation of the number of GPUs
    schedule, vpp      without a pipeline one; else afab, 1f1b, zb_h1, and interleaved with the fewest chunks for each
                       number of layers that the longest chunk can have: more chunks of that length only wait more
    ep, expert_tp      for a model with experts: divisors of dp·cp; whole experts, or split over tp
    context_method     all, where cp > 1
    zero               0 and 1; 0 alone where no two ranks share parameters (dp·cp = 1)
    recompute          none, full
    attention          the fastest kernel that the rest allows, on GPUs in bf16
    micro_batch_size   the divisors of a replica's share of the batch

    """

    ask: Ask

    @cached_property
    def meshes(self) -> tuple[tuple[int, int, int, int], ...]:
        """(dp, tp, pp, cp)"""
        gpus = self.ask.cluster.gpus
        found = [
            (gpus // (tp * pp * cp), tp, pp, cp)
            for tp in divisors(gpus)
            for pp in divisors(gpus // tp)
            for cp in divisors(gpus // tp // pp)
        ]
        return tuple(m for m in found if all(n in self._values(a, (n,)) for a, n in zip(_MESH, m, strict=True)))

    @cached_property
    def enumerated(self) -> int:
        """Layouts of the product, legal or not."""
        return sum(
            len(self.methods(cp))
            * len(self.pipelines(pp))
            * len(self.experts(tp, dp * cp))
            * len(self.memories(dp * cp, cp, "gather"))
            * len(self.micro_batches(dp))
            for dp, tp, pp, cp in self.meshes
        )

    def pipelines(self, pp: int) -> list[tuple[Schedule, int]]:
        """(schedule, vpp)"""
        found: list[tuple[Schedule, int]] = [("1f1b", 1)]
        if pp > 1:
            found.extend((("afab", 1), ("zb_h1", 1)))
            chunks = self._values("vpp", _chunks(self.ask.model.layers, pp))
            found.extend(("interleaved", n) for n in chunks if n > 1)
        schedules, chunks = self._values("schedule", SCHEDULES), self._values("vpp", tuple(v for _, v in found))
        return [(schedule, vpp) for schedule, vpp in found if schedule in schedules and vpp in chunks]

    def experts(self, tp: int, rows: int) -> list[tuple[int, int]]:
        """(ep, expert_tp) over `rows` = dp·cp places of `tp` ranks."""
        some = self.ask.model.moe is not None
        degrees = self._values("ep", divisors(rows) if some else (1,))
        return list(product(degrees, self._values("expert_tp", (1, tp) if some and tp > 1 else (1,))))

    def methods(self, cp: int) -> tuple[ContextMethod, ...]:
        allowed = self._values("context_method", CONTEXT_METHODS)
        found = CONTEXT_METHODS if cp > 1 else (Layout().context_method,)
        return tuple(m for m in found if m in allowed)

    def memories(self, rows: int, cp: int, method: ContextMethod) -> list[tuple[int, tuple[str, ...], AttentionBody]]:
        """(zero, remake, attention) where `rows` = dp·cp ranks share parameters and `cp` of them sequences."""
        stages = self._values("zero", SEARCHED_STAGES if rows > 1 else SEARCHED_STAGES[:1])
        remakes = [edits_of({"recompute": name})["remake"] for name in self._values("recompute", tuple(RECOMPUTE))]
        return list(product(stages, remakes, self._values("attention", (self.ask.attention(cp, method),))))

    def micro_batches(self, dp: int) -> tuple[int, ...]:
        """Of a share that is not whole, one: enough to be refused."""
        total = self.ask.global_batch_size
        return self._values("micro_batch_size", divisors(total // dp) if total % dp == 0 else (1,))

    def families(self, refused: Counter[str]) -> Iterator[Family]:
        """The legal layouts, those that differ in the micro-batch alone together; the others, counted by reason."""
        ask, gpus, node = self.ask, self.ask.cluster.gpus, self.ask.cluster.gpus_per_node
        legality = Legality(ask.model, ask.sequence_length, ask.global_batch_size)
        for mesh in self.meshes:
            dp, tp, pp, cp = mesh
            for method in self.methods(cp):
                rows = dp * cp
                pipelines, experts, memories = (
                    self.pipelines(pp),
                    self.experts(tp, rows),
                    self.memories(rows, cp, method),
                )
                why = legality.split(tp, cp, method)
                if not why and not ask.tp_across_nodes and crosses_node(tp, gpus, node):
                    why = CROSSES
                if why:
                    alike = len(pipelines) * len(experts) * len(memories) * len(self.micro_batches(dp))
                    refused[why] += alike
                    continue
                for (schedule, vpp), (ep, expert_tp) in product(pipelines, experts):
                    fixed = {"context_method": method, "schedule": schedule, "vpp": vpp, "ep": ep,
                             "expert_tp": expert_tp}  # fmt: skip
                    sizes, bad = self._sizes(legality, mesh, fixed)
                    refused.update({why: n * len(memories) for why, n in bad.items() if memories})
                    for zero, remake, attention in memories if sizes else ():
                        lone = Layout(cp=cp, context_method=method, attention=attention)
                        if breach := next(kernel_breaches(ask.model, lone), None):
                            refused[breach[1]] += len(sizes)
                            continue
                        yield tuple(
                            Layout(dp=dp, tp=tp, pp=pp, cp=cp, **cast("Any", fixed), micro_batch_size=size,
                                   gradient_accumulation_steps=steps, zero=zero, attention=attention,
                                   **cast("Any", self._edits | {"remake": remake}))
                            for size, steps in sizes
                        )  # fmt: skip

    @cached_property
    def _edits(self) -> dict[str, Any]:
        """What is pinned of remaking and offloading, one value each."""
        pinned = {name: values for name, values in self.ask.pins.items() if name in EDITS}
        for name, values in pinned.items():
            several = len(values) > 1 and name != "recompute"
            if several or any(budget_of(str(v)) for v in values):
                what = "a budget is solved for one layout" if not several else "this axis is held at one value"
                raise BadInput("AXIS", what, where="--fix", found=f"{name}={'/'.join(map(str, values))}",
                               fix=f"--layout …,{name}={next(iter(values))}")  # fmt: skip
        edits = edits_of({name: next(iter(values)) for name, values in pinned.items()})
        check_words(Layout(**edits))
        return edits

    def _sizes(
        self, legality: Legality, mesh: tuple[int, int, int, int], fixed: dict[str, Any]
    ) -> tuple[list[tuple[int, int]], Counter[str]]:
        """(micro_batch_size, accumulation steps) that are legal, and the others' reasons."""
        dp, tp, pp, cp = mesh
        experts = legality.experts(tp, dp * cp, fixed["ep"], fixed["expert_tp"])
        found, bad = list[tuple[int, int]](), Counter[str]()
        for size in self.micro_batches(dp):
            steps = max(1, self.ask.global_batch_size // (dp * size))
            why = legality.pipeline(fixed["schedule"], pp, fixed["vpp"], steps)
            why = why or experts or legality.batch(dp, size, steps)
            if why:
                bad[why] += 1
            else:
                found.append((size, steps))
        return found, bad

    def _values(self, axis: str, tried: Values) -> Any:
        """What is tried of an axis: its values, or those it is pinned to."""
        pinned = self.ask.pins.get(axis)
        if pinned is None:
            return tried
        return tuple(v for v in tried if v in pinned) if axis in _FILTERED else pinned


_MESH = ("dp", "tp", "pp", "cp")
_FILTERED = frozenset({*_MESH, "schedule", "context_method"})  # other axes take pinned values that are not tried


def _chunks(layers: int, pp: int) -> tuple[int, ...]:
    """Numbers of chunks a rank, two or more: for each length of the longest chunk, the fewest that have it."""
    fewest: dict[int, int] = {}
    for vpp in range(2, layers // pp + 1):
        fewest.setdefault(-(-layers // (pp * vpp)), vpp)
    return tuple(fewest.values()) or (2,)
