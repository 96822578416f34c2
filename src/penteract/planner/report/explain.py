"""Why this layout: the Ultra-Scale Playbook's three steps (fit, reach the batch, speed up), with estimates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from penteract.config.layout import Layout
from penteract.config.precision.policy import Policy
from penteract.planner.ask import EDITS, LAYOUT_SETTINGS, Ask, as_settings, as_shown
from penteract.planner.plan import Plan
from penteract.planner.search.best import Timed
from penteract.planner.space.effort import effort
from penteract.planner.space.legality import Legality
from penteract.readings.ideal import PART_NAMES
from penteract.units import Seconds, show_bytes, show_pace, show_step, show_whole

_IDLE = 0.05  # of a step, in which pipeline ranks wait: a larger batch would spare most of it
_SIMPLER = 3  # simpler layouts that do not fit: how many are shown
_LESS = 0.8  # a leaner layout needs at most this fraction of the chosen one's memory
_DEGREES = ("dp", "tp", "pp", "cp", "ep", "expert_tp")
_SHARDING = ("zero", "shard_group", "reduce_scatter_once", "reshard_after_step")
_SHOWN = 0.0005  # of a step: what 0.1 % is rounded from
_NEGLIGIBLE = 0.005  # of a step: smaller differences are not shown


@dataclass(frozen=True, slots=True)
class Move:
    """One change on the way from the simplest layout that fits to the chosen one."""

    what: str
    before: Timed
    after: Timed

    def text(self) -> str:
        """The move as one line: how much faster, the seconds before and after, and the change in memory."""
        was, now = self.before.time.seconds, self.after.time.seconds
        grown = self.after.estimate.allocated - self.before.estimate.allocated
        memory = f"{show_bytes(abs(grown))} {'more' if grown > 0 else 'less'}" if grown else "the same memory"
        return (
            f"{self.what}: {_faster(was, now)} "
            f"({show_step(was)} -> {show_step(now)}{_mostly(self.before, self.after)}), {memory}"
        )


@dataclass(frozen=True, slots=True)
class Explanation:
    """Sentences by step. `rival`: the comparison with the best layout, or with the best of another mesh; `leaner`: with
    the best that needs less memory. `precision`: of all moves, if several were asked for."""

    fit: str
    batch: str
    moves: tuple[Move, ...]
    rival: str
    leaner: str
    precision: str = ""

    def lines(self) -> list[str]:
        """The whole explanation, one sentence per line."""
        head = f"Speed in {self.precision}" if self.precision else "Speed"
        speed = [f"{head}: {move.text()}." for move in self.moves]
        speed = speed or [f"{head}: the simplest layout that fits is the fastest."]
        return [line for line in (self.fit, self.batch, *speed, self.rival, self.leaner) if line]


def explain(plan: Plan, chosen: Timed) -> Explanation:
    """Explain the rank of `chosen`, one of the plan's layouts."""
    simplest = plan.search.timed(plan.search.simplest(chosen.estimate.precision))
    return Explanation(
        fit=_fit(plan, simplest),
        batch=_batch(plan, chosen),
        moves=tuple(_moves(plan, simplest, chosen)),
        rival=_rival(plan, chosen),
        leaner=_leaner(plan, chosen),
        precision=chosen.estimate.precision.name if plan.ask.also else "",
    )


def contest(plan: Plan, chosen: Timed) -> tuple[Timed, Timed] | None:
    """(faster, slower): the best and `chosen`; if `chosen` is the best, it and the best layout of another mesh."""
    if chosen.estimate != plan.best.estimate:
        return plan.best, chosen
    found = plan.search.best(1, among=lambda q: mesh(q.layout) != mesh(chosen.layout))
    return (chosen, found[0]) if found else None


def unlisted(plan: Plan) -> list[tuple[Policy, Timed | None]]:
    """Each precision that is asked for and has no row in the table, with its fastest layout; None: none fits. A search
    that was stopped is not continued for that."""
    listed = {one.estimate.precision for one in plan.layouts}
    found = list[tuple[Policy, Timed | None]]()
    for own in (ask.precision for ask in plan.ask.each if plan.complete and listed):
        if own not in listed:
            best = plan.search.best(1, among=lambda q, own=own: q.precision == own)
            found.append((own, best[0] if best else None))
    return found


def best_in_others(plan: Plan) -> list[str]:
    """Of each precision without a row in the table: its fastest layout, and how far behind it is."""
    return [f"In {own.name}: {_behind(plan, one) if one else 'no layout fits'}" for own, one in unlisted(plan)]


def _behind(plan: Plan, one: Timed) -> str:
    text, step = plan.ask.text(one.layout, one.estimate.precision), one.time.seconds
    rate = f"{show_whole(plan.rate(one))} tok/s/{plan.ask.devices()}"
    speed = f"{show_bytes(one.estimate.allocated)}, {rate}, {show_step(step)} a step"
    return f"{text} is the fastest, with {speed}, {how_much_slower(plan.best.time.seconds, step, '#1')}"


def mesh(layout: Layout) -> tuple[int, ...]:
    """The degrees that decide which ranks communicate."""
    return layout.dp, layout.tp, layout.pp, layout.cp, layout.ep, layout.expert_tp


def difference(a: Timed, b: Timed) -> list[tuple[str, Seconds]]:
    """How much longer each part of the step is in `b` than in `a` (negative: shorter), the largest first."""
    parts = {**a.time.parts, **b.time.parts}
    found = [(part, b.time.parts.get(part, 0.0) - a.time.parts.get(part, 0.0)) for part in parts]
    shown = [(part, s) for part, s in found if abs(s) > _NEGLIGIBLE * a.time.seconds]
    return sorted(shown, key=lambda item: -abs(item[1]))


def _fit(plan: Plan, timed: Timed) -> str:
    """The simplest layout that fits, and why simpler ones do not."""
    ask, simplest = plan.ask, timed.estimate
    need = f"{show_bytes(simplest.allocated)} a {ask.devices()}"
    limit = f" of {show_bytes(ask.usable)} usable" if ask.usable else ""
    least = f"Fit: {named(plan, timed)} is the simplest that fits, with {need}{limit}"
    most = effort(simplest.layout)
    simpler = [m for m in plan.missed if effort(m.layout) < most and m.precision == simplest.precision]
    first = sorted(simpler, key=lambda m: effort(m.layout))[:_SIMPLER]
    prices = plan.search.estimators[simplest.precision]
    reasons = [
        f"{ask.text(m.layout, m.precision)} needs {show_bytes(prices.estimate(m.layout).allocated)}" for m in first
    ]
    if not reasons and simplest.layout.dp < ask.cluster.gpus:
        legality = Legality(ask.model, ask.sequence_length, ask.global_batch_size)
        why = legality.batch(ask.cluster.gpus, 1, max(1, ask.global_batch_size // ask.cluster.gpus))
        reasons = [f"dp={ask.cluster.gpus} is not possible: {why}{_divided_batches(ask)}"] if why else []
    return f"{least}; {'; '.join(reasons)}." if reasons else f"{least}."


def _divided_batches(ask: Ask) -> str:
    """The batches next to this one that all GPUs can share by data parallelism alone; "" if this one is."""
    batch, gpus = ask.global_batch_size, ask.cluster.gpus
    if batch % gpus == 0:
        return ""
    near = [n * gpus for n in (batch // gpus, batch // gpus + 1) if n]
    return f" (--batch {' or '.join(f'{n}seqs' for n in near)} {'allows' if len(near) == 1 else 'allow'} dp={gpus})"


def _larger_batch(plan: Plan, chosen: Timed, bubble: float) -> str:
    """Where the batch is what limits: fewer sequences than GPUs, which then must share them, or too few micro-batches
    to keep pipeline ranks busy. Other losses do not shrink with the batch as these do."""
    ask, each = plan.ask, plan.ask.global_batch_size / plan.ask.cluster.gpus
    if each >= 1 and bubble < _IDLE:
        return ""
    of = ask.devices()
    share = f", fewer than one, so that {ask.devices(2)} share sequences" if each < 1 else ""
    return f". The batch is {each:.3g} sequences a {of}{share}; a larger --batch would fill more of the step"


def _batch(plan: Plan, chosen: Timed) -> str:
    lay, ask = chosen.layout, plan.ask
    product = f"dp {lay.dp} × micro-batch {lay.micro_batch_size} × {_accumulation(lay.gradient_accumulation_steps)}"
    text = f"Reach the batch: {ask.global_batch_size} sequences a step = {product}"
    bubble = chosen.time.parts.get("pipeline", 0.0) / chosen.time.seconds
    if lay.pp > 1:
        keep = "micro-batch keeps" if lay.gradient_accumulation_steps == 1 else "micro-batches keep"
        text += f"; {lay.gradient_accumulation_steps} {keep} {lay.pp} pipeline ranks busy but for {bubble:.1%}"
    return f"{text}{_larger_batch(plan, chosen, bubble)}."


def _accumulation(steps: int) -> str:
    return f"{steps} accumulation {'step' if steps == 1 else 'steps'}"


def _moves(plan: Plan, simplest: Timed, chosen: Timed) -> Iterator[Move]:
    """From the simplest to the chosen layout, one change at a time: each time the one that helps most."""
    now, goal, how = simplest, chosen.layout, chosen.estimate.precision
    while now.layout != goal:
        tried = [(what, plan.search.find(lay, how)) for what, lay in _steps(plan, now.layout, goal)]
        timed = [(what, plan.search.timed(q)) for what, q in tried if q]
        what, after = min(
            timed, key=lambda t: t[1].order, default=(f"{changed_settings(now.layout, goal)} together", chosen)
        )
        yield Move(what, now, after)
        now = after


def _steps(plan: Plan, now: Layout, goal: Layout) -> Iterator[tuple[str, Layout]]:
    """Single changes of `now` towards `goal`; the accumulation steps follow the batch."""
    changes = {
        "mesh": {k: getattr(goal, k) for k in (*_DEGREES, "ep_method")},
        "schedule": {"schedule": goal.schedule, "vpp": goal.vpp},
        "stages": {"last_stage_less_layers": goal.last_stage_less_layers},
        "pipeline": {
            k: getattr(goal, k) for k in (*_DEGREES, "ep_method", "schedule", "vpp", "last_stage_less_layers")
        },
        "cp_method": {"cp_method": goal.cp_method},
        "micro": {"micro_batch_size": goal.micro_batch_size},
        "zero": {k: getattr(goal, k) for k in _SHARDING},
        "recompute": {k: getattr(goal, k) for k in EDITS},
        "memory": {k: getattr(goal, k) for k in (*_SHARDING, *EDITS)},
    }
    for change in changes.values():
        after = replace(now, **change)
        steps = plan.ask.global_batch_size // (after.dp * after.micro_batch_size)
        after = replace(after, gradient_accumulation_steps=steps)
        if after != now:
            yield changed_settings(now, after), after


def changed_settings(now: Layout, after: Layout) -> str:
    """The changed settings, each with its old and new value. A setting that is not in the text has its default."""
    plain, was, now_ = as_settings(Layout(loss=now.loss)), as_shown(now), as_shown(after)
    settings = [name for name in LAYOUT_SETTINGS if was.get(name, plain.get(name)) != now_.get(name, plain.get(name))]
    return ", ".join(f"{name} {_word(was, plain, name)} -> {_word(now_, plain, name)}" for name in settings)


def _word(settings: Mapping[str, Any], plain: Mapping[str, Any], name: str) -> str:
    usual = "false" if getattr(Layout(), name, None) is False else "default"
    return str(settings.get(name, plain.get(name, usual))).lower()


def _rival(plan: Plan, chosen: Timed) -> str:
    two = contest(plan, chosen)
    if two is None:
        return ""
    first, second = two
    parts = ", ".join(f"{PART_NAMES[part]} {show_step(s, '+')}" for part, s in difference(first, second)[:4])
    other = "The fastest with other degrees (dp, tp, pp, cp, ep)"
    who = f"{other}: {named(plan, second)}" if first is chosen else f"The best is {named(plan, first)}; this"
    slower = how_much_slower(first.time.seconds, second.time.seconds, verb=True)
    sentence = f"{who} {slower}" + (f": {parts}" if parts else "")
    return sentence + (f"; {needs}." if (needs := _needs(second.layout)) and first is chosen else ".")


def named(plan: Plan, timed: Timed) -> str:
    """A layout as text, with its precision if there are several."""
    own = timed.estimate.precision
    return plan.ask.text(timed.layout, own) + (f" in {own.name}" if plan.ask.also else "")


def _needs(layout: Layout) -> str:
    """The ZeRO stage and the recomputation without which a layout does not fit. The search lists ZeRO 2 and 3, and
    recomputation, only if they are needed."""
    needs = [f"ZeRO {layout.zero}"] if layout.zero > 1 else []
    if (name := as_shown(layout)["recompute"]) != "none":
        every = f" in every {_ordinal(layout.recompute_every)} layer" if layout.recompute_every > 1 else ""
        needs.append(f"recompute {name}{every}")
    return f"it fits only with {' and '.join(needs)}" if needs else ""


def _leaner(plan: Plan, chosen: Timed) -> str:
    most = _LESS * chosen.estimate.allocated
    found = plan.search.best(1, among=lambda q: q.allocated <= most, slower_too=True)
    if not found:
        return "With less memory: no layout needs a fifth less."
    there = found[0]
    slower = how_much_slower(chosen.time.seconds, there.time.seconds, verb=True)
    allocated, spared = there.estimate.allocated, chosen.estimate.allocated - there.estimate.allocated
    need = f"{show_bytes(allocated)}, {show_bytes(spared)} less"
    return f"With less memory: {named(plan, there)} needs {need}, and {slower}."


def how_much_slower(first: Seconds, second: Seconds, whom: str = "", *, verb: bool = False) -> str:
    """How much slower the second is than the first, `whom`: to what a sentence shows. `verb`: with "is" or "takes"."""
    if abs(second / first - 1) < _SHOWN:
        return f"{'is ' * verb}as fast{f' as {whom}' * bool(whom)} to 0.1%"
    return show_pace(second / first, whom, verb=verb)


def _ordinal(n: int) -> str:
    words = {2: "second", 3: "third", 4: "fourth", 5: "fifth", 6: "sixth", 7: "seventh", 8: "eighth"}
    return words.get(n, f"{n}th")


def _faster(was: Seconds, now: Seconds) -> str:
    return "as fast" if abs(was - now) / was < _NEGLIGIBLE else show_pace(now / was)


def _mostly(before: Timed, after: Timed) -> str:
    """The part of the step that changed most."""
    parts = difference(before, after)
    return f"; {PART_NAMES[parts[0][0]]} {show_step(parts[0][1], '+')}" if parts else ""
