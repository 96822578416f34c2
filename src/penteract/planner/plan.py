"""The planner: search all layouts of a question, and return the best as a `Plan`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penteract.config.device_words import of_cpu
from penteract.config.hardware import Cluster
from penteract.config.layout import AttentionKernel, Layout
from penteract.config.precision.policy import Policy
from penteract.config.rules.case import Case
from penteract.config.rules.kernel_limits import check_elementwise
from penteract.config.rules.kernel_packages import packages_for, packages_needed
from penteract.config.rules.legal import problems
from penteract.config.rules.nearest import repair
from penteract.config.rules.settle import Settle
from penteract.errors import BadInput
from penteract.planner.ask import (
    EDITS,
    LAYOUT_SETTINGS,
    LOSS,
    Ask,
    Values,
    budget_of,
    check_kernels,
    edits_of,
    read_fusions,
)
from penteract.planner.options import errors_for
from penteract.planner.search.best import Search, Timed
from penteract.planner.search.between import Between, candidates
from penteract.planner.search.frontier import Frontier
from penteract.planner.search.grow import Make, larger_cluster, larger_fix
from penteract.planner.search.priced import TOO_LARGE, Miss, Priced
from penteract.planner.search.progress import Pulse, Stopped, Watch
from penteract.planner.search.workers import looking_ahead
from penteract.planner.space.layouts import NOT_TRIED, Space, divisors
from penteract.planner.space.legality import CROSSES, crosses_node
from penteract.planner.space.pins import refuse_pins
from penteract.readings.estimator import Estimator, LayoutEstimate
from penteract.readings.recomputation.cheapest import within
from penteract.step.program import check_op_names
from penteract.units import show_bytes

# benchmarks/results/bench_one_card_options_h200.json
PLAIN_KERNELS = ("elementwise is reference: with plain torch's kernels recorded steps took 1.14 times as long as "
                 "planned in bf16, and 1.75 times in FP8")  # fmt: skip
EVEN_EXPERTS = ("where ep > 1, experts of every {one} are planned with as many tokens as those of the others: in "
                "training, all wait for the {one} with the most, which takes more memory, except where gathered "
                "rows are padded; --imbalance 1.2 plans for 20 % more")  # fmt: skip
PLAIN_ATTENTION = ("determinism is bitwise, and attention is plain torch's, which is much slower: of faster kernels, "
                   "only flash-attn-4 on Hopper was seen to repeat")  # fmt: skip
SMALL_BLOCKS = ("more tokens come to the fullest rank's experts than blocks have room for: steps in which they do not "
                "fit are repeated with exact sizes, which is not planned; raise parallel.capacity_percent")  # fmt: skip
SHARED_CPU = "processes of a CPU share its cores and its memory; here each is planned with all of both"
NOT_REACHED = "not looked at: the search was stopped"


@dataclass(frozen=True, slots=True)
class SearchCounts:
    """How many layouts were enumerated, refused by reason, priced, found to fit, and simulated.

    enumerated = fit + the sum of `refused`. `refused` includes layouts that are too slow by a lower bound. A layout
    that fits still fits with more recomputation: that is counted in `fit`, but not priced. `between`: layouts with some
    recomputation; those tried are counted in `enumerated`, too.
    """

    enumerated: int
    refused: Mapping[str, int]
    priced: int
    fit: int
    simulated: int
    between: Between = field(default_factory=Between)


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer. `layouts`: the best, fastest first, without those that recompute or shard more than they need to fit.

    `larger`: if nothing fits, a cluster with more of these GPUs on which a layout fits, and that layout's estimate.
    `complete`: False if the search was stopped; then better layouts may be among those not looked at.
    """

    ask: Ask
    counts: SearchCounts
    layouts: tuple[Timed, ...]
    search: Search = field(repr=False)
    larger: tuple[Cluster, LayoutEstimate] | None = None
    complete: bool = True

    @property
    def missed(self) -> tuple[Miss, ...]:
        """Layouts that do not fit: of each mesh and technique, the one found that needs least."""
        return tuple(self.search.frontier.found.nearest.values())

    @property
    def estimator(self) -> Estimator:
        """The estimator of the first precision."""
        return self.search.estimators[self.ask.precision]

    def misses(self, most: int = 3) -> list[LayoutEstimate]:
        """The layouts that miss the memory by least."""
        found = list[LayoutEstimate]()
        for miss in sorted(self.missed, key=lambda m: m.size):
            if len(found) == most and miss.size > found[-1].allocated:
                break
            found.append(self.search.estimators[miss.precision].estimate(miss.layout))
            found = sorted(found, key=lambda q: q.allocated)[:most]
        return found

    @property
    def best(self) -> Timed:
        """The best layout. Raises BadInput if nothing fits."""
        return self.number(1)

    def number(self, n: int) -> Timed:
        """The n-th best, from 1."""
        if not self.layouts and (refusal := self.refusal):
            raise refusal
        if not 1 <= n <= len(self.layouts):
            raise _no_such(n, len(self.layouts))
        return self.layouts[n - 1]

    @property
    def refusal(self) -> BadInput | None:
        """The error if nothing fits, else None."""
        name, nearest = self.ask.cluster.name, self.misses(1)
        if self.counts.fit:
            return None
        if (offloads := self.search.frontier.found.offloads) is not None:
            return self.off_hosts(offloads)
        if not nearest:
            return BadInput("FIT", "no layout is possible: each breaks a rule", where=name,
                            found=next(iter(self.counts.refused), ""),
                            fix=f"another --batch, --seq or number of {self.ask.devices(2)}, "
                            "or fewer values held by --fix")  # fmt: skip
        other = "another layout, " * (self.counts.enumerated == 1)
        fix = larger_fix(self.larger[0]) if self.larger else f"{other}{self.ask.more_memory}, or a shorter --seq"
        return BadInput("FIT", "no layout fits", where=name,
                        found=f"{show_bytes(nearest[0].allocated)} a {self.ask.devices()}",
                        allowed=show_bytes(self.ask.usable), fix=fix)  # fmt: skip

    def off_hosts(self, estimate: LayoutEstimate) -> BadInput | None:
        """The error if what a layout offloads does not fit its hosts, else None."""
        cluster = self.ask.cluster
        if cluster.host_holds(estimate.host):
            return None
        ranks = min(estimate.layout.world, cluster.gpus_per_node)
        return BadInput("FIT", "what is offloaded does not fit a host", where=cluster.name,
                        found=f"{show_bytes(estimate.host * ranks)} of {ranks} {self.ask.devices(ranks)}",
                        allowed=f"{cluster.host_memory_gib:.2f} GiB (node.host_memory_gib)",
                        fix="offload less, or more hosts")  # fmt: skip

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings: the question exceeds a limit of the model, or recorded steps differ much from planned ones."""
        m, length, notes = self.ask.model, self.ask.sequence_length, list[str]()
        if length > m.max_positions:
            notes.append(f"{length} tokens of a sequence are more than the {m.max_positions} positions of {m.name}")
        if self.ask.imbalance == 1 and any(one.layout.ep > 1 for one in self.layouts):
            notes.append(EVEN_EXPERTS.format(one=self.ask.devices()))
        if self.ask.gpu and any(
            one.layout.determinism == "bitwise" and one.layout.attention == "reference" for one in self.layouts
        ):
            notes.append(PLAIN_ATTENTION)
        if self.ask.gpu and any(one.layout.elementwise == "reference" for one in self.layouts):
            notes.append(PLAIN_KERNELS)
        if any(
            100 * self.ask.imbalance > one.layout.capacity_percent for one in self.layouts if one.layout.sends_blocks
        ):
            notes.append(SMALL_BLOCKS)
        if of_cpu(self.ask.cluster) and self.ask.cluster.gpus > 1:
            notes.append(SHARED_CPU)
        return tuple(notes)

    @property
    def not_tried(self) -> tuple[str, ...]:
        """What the search did not try; empty if the question was about one layout."""
        if not self.searched:
            return ()
        of_experts = ("experts", "ep_method", "expert_rows")
        settled = {*self.ask.pins, *(() if self.ask.model.moe else of_experts)}
        rest = tuple([what for setting, what in NOT_TRIED.items() if setting not in settled])
        missing = sorted(self._packages_there - self.ask.packages)
        return (f"kernels of {' and '.join(missing)} (--packages)", *rest) if missing else rest

    @property
    def packages(self) -> tuple[str, ...]:
        """The packages of kernels that its layouts need in addition to torch."""
        needed = {name for one in self.layouts for name in packages_needed(self.ask.model, one.layout)}
        return tuple(sorted(needed & self._packages_there))

    @property
    def _packages_there(self) -> frozenset[str]:
        gpu = self.ask.cluster.gpu
        return packages_for(gpu.capability) if gpu is not None else frozenset()

    @property
    def searched(self) -> bool:
        """Whether there was more than one layout."""
        return bool(self.search.frontier.branches)

    def fits(self, estimate: LayoutEstimate) -> bool:
        """Whether a layout's tensors stay within the memory that they may take, of GPUs and of hosts."""
        return (not self.ask.usable or estimate.allocated <= self.ask.usable) and self.off_hosts(estimate) is None

    def rate(self, timed: Timed) -> float:
        """Tokens a second and GPU."""
        return self.ask.tokens / timed.time.seconds / timed.layout.world


def estimator(ask: Ask) -> Estimator:
    """The estimator of a question."""
    length = ask.sequence_length
    return Estimator(
        ask.model, ask.cluster, sequence_length=length, precision=ask.precision, optimizer_kinds=ask.optimizer_kinds,
        imbalance=ask.imbalance,
    )  # fmt: skip


def plan_layouts(
    ask: Ask, make: Make, *, top: int = 10, number: int = 1, watch: Watch | None = None,
    workers: int | None = None,
) -> Plan:  # fmt: skip
    """The `top` best layouts of a question (or `number`, if that is more), exactly. `watch` receives the progress.
    `workers`: processes that search ahead of this one; by default one for each idle core. The answer is the same.

    Raises BadInput if no layout of the model can have such a step, if pins leave nothing to try, or if some layouts fit
    but fewer than `number`. Raises Stopped, with what was found so far, in place of KeyboardInterrupt.
    """
    check_step(ask)
    spaces, most = [Space(one) for one in ask.each], max(top, number)
    enumerated = sum(space.enumerated for space in spaces)
    if not enumerated:
        refuse_pins(ask)
    if number > enumerated:
        raise _no_such(number, enumerated)
    estimators, between = dict[Policy, Estimator](), Between()
    frontier = Frontier(Priced(ask.usable, ask.cluster.host_holds), ask.global_batch_size)
    search = Search(estimators, frontier)
    search.pulse = Pulse(watch, lambda seconds: search.progress(seconds, enumerated + between.tried, most))
    try:
        for space in spaces:
            estimators[space.ask.precision] = prices = make(space.ask)
            frontier.add(space.families(frontier.found.refused), prices, search.pulse)
        if ask.pins and not frontier.branches:
            refuse_pins(ask, f"no layout can have these values: {frontier.found.refused.most_common(1)[0][0]}")
        search.others = candidates(ask, frontier, between)
        with looking_ahead(search, most, workers):
            best = search.best(most)
    except KeyboardInterrupt as stop:
        rest = search.progress(0.0, enumerated + between.tried, most).left
        counts = _counts(enumerated, search, between, {NOT_REACHED: rest})
        raise Stopped(Plan(ask, counts, tuple(search.so_far(most)), search, complete=False)) from stop
    finally:
        search.others = ()  # what is asked of the found layouts later needs no more of them
    if number > len(best) > 0:
        raise _no_such(number, len(best))
    counts = _counts(enumerated, search, between, {behind(most): frontier.left})
    larger = None if best or of_cpu(ask.cluster) else larger_cluster(ask, make)
    return Plan(ask, counts, tuple(best), search, larger)


def _counts(enumerated: int, search: Search, between: Between, left: Mapping[str, int]) -> SearchCounts:
    found = search.frontier.found
    refused = _most_first(found.refused + Counter(left))
    return SearchCounts(enumerated + between.tried, refused, found.count, found.fit, search.simulated, between)


def behind(k: int) -> str:
    """Why layouts that the search did not reach are not priced."""
    return f"provably slower than the {f'{k} best' if k > 1 else 'best'}"


def plan_one(ask: Ask, settings: Mapping[str, Values], make: Make) -> Plan:
    """Memory and time of one layout in each precision, whether it fits or not: `settings`, and defaults for the others.

    By default, dp uses the remaining GPUs, and a micro-batch has one sequence. Raises BadInput for an illegal layout,
    with the nearest legal one.
    """
    check_step(ask)
    estimators = dict[Policy, Estimator]()
    search = Search(estimators)
    for one in ask.each:
        layout, prices = exact(one, settings), make(one)
        if budget := budget_of(str(settings.get("recompute", ("",))[0])):
            layout = within(prices, layout, budget).layout
        estimators[one.precision] = prices
        with errors_for("--layout"):
            prices.check_sizes(layout)
        search.add(prices.estimate(layout))
    every, found = search.estimates, search.frontier.found
    found.host_holds = ask.cluster.host_holds
    for q in every:
        if ask.usable and q.allocated > ask.usable:
            found.miss(q.allocated, q.layout, q.precision)
            found.refused[TOO_LARGE] += 1
        elif not found.on_hosts(q):
            found.refused[TOO_LARGE] += 1
    counts = SearchCounts(len(every), dict(found.refused), len(every), len(every) - found.refused.total(), len(every))
    return Plan(ask, counts, tuple(search.best(len(every))), search)


def case_of(ask: Ask, settings: Mapping[str, Values]) -> tuple[Case, Settle]:
    """The one layout of these settings, unchecked, with its batch and GPUs; and what fills the open ones."""
    given: dict[str, Any] = {name: values[0] for name, values in settings.items()}
    given.setdefault("loss", LOSS)
    given.setdefault("elementwise", ask.elementwise)
    check_elementwise(given["elementwise"], ask.precision, where="--layout", fix="leave elementwise out")
    given.setdefault("fuse", ask.fuse(given.get("tp", 1), given["elementwise"]))
    if isinstance(given["fuse"], str):  # as `as_settings` names it
        given["fuse"] = read_fusions(given["fuse"], "--layout")
    given.setdefault("experts", ask.experts(given.get("expert_tp", 1), given.get("determinism", "off")))
    given.setdefault("collectives", ask.collectives)
    given.setdefault("ep_method", ask.ep_method(given.get("ep", 1)))
    given.setdefault("attention", _attention(ask, given))
    if budget_of(str(given.get("recompute", ""))):
        del given["recompute"]
    given = {name: value for name, value in given.items() if name not in EDITS} | edits_of(given)
    settle = Settle(open=frozenset({"dp"} - given.keys()))
    case = settle(
        Case(
            model=ask.model, layout=Layout(**given), sequence_length=ask.sequence_length,
            global_batch_size=ask.global_batch_size, world=ask.cluster.gpus,
        ).with_accumulation_steps()
    )  # fmt: skip
    return case, settle


def _attention(ask: Ask, given: Mapping[str, Any]) -> AttentionKernel:
    return ask.attention(given.get("cp", 1), given.get("cp_method", "all_gather"), given.get("determinism", "off"))


def exact(ask: Ask, settings: Mapping[str, Values]) -> Layout:
    """The one layout of these settings, checked."""
    case, settle = case_of(ask, settings)
    _check(ask, case, settle, "--layout")
    with errors_for("--layout"):
        check_op_names(case.layout)
    check_kernels(ask, case.layout, "--layout")
    c, tp = ask.cluster, case.layout.tp
    if not ask.tp_across_nodes and crosses_node(tp, c.gpus, c.gpus_per_node):
        allowed = ", ".join(str(n) for n in divisors(c.gpus_per_node) if c.gpus % n == 0)
        raise BadInput("LAYOUT", CROSSES, where="--layout", found=f"tp = {tp} on nodes of {c.gpus_per_node}",
                       allowed=f"tp = {allowed}", fix="--tp-across-nodes")  # fmt: skip
    return case.layout


def check_step(ask: Ask) -> None:
    """Refuse what is illegal in every layout: an illegal model, or sequences longer than its table of positions."""
    case = Case(model=ask.model, layout=Layout(), sequence_length=ask.sequence_length)
    _check(ask, case, Settle(), ask.model.name)


def _check(ask: Ask, case: Case, settle: Settle, where: str) -> None:
    found = problems(
        case.model, case.layout, case.sequence_length, global_batch_size=case.global_batch_size, world=case.world,
        settle=settle,
    )  # fmt: skip
    if not found:
        return
    lay, (first, changes) = case.layout, (found[0], repair(case, settle))
    fused_by_default = lay.fuse == ask.fuse(lay.tp, lay.elementwise)
    for setting, value in changes.items():
        case = case.put(setting, value)
    case = settle(case)
    if fused_by_default:
        case = case.put("fuse", ask.fuse(case.layout.tp, case.layout.elementwise))
    fixes = [f"--layout {ask.text(case.layout)}"] if changes.keys() & {*LAYOUT_SETTINGS} else []
    if "sequence_length" in changes:
        fixes.append(f"--seq {changes['sequence_length']}")
    if "global_batch_size" in changes:
        fixes.append(f"--batch {changes['global_batch_size']}seqs")
    if "vocab_size" in changes:
        fixes.append(f"a config.json with vocab_size {changes['vocab_size']}")
    allowed = ", ".join(map(str, first.allowed))
    raise BadInput("LAYOUT", first.what, where=where, found=first.found, allowed=allowed, fix=" ".join(fixes))


def _no_such(n: int, most: int) -> BadInput:
    return BadInput("NUMBER", "no layout of that number", where="--why", found=n, allowed=f"1 to {most}",
                    fix=f"--why {most}")  # fmt: skip


def _most_first(refused: Counter[str]) -> dict[str, int]:
    return dict(sorted(refused.items(), key=lambda item: (-item[1], item[0])))
