"""A sweep from its question to its end: cases are made once, and the same question goes on with them."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from penteract.config.hardware import cluster
from penteract.config.resolve.write_run_file import to_toml
from penteract.engine.run_folder import lease
from penteract.errors import BadInput
from penteract.measure.bench.cases.case_prediction import Predictor
from penteract.measure.bench.cases.room_here import RoomHere
from penteract.measure.bench.cases.sweep_cases import Expanded, ReadyCase, Settle, expand
from penteract.measure.bench.cases.sweep_question import SweepQuestion
from penteract.measure.bench.launcher import Launcher
from penteract.measure.bench.local_launcher import LocalLauncher
from penteract.measure.bench.sweep_loop import SweepLoop
from penteract.measure.schemas.sweep import CaseStatus, Sweep, SweepSettings
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
        launcher=launcher,
    )  # fmt: skip


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


def again(folder: SweepFolder, asked: SweepQuestion) -> None:
    """Take the limit and the budget of this question for the sweep that the folder holds. Cases with a limit of their
    own keep it; those that a longer limit gives more time are pending again. Raises BadInput if another process runs
    the sweep, or if it is of another question."""
    _refuse_other(folder, asked)
    there = folder.settings()
    settings = replace(there, limit_s=asked.limit, budget_gpu_minutes=asked.budget)
    if settings == there:
        return
    with held(folder):
        for row in folder.read().rows:
            case, limit = folder.case(row.case.name), row.case.limit_s
            if limit != there.limit_s or limit == asked.limit:
                continue
            case.write_case(replace(row.case, limit_s=asked.limit))
            if row.status.state == "timed out" and asked.limit > limit:
                case.write_status(replace(row.status, state="pending", since=now(), error=None, exit_code=None))
        folder.write_settings(settings)


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
