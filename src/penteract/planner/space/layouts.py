"""The search space: the values tried of each setting, and the legal layouts of their product."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

from penteract.config.layout import (
    CP_METHODS,
    ZERO_STAGES,
    CpMethod,
    Determinism,
    EpMethod,
    ExpertRows,
    Layout,
)
from penteract.config.rules.ep_methods import close_ep_methods
from penteract.config.rules.expert_kernels import fastest_rows
from penteract.errors import BadInput
from penteract.model.count import head_in_layers
from penteract.parallel.pipeline import balanced
from penteract.planner.ask import EDITS, LOSS, RECOMPUTE, Ask, Values, budget_of, edits_of
from penteract.planner.options import errors_for
from penteract.planner.space.layout_families import Experts, LayoutFamily, MemoryOptions, Pipeline, Sizes
from penteract.planner.space.legality import CROSSES, Legality, crosses_node
from penteract.schedule.registry import SCHEDULES, ScheduleName
from penteract.step.program import check_op_names

_PLAIN = Layout()


class _Checked(NamedTuple):
    """Memory options, each with the key of its sizes (why state cannot be sharded, or ""; whether it is tried with one
    accumulation step) and why its kernels are illegal, or ""; and how many have each key."""

    members: list[tuple[MemoryOptions, tuple[str, bool], str]]
    keys: Mapping[tuple[str, bool], int]


# The legal micro-batch sizes and the reasons of the others, by the arguments of `Space._sizes`.
_SizeCache = dict[tuple[int, int, Pipeline, str, bool], tuple[Sizes, Counter[str]]]


def divisors(n: int) -> tuple[int, ...]:
    """The divisors of n, ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return tuple(sorted({*small, *(n // d for d in small)}))


@dataclass(frozen=True)
class Space:
    """The layouts of a question. These values of each setting are tried, unless the question pins it:

    dp tp pp cp            every ordered factorisation of the number of GPUs
    schedule, vpp          one schedule without a pipeline; else all. Schedules of one chunk a rank have one; the others
                           have, for each possible length of the longest chunk, the fewest chunks that reach it: more
                           chunks of that length only wait more
    last_stage_less_layers 0, and what leaves the slowest pipeline rank the least work (`balanced`)
    ep, expert_tp          for a model with experts: divisors of dp·cp; whole experts, or split over tp
    cp_method              all, if cp > 1
    ep_method              what sends less; both, where gathering sends as much as all-to-all or up to twice that
    expert_rows            exact; padded, too, on GPUs where up to four ranks gather tokens and a kernel can have that:
                           the room of so many is four times the rows of even routing
    zero                   0 to 3; only 0 if no two ranks share parameters (dp·cp = 1)
    shard_group            all ranks that share parameters; on several nodes also those of one node, if that divides
    reduce_scatter_once,   with ZeRO 3 and several micro-batches: neither, or one of both (both together equal ZeRO 1)
    reshard_after_step
    recompute              none, full; `between.py` tries some in between
    loss                   in chunks, the default of runs
    attention              the fastest kernel that the other settings allow on GPUs in bf16
    elementwise, fuse      the fastest kernels on GPUs, and all fusions with them
    experts                the fastest kernel of torch for the GPU, the precision and the widths on a rank
    collectives            overlapped, where direct ones were measured on such links
    micro_batch_size       the divisors of a replica's share of the batch

    All GPUs are used. `NOT_TRIED` lists what is left out.
    """

    ask: Ask
    _pipelines: dict[int, list[Pipeline]] = field(default_factory=dict[int, list[Pipeline]], repr=False, compare=False)

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
        """The number of layouts in the product, legal or not."""
        return sum(
            len(self.methods(cp))
            * len(self.pipelines(pp))
            * len(self.experts(tp, dp * cp))
            * self._count(dp, self.memories(dp * cp, tp, cp, "all_gather", 1))
            for dp, tp, pp, cp in self.meshes
        )

    def pipelines(self, pp: int) -> list[Pipeline]:
        """The pipelines of `pp` ranks, the simplest first. Many meshes have the same."""
        if pp not in self._pipelines:
            self._pipelines[pp] = [
                Pipeline(schedule, vpp, less)
                for schedule, vpp in self._schedules(pp)
                for less in self._values("last_stage_less_layers", self._less_layers(schedule, pp, vpp))
            ]
        return self._pipelines[pp]

    def _less_layers(self, schedule: ScheduleName, pp: int, vpp: int) -> tuple[int, ...]:
        placement = SCHEDULES[schedule].placement(pp, vpp)
        return tuple(dict.fromkeys((0, balanced(self.ask.model.layers, placement, self._head))))

    @cached_property
    def _head(self) -> float:
        """The work of the head, in layers."""
        return head_in_layers(self.ask.model, self.ask.sequence_length)

    def _schedules(self, pp: int) -> list[tuple[ScheduleName, int]]:
        """(schedule, vpp)"""
        plain = _PLAIN.schedule
        found = [(plain, 1)]
        if pp > 1:
            chunks = self._values("vpp", _chunks(self.ask.model.layers, pp))
            several = [s for s in SCHEDULES.values() if s.min_vpp > 1]
            found.extend((s.name, 1) for s in SCHEDULES.values() if s.min_vpp == 1 and s.name != plain)
            found.extend((s.name, n) for s in several for n in chunks if s.min_vpp <= n <= s.max_vpp)
        schedules, chunks = self._values("schedule", tuple(SCHEDULES)), self._values("vpp", tuple(v for _, v in found))
        return [(schedule, vpp) for schedule, vpp in found if schedule in schedules and vpp in chunks]

    def experts(self, tp: int, rows: int) -> list[Experts]:
        """How experts are shared over `rows` = dp·cp times `tp` ranks."""
        some = self.ask.model.moe is not None
        degrees = self._values("ep", divisors(rows) if some else (1,))
        cuts = self._values("expert_tp", (1, tp) if some and tp > 1 else (1,))
        return [
            Experts(ep, cut, method, size, capacity)
            for ep, cut in product(degrees, cuts) for method in self.ep_methods(ep)
            for size in self._values("expert_rows", self._expert_rows(ep, cut, method))
            for capacity in self._values("capacity_percent", (_PLAIN.capacity_percent,))
        ]  # fmt: skip

    @cached_property
    def _determinisms(self) -> tuple[Determinism, ...]:
        return self._values("determinism", (_PLAIN.determinism,))

    def _expert_rows(self, ep: int, expert_tp: int, method: EpMethod) -> tuple[ExpertRows, ...]:
        """How large registers of experts' rows may be: padded first, which measured steps are faster with; exact alone
        where no kernel can have padded ones, or where they would have the room of many ranks."""
        ask, plain = self.ask, _PLAIN.expert_rows
        if ask.gpu is None or ep > _PADDED_RANKS:
            return (plain,)
        layouts = [
            _PLAIN.put(ep=ep, ep_method=method, experts=kernel)
            for kernel in self._values("experts", tuple(ask.experts(expert_tp, d) for d in self._determinisms))
        ]
        return tuple(dict.fromkeys([*(fastest_rows(ask.model, one, ask.precision) for one in layouts), plain]))

    def ep_methods(self, ep: int) -> tuple[EpMethod, ...]:
        """How tokens get to experts that `ep` ranks share; on one rank, the default alone."""
        if ep > 1:
            return self._values("ep_method", close_ep_methods(self.ask.model, ep))
        default = (_PLAIN.ep_method,)
        return tuple(m for m in default if m in self._values("ep_method", default))

    def methods(self, cp: int) -> tuple[CpMethod, ...]:
        """The ways of context parallelism to try over `cp` ranks; over one rank, the default alone."""
        allowed = self._values("cp_method", CP_METHODS)
        found = CP_METHODS if cp > 1 else (_PLAIN.cp_method,)
        return tuple(m for m in found if m in allowed)

    def memories(self, rows: int, tp: int, cp: int, method: CpMethod, expert_tp: int) -> list[MemoryOptions]:
        """Of layouts where `rows` = dp·cp places of `tp` ranks share parameters and `cp` of them sequences. An expert
        is split over `expert_tp` ranks."""
        stages = self._values("zero", ZERO_STAGES if rows > 1 else ZERO_STAGES[:1])
        sharings = [
            (zero, group, whole, gathered)
            for zero in stages
            for group in self._values("shard_group", (0, *self._node(rows, tp)) if zero else (0,))
            for whole in self._values("reduce_scatter_once", _CHOICES[zero])
            for gathered in self._values("reshard_after_step", _CHOICES[zero])
            if not (whole and gathered) or {"reduce_scatter_once", "reshard_after_step"} & self.ask.pins.keys()
        ]
        recomputes = [
            edits_of({"recompute": name})["recompute"] for name in self._values("recompute", tuple(RECOMPUTE))
        ]
        fused = [
            (elementwise, fuse)
            for elementwise in self._values("elementwise", (self.ask.elementwise,))
            for fuse in self._values("fuse", (self.ask.fuse(tp, elementwise),))
        ]
        chosen: list[Any] = [
            (determinism, attention, experts)
            for determinism in self._determinisms
            for attention in self._values("attention", (self.ask.attention(cp, method, determinism),))
            for experts in self._values("experts", (self.ask.experts(expert_tp, determinism),))
        ]
        kernels = product(
            chosen, self._values("loss", (LOSS,)), self._values("loss_chunk", (0,)), fused,
            self._values("collectives", (self.ask.collectives,)),
            self._values("bucket_bytes", (_PLAIN.bucket_bytes,)), self._values("offload_optimizer", (False,)),
        )  # fmt: skip
        return [
            MemoryOptions(*sharing, recompute, determinism, attention, loss, chunk, *both, experts, *rest)
            for sharing, recompute, ((determinism, attention, experts), loss, chunk, both, *rest) in product(
                sharings, recomputes, list(kernels)
            )
        ]

    def _node(self, rows: int, tp: int) -> tuple[int, ...]:
        """The size of a shard group within one node, if a stage has several whole nodes."""
        size, rest = divmod(self.ask.cluster.gpus_per_node, tp)
        return (size,) if not rest and 1 < size < rows and rows % size == 0 else ()

    def _tried(self, memory: MemoryOptions, steps: int) -> bool:
        """Whether these options are tried. With one micro-batch, `reduce_scatter_once` and `reshard_after_step` change
        nothing: they are tried only if pinned."""
        pinned = {"reduce_scatter_once", "reshard_after_step"} & self.ask.pins.keys()
        return steps > 1 or not (memory.reduce_scatter_once or memory.reshard_after_step) or bool(pinned)

    def _steps(self, dp: int, size: int) -> int:
        return max(1, self.ask.global_batch_size // (dp * size))

    def _count(self, dp: int, memories: list[MemoryOptions]) -> int:
        """The number of layouts that differ in memory options and the micro-batch size."""
        return sum(self._tried(m, self._steps(dp, size)) for size in self.micro_batch_sizes(dp) for m in memories)

    def micro_batch_sizes(self, dp: int) -> tuple[int, ...]:
        """The sizes tried for a replica's share of the batch; only 1 if the share is not whole: it will be refused."""
        total = self.ask.global_batch_size
        return self._values("micro_batch_size", divisors(total // dp) if total % dp == 0 else (1,))

    def families(self, refused: Counter[str]) -> Iterator[LayoutFamily]:
        """The legal layouts; the others are counted in `refused` by reason."""
        ask, gpus, node = self.ask, self.ask.cluster.gpus, self.ask.cluster.gpus_per_node
        legality = Legality(ask.model, ask.sequence_length, ask.global_batch_size)
        sizes: _SizeCache = {}
        for mesh in self.meshes:
            dp, tp, pp, cp = mesh
            for method in self.methods(cp):
                pipelines, experts = self.pipelines(pp), self.experts(tp, dp * cp)
                memories = {e.expert_tp: self.memories(dp * cp, tp, cp, method, e.expert_tp) for e in experts}
                why = legality.split(tp, cp, method)
                if not why and not ask.tp_across_nodes and crosses_node(tp, gpus, node):
                    why = CROSSES
                if why:
                    refused[why] += len(pipelines) * sum(self._count(dp, memories[e.expert_tp]) for e in experts)
                    continue
                options = {e: self._checked(legality, (dp, cp, method), e, memories[e.expert_tp]) for e in experts}
                for pipeline, e in product(pipelines, experts):
                    fixed = {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "cp_method": method, **pipeline._asdict(),
                             **e._asdict(), **self._edits}  # fmt: skip
                    members = tuple(self._members(legality, fixed, options[e], refused, sizes))
                    if members:
                        yield LayoutFamily(fixed, members)

    def _checked(
        self, legality: Legality, mesh: tuple[int, int, CpMethod], e: Experts, memories: list[MemoryOptions]
    ) -> _Checked:
        """Memory options with all that does not depend on the pipeline. `mesh`: dp, cp, cp_method."""
        dp, cp, method = mesh
        found: list[tuple[MemoryOptions, tuple[str, bool], str]] = []
        for memory in memories:
            why = legality.kernel(cp, method, memory.attention, memory.determinism)
            why = why or legality.expert_kernel(memory.experts, e.expert_tp, e.expert_rows, memory.determinism)
            found.append((memory, (legality.shards(dp * cp, e.ep, memory[:4]), self._tried(memory, 1)), why))
        return _Checked(found, Counter(key for _, key, _ in found))

    def _members(
        self, legality: Legality, fixed: Mapping[str, Any], options: _Checked, refused: Counter[str], cache: _SizeCache
    ) -> Iterator[tuple[MemoryOptions, Sizes]]:
        """The legal ones of the layouts that share `fixed`."""
        dp, pp, pipeline = fixed["dp"], fixed["pp"], Pipeline(*(fixed[name] for name in Pipeline._fields))
        experts = legality.experts(fixed["tp"], dp * fixed["cp"], **{name: fixed[name] for name in Experts._fields})
        sizes: dict[tuple[str, bool], Sizes] = {}
        for (shards, one_step_too), n in options.keys.items():
            key = (dp, pp, pipeline, experts or shards, one_step_too)
            if key not in cache:
                cache[key] = self._sizes(legality, *key)
            sizes[shards, one_step_too], bad = cache[key]
            for why, times in bad.items():
                refused[why] += n * times
        for memory, key, why in options.members:
            if not (legal := sizes[key]):
                continue
            if why:
                refused[why] += len(legal)
            else:
                yield memory, legal

    @cached_property
    def _edits(self) -> dict[str, Any]:
        """The pinned settings of recomputation and offload, one value each; without `recompute`, which is one of
        `MemoryOptions`."""
        pinned = {name: values for name, values in self.ask.pins.items() if name in EDITS}
        for name, values in pinned.items():
            several = len(values) > 1 and name != "recompute"
            if several or any(budget_of(str(v)) for v in values):
                what = "a budget is solved for one layout" if not several else "this setting takes one value"
                raise BadInput("SETTING", what, where="--fix", found=f"{name}={'/'.join(map(str, values))}",
                               fix=f"--layout …,{name}={next(iter(values))}")  # fmt: skip
        edits = edits_of({name: next(iter(values)) for name, values in pinned.items()})
        with errors_for("--fix"):
            check_op_names(Layout(**edits))
        return {name: value for name, value in edits.items() if name != "recompute"}

    def _sizes(
        self, legality: Legality, dp: int, pp: int, pipeline: Pipeline, illegal: str, one_step_too: bool
    ) -> tuple[Sizes, Counter[str]]:  # fmt: skip
        """The legal micro-batch sizes, and the reasons of the others. `illegal`: why no size is legal, or "";
        `one_step_too`: whether sizes with one accumulation step are tried."""
        found, bad = list[tuple[int, int]](), Counter[str]()
        for size in self.micro_batch_sizes(dp):
            steps = self._steps(dp, size)
            if steps == 1 and not one_step_too:
                continue
            if why := legality.pipeline(pp, *pipeline, steps) or illegal or legality.batch(dp, size, steps):
                bad[why] += 1
            else:
                found.append((size, steps))
        return tuple(found), bad

    def _values(self, setting: str, tried: Values) -> Any:
        """The values of a setting to try: `tried`, or the pinned ones."""
        pinned = self.ask.pins.get(setting)
        if pinned is None:
            return tried
        return tuple(v for v in tried if v in pinned) if setting in _FILTERED else pinned


# Settings of which `Space` tries one or few values, unless the question pins them.
NOT_TRIED: Mapping[str, str] = {
    "attention": "other attention kernels",
    "experts": "other expert kernels",
    "ep_method": "tokens gathered over many ranks",
    "expert_rows": "padded rows of experts of more than four ranks",
    "fuse": "fewer fusions",
    "offload": "offload",
    "offload_optimizer": "offload_optimizer",
    "shard_group": "other HSDP group sizes",
    "recompute": "other recomputation choices",
    "loss_chunk": "loss chunk sizes",
    "bucket_bytes": "bucket sizes",
    "vpp": "larger vpp with the same longest chunk",
    "last_stage_less_layers": "other last_stage_less_layers",
}
_PADDED_RANKS = 4  # that share experts, at most, where padded rows are tried
_MESH = ("dp", "tp", "pp", "cp")
# The values of `reduce_scatter_once` and `reshard_after_step` for each ZeRO stage, the faster first.
_CHOICES: Mapping[int, tuple[bool, ...]] = {zero: (True, False) if zero == 3 else (False,) for zero in ZERO_STAGES}
_FILTERED = frozenset({*_MESH, "schedule", "cp_method"})  # other settings take pinned values that are not tried


def _chunks(layers: int, pp: int) -> tuple[int, ...]:
    """Numbers of chunks a rank, two or more: for each length of the longest chunk, the fewest chunks that reach it."""
    fewest: dict[int, int] = {}
    for vpp in range(2, layers // pp + 1):
        fewest.setdefault(-(-layers // (pp * vpp)), vpp)
    return tuple(fewest.values()) or (2,)
