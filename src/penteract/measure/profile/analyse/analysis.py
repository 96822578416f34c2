"""From the recordings of all ranks and the prediction to a profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median_low

from penteract.config.run import RunSpec
from penteract.measure.profile.analyse.advice import advice
from penteract.measure.profile.analyse.attribution import own_work, rank_parts
from penteract.measure.profile.analyse.op_rows import MeasuredRank, op_rows, unmatched
from penteract.measure.profile.analyse.step_timeline import step_timeline
from penteract.measure.profile.analyse.verdict import verdict
from penteract.measure.profile.prediction import Prediction, part_of
from penteract.measure.profile.recording import Recording
from penteract.measure.schemas.profile import (
    VERSION,
    Basis,
    MeasuredMemory,
    ProfiledRunFile,
    ProfileFile,
    RankRow,
    StepTimes,
)
from penteract.model.count import parameters
from penteract.planner.ask import as_text


def read_recordings(folder: Path, run: RunSpec) -> list[Recording]:
    """The recordings of all ranks of a run."""
    return [Recording.read(folder, rank) for rank in range(run.layout.world)]


def analyse(file: str, predicted: Prediction, recordings: Sequence[Recording], basis: Basis) -> ProfileFile:
    """The profile. `file`: the run file's name."""
    name_part = partial(part_of, parts=predicted.parts)
    ranks = [MeasuredRank(recording, rank_parts(recording, name_part)) for recording in recordings]
    times = step_times(predicted, recordings)
    rows = op_rows(predicted, ranks, times["measured"], basis["ceilings"])
    found = verdict(predicted, ranks, times)
    return {
        "version": VERSION, "kind": "profile", "run": _run(file, predicted.run), "made": recordings[0].made,
        "basis": basis, "step": times, "waterfall": found.rows, "advice": advice(predicted, found.rows, rows),
        "ops": rows, "unmatched": unmatched(rows, predicted.slowest, times["measured"], predicted.step),
        "ranks": [_rank(r) for r in ranks], "memory": [_memory(predicted, r) for r in recordings],
        "timeline": step_timeline(predicted, recordings),
    }  # fmt: skip


def step_times(predicted: Prediction, recordings: Sequence[Recording]) -> StepTimes:
    """How long steps took: of each step, on the rank that took longest."""
    bare = [1000 * max(took) for took in zip(*(r.bare for r in recordings), strict=True)]
    steps = zip(*(r.steps for r in recordings), strict=True)
    under = [1000 * max(step.nanoseconds for step in some) for some in steps]
    measured = median_low(bare)
    return {
        "bare": bare, "measured": measured, "profiled": under, "slowdown": median_low(under) / measured,
        "predicted": predicted.step, "ideal": predicted.ideal,
    }  # fmt: skip


def _run(file: str, run: RunSpec) -> ProfiledRunFile:
    layout = run.layout
    return {
        "file": file, "model": run.model.name, "parameters": parameters(run.model).total, "layout": asdict(layout),
        "text": as_text(layout, usual=layout),
        "sequence_length": run.sequence_length,
        "precision": run.precision.policy.name, "tokens": run.tokens_per_step, "world": layout.world,
    }  # fmt: skip


def _rank(r: MeasuredRank) -> RankRow:
    step, work = sum(r.parts.values()), own_work(r.parts) + r.parts.get("launch", 0)
    parts = {name: size for name, size in r.parts.items() if size}
    return {"rank": r.recording.rank, "pp_rank": r.recording.pp_rank, "step": step, "work": work, "waits": step - work,
            "parts": parts}  # fmt: skip


def _memory(predicted: Prediction, recording: Recording) -> MeasuredMemory:
    assert recording.memory is not None, "every rank counts its memory"
    price = predicted.prices.composer.rank(predicted.run.layout, recording.pp_rank)
    planned = {**price.resident, "activations": price.arena + price.routed, "workspace": price.workspace}
    return {**recording.memory, "predicted": price.allocated,
            "planned": {owner: size for owner, size in planned.items() if size}}  # fmt: skip
