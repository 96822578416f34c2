"""A sweep from its question to its end: cases are made once, and the same question goes on with them."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from penteract.config.files.machine_file import machine_named
from penteract.config.hardware import cluster
from penteract.config.resolve.write_run_file import to_toml
from penteract.config.run import RunSpec
from penteract.engine.doctor.probe.gpus import DRIVER
from penteract.engine.run_folder import lease
from penteract.errors import BadInput
from penteract.measure.bench.cases.case_prediction import Predictor
from penteract.measure.bench.cases.room_here import RoomHere
from penteract.measure.bench.cases.sweep_cases import Expanded, ReadyCase, Settle, expand
from penteract.measure.bench.cases.sweep_question import SweepQuestion
from penteract.measure.bench.launcher import Launcher
from penteract.measure.bench.local_launcher import LocalLauncher
from penteract.measure.bench.sweep_loop import SweepLoop
from penteract.measure.schemas.sweep import CaseStatus, Sweep, SweepRow, SweepSettings
from penteract.measure.schemas.sweep_folder import SweepFolder, now
from penteract.units import show_bytes

Watch = Callable[[Sweep], None]


def cases_of(asked: SweepQuestion, settle: Settle = lambda run, again: run, *, here: bool = True) -> Expanded:
    """The cases of a question, with what is predicted. `here`: they run on this machine, whose memory bounds them.
    Nothing is written. Raises BadInput."""
    named = asked.plan.gpus if asked.plan else asked.gpus
    headroom = asked.plan.headroom if asked.plan else asked.headroom
    return expand(
        asked, Predictor(cluster(named) if named else None, headroom, RoomHere() if here else lambda run: None), settle
    )


def settings_of(asked: SweepQuestion, cases: Expanded, command: str, launcher: str = "local") -> SweepSettings:
    """The settings of a sweep of these cases."""
    return SweepSettings(
        name=asked.name, steps=asked.steps, warmup=asked.warmup, limit_s=asked.limit, data=asked.data,
        cluster=asked.plan.gpus if asked.plan else asked.gpus, command=command,
        cases=tuple(one.case.name for one in cases.cases), asked=asked.digest, budget_gpu_minutes=asked.budget,
        launcher=launcher, on_cpus=all(_on_cpus(one.run.run, asked, launcher) for one in cases.cases),
    )  # fmt: skip


def _on_cpus(run: RunSpec, asked: SweepQuestion, launcher: str) -> bool:
    """Whether a case runs on CPUs, as far as is known before it starts. GPUs that are named are not here yet."""
    if run.precision.device != "auto":
        return run.precision.device == "cpu"
    named = asked.plan.gpus if asked.plan else asked.gpus
    elsewhere = bool(named) and not named.lower().endswith(".toml") and not machine_named(named)
    return launcher == "local" and not elsewhere and not DRIVER.exists()


def make(folder: SweepFolder, settings: SweepSettings, cases: Expanded) -> None:
    """Write the folder of a new sweep. Cases predicted not to fit are skipped, by name. Raises DiskFailure.

    The settings come last: a folder without them is no sweep yet, and is made anew.
    """
    for one in cases.cases:
        case = folder.case(one.case.name)
        case.make(one.case, to_toml(one.run))
        if one.case.predicted.fits is False:
            case.write_status(skipped(one))
    folder.write_settings(settings)


def skipped(one: ReadyCase) -> CaseStatus:
    """The status of a case that is predicted not to fit."""
    predicted = one.case.predicted
    error = {
        "code": "FIT", "what": "predicted not to fit", "found": show_bytes(predicted.allocated_bytes),
        "allowed": show_bytes(predicted.usable_bytes or 0), "exit_code": None,
    }  # fmt: skip
    return CaseStatus(state="skipped", since=now(), error=error)


def other_sweep(folder: SweepFolder, asked: SweepQuestion) -> str:
    """A line, if the folder holds the sweep of another question."""
    if not _is_other(folder, asked):
        return ""
    there = folder.settings().command
    return f"note: {folder.path} holds another sweep, {there}: this one needs another --out"


def _is_other(folder: SweepFolder, asked: SweepQuestion) -> bool:
    return folder.exists and folder.settings().asked != asked.digest


def _refuse_other(folder: SweepFolder, asked: SweepQuestion) -> None:
    """Raise BadInput if the folder holds the sweep of another question."""
    if _is_other(folder, asked):
        there = folder.settings()
        raise BadInput("SWEEP", "the folder holds another sweep", where=str(folder.path), found=there.command,
                       fix=f"--out another folder, or `penteract bench {folder.path}` to go on with it")  # fmt: skip


def renewed(folder: SweepFolder, asked: SweepQuestion) -> Sweep:
    """The sweep that the folder holds, with the limit and the budget of this question. Cases with a limit of their own
    keep it; those that a longer limit gives more time are pending again. Nothing is written. Raises BadInput if it is
    of another question."""
    _refuse_other(folder, asked)
    sweep, rows = folder.read(), list[SweepRow]()
    for row in sweep.rows:
        limit, status = row.case.limit_s, row.status
        if limit == sweep.settings.limit_s and limit != asked.limit:
            if status.state == "timed out" and asked.limit > limit:
                status = replace(status, state="pending", since=now(), error=None, exit_code=None)
            row = replace(row, case=replace(row.case, limit_s=asked.limit), status=status)
        rows.append(row)
    settings = replace(sweep.settings, limit_s=asked.limit, budget_gpu_minutes=asked.budget)
    return Sweep(settings=settings, rows=tuple(rows))


def again(folder: SweepFolder, asked: SweepQuestion) -> None:
    """Write what `renewed` changes. Raises BadInput as it does, and if another process runs the sweep."""
    if renewed(folder, asked).settings == folder.settings():
        return
    with held(folder):
        there, new = folder.read(), renewed(folder, asked)
        for old, row in zip(there.rows, new.rows, strict=True):
            case = folder.case(row.case.name)
            if row.case != old.case:
                case.write_case(row.case)
            if row.status != old.status:
                case.write_status(row.status)
        folder.write_settings(new.settings)


@dataclass(slots=True)
class SweepRun:
    """The running of a sweep's folder by this process, which alone may run it meanwhile.

    `watch` is called each turn; `stopped` is asked whether to stop. `notify` gets lines about what is waited for.
    """

    folder: SweepFolder
    launcher: Launcher = field(default_factory=LocalLauncher)
    watch: Watch = lambda sweep: None
    stopped: Callable[[], bool] = lambda: False
    notify: Callable[[str], None] = lambda line: None

    def go(self) -> Sweep:
        """Run what is not over. Raises BadInput if another process runs it."""
        with held(self.folder, self.notify):
            return SweepLoop(self.folder, self.launcher, self.watch, self.stopped).run()


@contextmanager
def held(folder: SweepFolder, notify: Callable[[str], None] = lambda line: None) -> Generator[None]:
    """This process alone writes to the sweep. Raises BadInput if another does."""
    try:
        own = lease.take(folder.path, notify=notify).begin()
    except BadInput as e:
        if e.code == "HELD":
            e.what, e.fix = "another process runs this sweep", f"`penteract bench status {folder.path}` shows it"
        raise
    try:
        yield
    finally:
        own.end()


def runs_now(folder: SweepFolder) -> bool:
    """Whether a process of this host runs the sweep."""
    try:
        lease.refuse_held(folder.path, patience=0.0)
    except BadInput:
        return True
    return False
