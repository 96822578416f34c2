"""What a run may not change when it goes on, and how it is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from faults.test_saved_state import session
from penteract.config.layout import Layout
from penteract.config.resolve.presets import TINY, TINY_MOE
from penteract.config.resolve.resolved_run import resolve
from penteract.config.run import LearningRateSchedule, Optimizer, Precision, RunSpec, Training
from penteract.engine import checkpoint
from penteract.engine.dtypes import dtype_of
from penteract.engine.session.resume import (
    check_resume,
    other_precision,
    other_rate,
    other_update,
    resume_settings,
    stays_on_cpus,
)
from penteract.errors import BadInput
from penteract.step.learning_rate import rate
from penteract.units import show_path

SPEC = RunSpec(model=TINY, layout=Layout(), sequence_length=64, train=Training(steps=9))


def check(kept: RunSpec, now: RunSpec, folder: Path, *, unsaid: str = "") -> None:
    """Three steps of `kept`, saved without saying `unsaid`; then `now`."""
    extra = {"step": 3, "samples": 12, "layout": {}, **resume_settings(kept)}
    extra.pop(unsaid, None)
    whole = checkpoint.Slice("w", (2,), (0,), torch.zeros(2, dtype=dtype_of("stat", kept.precision.policy)))
    scale = checkpoint.Slice("loss_scale", (2,), (0,), torch.zeros(2, dtype=torch.float64))  # in fp64 in any recipe
    checkpoint.save_alone(folder / "checkpoints", 3, [[whole, scale]], extra)
    check_resume(folder, now)


def test_layout_and_batch_may_change(tmp_path: Path):
    check(SPEC, replace(SPEC, layout=Layout(tp=2, dp=2, micro_batch_size=4)), tmp_path)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (replace(SPEC, sequence_length=32), ["batch.sequence_length", "found 32 / allowed 64"]),
        (replace(SPEC, model=replace(TINY, layers=2)), ["another model.layers ·", "fix: --model.layers 4"]),
        (replace(SPEC, model=replace(TINY, name="other")), ["another model.name ·", 'found "other" / allowed "tiny"']),
        (replace(SPEC, model=TINY_MOE), ["another model.moe.experts (and ", "found 8 / allowed none", "a new run"]),
        (replace(SPEC, train=replace(SPEC.train, steps=3)), ["already that far", "found 3 / allowed > 3"]),
    ],
)
def test_what_may_not_is_one_line(spec: RunSpec, words: list[str], tmp_path: Path):
    with pytest.raises(BadInput) as told:
        check(SPEC, spec, tmp_path)
    line = str(told.value)
    assert [w for w in words if w not in line] == []
    assert "\n" not in line and "None" not in line


def test_a_part_that_was_there_and_is_not(tmp_path: Path):
    with pytest.raises(BadInput, match=r"found none / allowed .* · fix: --model\.moe\."):
        check(replace(SPEC, model=TINY_MOE), SPEC, tmp_path)


BF16 = replace(SPEC, precision=Precision(dtype="bf16", moments="int8"))
FP64 = replace(SPEC, precision=Precision(dtype="fp64"))


def test_another_precision_may_go_on_and_is_told(tmp_path: Path):
    check(SPEC, BF16, tmp_path)
    line = other_precision(resume_settings(SPEC), BF16)
    assert line.startswith("trained in fp32 so far, goes on in bf16, moments int8: ") and "\n" not in line
    assert other_precision(resume_settings(BF16), BF16) == "" == other_precision(resume_settings(SPEC), SPEC)
    old = {key: value for key, value in resume_settings(SPEC).items() if key != "precision"}
    assert other_precision(old, BF16) == ""  # it is not known


def test_a_path_in_the_current_folder_is_told_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert show_path(tmp_path / "runs" / "a") == "runs/a" == show_path(Path("runs/a"))
    assert show_path(tmp_path.parent / "b") == str(tmp_path.parent / "b")
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()  # while a run trains, whose last line it is
    assert show_path(gone / "runs" / "a") == str(gone / "runs" / "a")


def test_a_run_that_stays_on_the_cpu_where_gpus_are_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    resume, there = "penteract train --resume latest", [True]
    on_cpus, anew = (replace(SPEC, precision=Precision(device=device)) for device in ("cpu", "auto"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there[0])
    line = "this run computes on the CPU as when it began; --precision.device auto takes the GPUs"
    assert stays_on_cpus(on_cpus, resume) == line
    assert stays_on_cpus(on_cpus, f"{resume} --precision.device cpu") == "" == stays_on_cpus(anew, resume)
    there[0] = False
    assert stays_on_cpus(on_cpus, resume) == ""


def test_a_resumed_run_tells_its_device_and_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (run := tmp_path / "run").mkdir()
    session(run, "--training.steps=2", "--precision.device=cpu").go()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    caplog.set_level("INFO", logger="penteract")
    session(run, "--training.steps=3", "--precision.device=cpu", resume=True)
    assert "resumed from step 2 of run" in caplog.messages
    assert any(line.startswith("this run computes on the CPU as when it began") for line in caplog.messages)


@pytest.mark.parametrize(
    ("kept", "now", "words"),
    [
        (SPEC, FP64, "found fp64 / allowed all but fp64 · fix: another --precision.dtype, or"),
        (FP64, BF16, "found bf16, moments int8 / allowed fp64 · fix: --precision.dtype fp64, or"),
    ],
)
def test_fp64_and_the_others_do_not_read_each_others_state(kept: RunSpec, now: RunSpec, words: str, tmp_path: Path):
    for unsaid in ("", "precision"):  # checkpoints did not always say it
        with pytest.raises(BadInput, match="state is saved in fp") as told:
            check(kept, now, tmp_path / unsaid, unsaid=unsaid)
        assert words in str(told.value) and "\n" not in str(told.value)
    check(FP64, FP64, tmp_path / "same")


def test_other_updates_are_told():
    extra = resume_settings(SPEC)
    assert other_update(extra, SPEC) == other_update({}, SPEC) == ""
    decayed = replace(SPEC, optimizer=replace(SPEC.optimizer, weight_decay=0.9, betas=(0.9, 0.99)))
    assert other_update(extra, decayed) == (
        "goes on with other updates than so far: optimizer.betas is [0.9, 0.99], not [0.9, 0.95],"
        " optimizer.weight_decay is 0.9, not 0.1"
    )
    whole = replace(SPEC, data=replace(SPEC.data, pack_documents=not SPEC.data.pack_documents))
    assert "data.pack_documents is" in other_update(extra, whole)


WARM = replace(SPEC, lr_schedule=LearningRateSchedule(warmup_steps=3))
LONGER = replace(WARM, train=replace(SPEC.train, steps=19))


def test_a_schedule_over_more_steps_is_told_with_what_keeps_the_old_one():
    assert other_rate(resume_settings(WARM), LONGER, 10).splitlines() == [
        "learning rate 6.38e-04 at step 10, where the schedule so far had 1.00e-04: its decay ends at step 19, not 9",
        "--learning_rate.decay_end 9 keeps the schedule so far",
    ]
    kept = replace(LONGER, lr_schedule=replace(WARM.lr_schedule, decay_end=9))
    assert other_rate(resume_settings(WARM), kept, 10) == ""  # as the line says
    longer_still = replace(kept, train=replace(SPEC.train, steps=40))
    assert other_rate(resume_settings(kept), longer_still, 20) == ""
    freed = replace(longer_still, lr_schedule=WARM.lr_schedule)
    assert "its decay ends at step 40, not 9\n--learning_rate.decay_end 9 keeps" in other_rate(
        resume_settings(kept), freed, 20
    )


def test_a_rate_that_stays_is_not_told():
    assert other_rate(resume_settings(WARM), WARM, 4) == ""
    assert other_rate(resume_settings(WARM), LONGER, 2) == ""  # warming up
    early = replace(WARM, lr_schedule=LearningRateSchedule(kind="wsd"))
    assert other_rate(resume_settings(early), replace(early, train=LONGER.train), 4) == ""  # before its decay
    assert "had 1.00e-04" in other_rate(resume_settings(early), replace(early, train=LONGER.train), 10)
    old = {key: value for key, value in resume_settings(WARM).items() if key != "rate"}
    assert other_rate(old, LONGER, 10) == ""  # it is not known


def test_another_peak_or_curve_is_told_by_its_key():
    other = replace(
        LONGER, optimizer=Optimizer(learning_rate=1e-4), lr_schedule=LearningRateSchedule(kind="linear", warmup_steps=3)
    )
    assert other_rate(resume_settings(WARM), other, 10).splitlines() == [
        "learning rate 6.06e-05 at step 10, where the schedule so far had 1.00e-04: optimizer.learning_rate is 0.0001, "
        'not 0.001, learning_rate.kind is "linear", not "cosine", its decay ends at step 19, not 9',
        '--optimizer.learning_rate 0.001 --learning_rate.kind "cosine" --learning_rate.decay_end 9 keeps the schedule '
        "so far",
    ]


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("warmup", [0, 3, 9, 12])
def test_what_the_line_says_to_do_keeps_every_rate(kind: Any, warmup: int):
    """Also of a run that ended in its warmup."""
    first = replace(SPEC, lr_schedule=LearningRateSchedule(kind=kind, warmup_steps=warmup))
    now = replace(LONGER, lr_schedule=LearningRateSchedule(kind="linear", warmup_steps=2))
    line = other_rate(resume_settings(first), now, 10)
    words = line.splitlines()[-1].removesuffix(" keeps the schedule so far").split()
    kept = resolve(None, "tiny", [*words, "optimizer.learning_rate=1e-3"]).run
    for step in range(10, 20):
        assert rate(kept.lr_schedule, 1e-3, step, 19) == rate(first.lr_schedule, 1e-3, step, 9)
