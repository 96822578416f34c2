"""The nearest legal layout: a search over values near the given ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from penteract.config.files.keys import keys
from penteract.config.layout import ATTENTION_KERNELS, CP_METHODS, EVERY_FUSION, MOST_MICRO_BATCHES, ZERO_STAGES, Layout
from penteract.config.rules.breaches import CHOICES, breaches
from penteract.config.rules.case import KEYS, OF_A_PART, Case
from penteract.config.rules.settle import Settle
from penteract.schedule.registry import SCHEDULES, schedule_of

# Degrees to try. Some models have legal degrees beyond these, but never near a mistake.
_DEGREES = (*range(1, 129), *range(136, 1025, 8))
_SIZES = ("vocab_size", "loss_chunk", "high_frequency_factor", "fast_rotations", "sequence_length",
          "global_batch_size")  # fmt: skip
_FURTHER = 16  # values tried after the first suitable one, to avoid a second change
_ROUNDS = 24
_PLAIN = {"ep": 1, "expert_tp": 1, "last_stage_less_layers": 0, "vpp": 1, "schedule": Layout().schedule, "cp": 1,
          "pp": 1, "tp": 1,          "micro_batch_size": 1, "zero": 0, "shard_group": 0, "reduce_scatter_once": False,
          "reshard_after_step": False}  # fmt: skip


def allowed_values(case: Case, setting: str, settle: Settle) -> tuple[Any, ...]:
    """Up to three values of `setting`, nearest first, with which no rule finds it at fault."""
    fine = (v for v in _candidates(case, setting, settle) if setting not in _blamed(settle(case.put(setting, v))))
    return tuple(islice(fine, 3))


def repair(case: Case, settle: Settle) -> dict[str, Any]:
    """setting -> value: few changes that make `case` legal, as near as possible; empty if the search finds none."""
    fixed = _search(case, settle) or _search(_plain(case, settle), settle)
    return _difference(case, fixed, settle.open) if fixed else {}


def _search(case: Case, settle: Settle) -> Case | None:
    """Repair the first broken rule until none is broken; None if no nearby value satisfies a rule."""
    for _ in range(_ROUNDS):
        found = breaches(case)
        if not found:
            return case
        better = _step(case, found[0][0], settle)
        if better is None:
            return None
        case = better
    return None


def _step(case: Case, setting: str, settle: Settle) -> Case | None:
    """`case` with the nearest value of `setting` that is not at fault, or a further one that makes it legal."""
    trials = (settle(case.put(setting, value)) for value in _candidates(case, setting, settle))
    nearest: Case | None = None
    for trial in trials:
        blamed = _blamed(trial)
        if not blamed:
            return trial
        if setting not in blamed:
            nearest = trial
            break
    return next((trial for trial in islice(trials, _FURTHER) if not _blamed(trial)), nearest)


def _plain(case: Case, settle: Settle) -> Case:
    """Data parallelism only, with a batch that its replicas divide: from here every rule can be satisfied."""
    now = case.put("dp", case.world or 1)
    for setting, value in _PLAIN.items():
        now = now.put(setting, value)
    for setting, least in (("gradient_accumulation_steps", 1), ("bucket_bytes", 0), ("sequence_length", 1)):
        now = now.put(setting, max(least, now.get(setting)))
    if now.global_batch_size is not None:
        now = now.put("global_batch_size", max(1, now.global_batch_size // now.layout.dp) * now.layout.dp)
    return settle(now)


def _blamed(case: Case) -> set[str]:
    return {setting for setting, _ in breaches(case)}


def _difference(asked: Case, now: Case, derived: frozenset[str]) -> dict[str, Any]:
    if asked.global_batch_size is not None:
        derived |= {"gradient_accumulation_steps"}
    return {
        setting: now.get(setting)
        for setting in KEYS
        if setting not in derived and not (setting in OF_A_PART and asked.part(setting) is None)
        if (setting != "global_batch_size" or asked.global_batch_size is not None)
        and now.get(setting) != asked.get(setting)
    }


def _candidates(case: Case, setting: str, settle: Settle) -> Iterator[Any]:
    """Other values of `setting`, nearest first: by ratio for degrees, by difference for sizes."""
    found, lay = case.get(setting), case.layout
    if setting == "schedule":
        made_for_chunks = [s.name for s in SCHEDULES.values() if s.min_vpp > 1] if lay.vpp > 1 else []
        return _others(SCHEDULES, found, *made_for_chunks)
    if setting == "cp_method":
        return _others(CP_METHODS, found)
    if setting in ("qk_norm", "reduce_scatter_once", "reshard_after_step"):
        return iter([not found])
    if setting in _SIZES:
        return _of_sizes(case, setting, settle)
    if setting == "zero":
        return iter(sorted(ZERO_STAGES, key=lambda stage: abs(stage - found)))
    if setting == "last_stage_less_layers":
        return reversed(range(max(0, min(found, case.model.layers))))
    if setting == "shard_group":
        return (n for n in (*_divisors(lay.dp * lay.cp, found), 0) if n != found)
    if setting in ("ep_method", "expert_rows", "loss", "elementwise", "experts", "collectives", "determinism"):
        return iter([v for v in CHOICES[setting][0] if v != found])
    if setting == "fuse":
        return iter([tuple(name for name in EVERY_FUSION if name in found)])
    if setting == "attention":
        return iter([v for v in reversed(ATTENTION_KERNELS) if v != found])  # torch's, then others'
    if setting == "capacity_percent":
        return iter([Layout().capacity_percent, 100])
    if setting == "dp" and case.world is not None:
        return iter([max(1, case.world // max(1, lay.tp * lay.pp * lay.cp))])
    if setting == "head_size" and case.model.latent:
        return iter([case.model.latent.plain_size + case.model.latent.rope_size])
    others = (v for v in _DEGREES if v != found)
    return iter(sorted(others, key=lambda v: abs(math.log(v / max(1, found)))))


def _of_sizes(case: Case, setting: str, settle: Settle) -> Iterator[Any]:
    """Other values of a size that is no degree: multiples of what has to divide it, or what follows from another."""
    found, lay, model = case.get(setting), case.layout, case.model
    if setting == "vocab_size":
        return iter([math.ceil(found / lay.tp) * lay.tp])
    if setting == "loss_chunk":
        return iter([0])
    if model.rope_scaling and setting in ("high_frequency_factor", "fast_rotations"):
        low, slow = model.rope_scaling.low_frequency_factor, model.rope_scaling.slow_rotations
        return iter([4 * low if setting == "high_frequency_factor" else 32 * slow])
    most = int(keys()[KEYS[setting]].most)
    if setting == "sequence_length":
        most = min(most, model.max_positions) if model.positions == "learned" else most
        return _multiples(found, (2 * lay.cp if lay.cp > 1 else 1) * lay.tp, most)
    micro = 1 if "micro_batch_size" in settle.open else lay.micro_batch_size
    most = min(most, MOST_MICRO_BATCHES * lay.dp * micro)
    return _multiples(found, lay.dp * micro * schedule_of(lay.schedule).round(lay.pp), most)


def _divisors(n: int, near: int) -> list[int]:
    """Divisors of n to try, nearest first."""
    return sorted((d for d in _DEGREES if d < n and n % d == 0), key=lambda d: abs(math.log(d / max(1, near))))


def _others(values: Iterable[str], found: str, *fitting: str) -> Iterator[str]:
    """The common ones and those that fit first."""
    common = (Layout().schedule, Layout().cp_method, *fitting)
    return iter(sorted((v for v in values if v != found), key=lambda v: v not in common))


def _multiples(found: int, step: int, most: int) -> Iterator[int]:
    """Multiples of `step` around `found`, nearest first, none above `most`."""
    step = max(1, step)
    limit = min(found, most)
    near = {limit // step * step, limit // step * step + step}
    fine = (v for v in near if 1 <= v <= most and v != found)
    return iter(sorted(fine, key=lambda v: (abs(v - found), v)))
