"""Where a step of our side of `beside_torchtitan.py` waits: a few more steps under torch's profiler, after those that
are timed. They are read as `penteract profile` reads them. The field `profile` of a run has

steps     how many were profiled; `step_ms`: their mean; `took_s`: seconds that all of this needed
rank      whose measurements follow: of the pipeline rank that is planned to end last, the one with the most work
idle      share of its step in which nothing ran on the device; `idle_ms`, and what is planned (`planned_idle_ms`). The
          profiler slows the host, so without it there is less
exposed   for each axis: milliseconds of the step in which a collective ran and nothing computed (`measured_ms`), in
          which the planned step waits for one (`planned_ms`), and that compute is planned to take longer because one
          runs beside it (`planned_slower_ms`; measured, that is in the times of products). `idle_ms`: of the idle
          time, when the host had asked in time for what came next, behind a wait for a collective: where ranks read
          each other's memory, no kernel waits until they may. "update" has the ranks' agreement on the norm, in which
          a rank also waits for those that are late
ranks     the same measurements of each rank; `work_ms`: of its own kernels
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from penteract.config.hardware import Cluster
from penteract.engine.data import Samples
from penteract.engine.session.trainer import Trainer
from penteract.measure.profile.analyse.attribution import GAPS, OWN, moments, rank_parts, split_evenly
from penteract.measure.profile.analyse.op_rows import MeasuredRank, slowest_of_pp_rank
from penteract.measure.profile.prediction import Prediction, part_of, pp_rank_of, predict
from penteract.measure.profile.record.steps import TrainedSteps, profiled
from penteract.measure.profile.recording import Recording
from penteract.measure.profile.trace_events import WAITING
from penteract.readings.time.timelines.trace import kind

SECONDS = 6.0  # that steps under the profiler may take, beside which it starts and writes its file
WAITED = ("collective", "wait")  # kinds of a moment in which compute waits: on a GPU, on a CPU
SLOWER = ("tensor", "context", "expert", "pipeline", "data")  # parts that the plan also gives what they slow
Exposed = Mapping[str, int]  # part -> picoseconds of a step
OfRank = tuple[MeasuredRank, Exposed, Exposed]  # what it waits for while a collective runs, and while nothing does


def steps_to_profile(step_ms: float, most: int) -> tuple[int, int]:
    """How many steps to profile, and how many to run before with names alone. One that is profiled is not read: it
    says when the next begins. Of long steps there is one, though that takes longer than `SECONDS`."""
    fit = int(1e3 * SECONDS / step_ms)
    return max(1, min(most, fit - 2)), int(fit >= 3)


def measured_waits(recording: Recording, name_part: Callable[[str], str]) -> dict[str, int]:
    """Picoseconds of the mean profiled step in which a collective runs and nothing computes, by part."""
    found = Counter[str]()
    for step in recording.steps:
        for moment in moments(step, name_part, on_device=recording.on_device):
            if moment.kind in WAITED:
                found[moment.part] += moment.end - moment.begin
    return split_evenly(found, len(recording.steps))


def idle_waits(recording: Recording, name_part: Callable[[str], str]) -> dict[str, int]:
    """Picoseconds of the mean profiled step in which nothing runs because compute waits, by the part of what it waits
    for: the host has asked for what comes next, and between that and what ran before it called for a wait."""
    found = Counter[str]()
    for step in recording.steps if recording.on_device else ():
        calls = [span for span in step.spans if span.kind == "call"]
        ran = [span for span in step.spans if span.kind != "call"]  # both are sorted
        begins, waits = [span.begin for span in ran], [call for call in calls if call.name.startswith(WAITING)]
        waited = [call.begin for call in waits]
        for gap in moments(step, name_part, on_device=True):
            at = bisect_left(begins, gap.end)
            if gap.kind is not None or at == len(ran):
                continue
            after, took = ran[at], gap.end - max(gap.begin, ran[at].asked)
            computed = (ran[i].asked for i in range(at - 1, -1, -1) if ran[i].kind == "compute")
            before = next(computed, after.asked)
            call = bisect_right(waited, after.asked) - 1
            if took > 0 and after.kind == "collective":
                found[name_part(after.name)] += took
            elif took > 0 and call >= 0 and waited[call] > before:
                found[name_part(waits[call].name)] += took
    return split_evenly(found, max(1, len(recording.steps)))


def planned_waits(plan: Prediction) -> tuple[Exposed, Exposed]:
    """Picoseconds by part, of the pipeline rank that ends last: of waits for collectives and messages, and by how much
    these slow what runs beside them, which a plan counts as theirs too."""
    waits, all_events = Counter[str](), Counter[str]()
    for e in plan.events:
        if e.pp_rank == plan.slowest and e.stream == "compute":
            part = part_of(e.name, plan.parts)
            all_events[part] += e.end - e.start
            if kind(e) == "wait":
                waits[part] += e.end - e.start
    slower = {part: plan.totals.get(part, 0) - all_events[part] for part in SLOWER}
    return {part: took for part, took in waits.items() if part != "host"}, slower


def profile_steps(
    trainer: Trainer, samples: Samples, gpus: Cluster, *, done: int, step_ms: float, most: int
) -> dict[str, Any]:
    """The field `profile`, on every rank. `done`: steps that are trained; `step_ms`: of one, the same on all ranks;
    `most`: of the steps to profile. All ranks take part."""
    begun, rank = time.perf_counter(), trainer.rank
    steps = TrainedSteps(trainer, samples)
    steps.done = done
    count, warm = steps_to_profile(step_ms, most)
    recorded = profiled(steps, count=count, warm=warm, barrier=rank.barrier)
    plan = predict(trainer.spec, gpus)
    found = Recording(rank.number, pp_rank_of(trainer.spec, rank.number), rank.device.type == "cuda", {}, [], recorded)
    name_part = partial(part_of, parts=plan.parts)
    parts, waits = rank_parts(found, name_part), (measured_waits(found, name_part), idle_waits(found, name_part))
    found.steps = []  # too many to send
    ranks: list[OfRank] = rank.gather((MeasuredRank(found, parts), *waits))
    return {"steps": count, "took_s": round(time.perf_counter() - begun, 1), **summary(plan, ranks)}


def summary(plan: Prediction, ranks: Sequence[OfRank]) -> dict[str, Any]:
    """What `profile` says beside the number of steps and their time."""
    chosen = slowest_of_pp_rank([rank for rank, *_ in ranks], plan.slowest)
    waits, idle = next(waits for rank, *waits in ranks if rank is chosen)
    planned, slower = planned_waits(plan)
    step = sum(chosen.parts.values())
    exposed = {
        part: {"measured_ms": _ms(waits.get(part, 0)), "planned_ms": _ms(planned.get(part, 0)),
               "planned_slower_ms": _ms(slower.get(part, 0)), "idle_ms": _ms(idle.get(part, 0))}
        for part in sorted({*waits, *idle, *planned, *slower})
    }  # fmt: skip
    return {
        "step_ms": _ms(step), "rank": chosen.recording.rank, "idle": round(chosen.parts.get(GAPS, 0) / step, 5),
        "idle_ms": _ms(chosen.parts.get(GAPS, 0)), "planned_idle_ms": _ms(plan.totals.get(GAPS, 0)),
        "exposed": {part: row for part, row in exposed.items() if any(row.values())},
        "ranks": [
            {"rank": rank.recording.rank, "pp_rank": rank.recording.pp_rank, "step_ms": _ms(sum(rank.parts.values())),
             "work_ms": _ms(rank.work - sum(own.get(part, 0) for part in OWN)), "idle_ms": _ms(rank.parts.get(GAPS, 0)),
             "exposed_ms": {part: _ms(took) for part, took in own.items()}}
            for rank, own, _ in ranks
        ],
    }  # fmt: skip


def _ms(picoseconds: int) -> float:
    return round(picoseconds / 1e9, 3)


def limit_of(step_ms: float, most: int) -> float:
    """Seconds after which profiling hangs: a multiple of what its steps need, and what it needs beside them."""
    return 40 + 4 * (sum(steps_to_profile(step_ms, most)) + 1) * step_ms / 1e3


@contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """End this process if what is within takes longer: ranks that wait for one that failed would do so for minutes."""
    timer = threading.Timer(seconds, os._exit, (1,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
