"""The loop of a sweep: begin what may begin, look at what runs, write how it ended, until nothing is left to do."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from penteract.measure.bench.attempt_outcome import outcome
from penteract.measure.bench.cases.case_cost import gpu_seconds
from penteract.measure.bench.launcher import CaseJob, JobState, Launcher
from penteract.measure.schemas.sweep import ENDED, CaseHandle, CaseStatus, Sweep, SweepCase, SweepRow
from penteract.measure.schemas.sweep_folder import CaseFolder, SweepFolder, now

POLL_S = 0.5
_RANK = "penteract.measure.bench.ranks.rank_process"


@dataclass(slots=True)
class _UnderWay:
    """A job that has not ended. `spent`: GPU-seconds of earlier attempts; `since`: when it was first seen to run, by
    this process's clock; `stopped`: whether it was told to end."""

    case: SweepCase
    handle: str
    spent: float
    since: float | None = None
    stopped: bool = False

    def seconds(self, job: JobState) -> float:
        """For which it has run, by the launcher if it knows."""
        self.since = time.monotonic() if self.since is None else self.since
        return time.monotonic() - self.since if job.seconds is None else job.seconds


@dataclass(slots=True)
class SweepLoop:
    """Runs the cases of a sweep that are not over.

    `watch` is called each turn with the sweep as its files are. `stopped` is asked each turn whether to stop: jobs of
    a launcher that does not outlive this process end then, and their cases are pending again.
    """

    folder: SweepFolder
    launcher: Launcher
    watch: Callable[[Sweep], None] = lambda sweep: None
    stopped: Callable[[], bool] = lambda: False
    poll: float = POLL_S
    _jobs: dict[str, _UnderWay] = field(default_factory=dict[str, _UnderWay])  # by case

    def run(self) -> Sweep:
        """Go on until each case is over, the budget is spent, or it is stopped. Returns the sweep as it is then."""
        self._pick_up(self.folder.read())
        while True:
            self._look()
            sweep = self.folder.read()
            self.watch(sweep)
            if self.stopped():
                self._leave()
                return self.folder.read()
            if not self._begin(sweep) and not self._jobs:
                return sweep
            time.sleep(self.poll)

    # ---- what runs -------------------------------------------------------------------------------------------

    def _pick_up(self, sweep: Sweep) -> None:
        """What an earlier process left running: its jobs go on, or they ended with it and count for nothing. One that
        has ended meanwhile has cost something."""
        for row in sweep.rows:
            case, status = self.folder.case(row.case.name), row.status
            if not status.attempt or status.counted >= status.attempt:
                continue
            handle = case.handle(status.attempt)
            if handle is not None and self.launcher.outlives and handle.launcher == self.launcher.name:
                self._jobs[row.case.name] = _UnderWay(row.case, handle.handle, status.gpu_seconds)
            elif status.state not in ENDED:
                _forget(case, status)

    def _look(self) -> None:
        """Ask how jobs are: write how they ended, and end those over their limit."""
        jobs = list(self._jobs.values())
        for one, job in zip(jobs, self.launcher.states([one.handle for one in jobs]), strict=True):
            if job is None or job.state == "waiting":
                continue
            case = self.folder.case(one.case.name)
            if job.state == "running":
                self._running(one, case, job)
            else:
                self._ended(one, case, job)

    def _running(self, one: _UnderWay, case: CaseFolder, job: JobState) -> None:
        status, seconds = case.status(), one.seconds(job)
        if status.state == "pending":  # a rank writes it too, once it has read its run
            case.write_status(replace(status, state="running", since=now()))
        if seconds > one.case.limit_s and not one.stopped:
            one.stopped = True
            self.launcher.stop([one.handle])
            if (status := case.status()).state not in ENDED:
                error = {"code": "LIMIT", "what": f"not done in {one.case.limit_s:g} s", "exit_code": None,
                         "fix": "a longer limit"}  # fmt: skip
                case.write_status(replace(status, state="timed out", since=now(), error=error))

    def _ended(self, one: _UnderWay, case: CaseFolder, job: JobState) -> None:
        """Write how a job ended, where its ranks did not, and what it has cost."""
        status = case.status()
        if status.state not in ENDED:
            state, error = outcome(case.attempt(status.attempt), job)
            losses = status.losses + (state == "lost")
            status = replace(status, state=state, since=now(), error=error, exit_code=job.exit_code, losses=losses)
        spent = one.spent + one.seconds(job) * one.case.ranks
        case.write_status(replace(status, gpu_seconds=spent, counted=status.attempt))
        del self._jobs[one.case.name]

    def _leave(self) -> None:
        """Stop: jobs that would end with this process end now, and their cases are pending again."""
        if self.launcher.outlives:
            return
        self.launcher.stop([one.handle for one in self._jobs.values()])
        for name, one in self._jobs.items():
            case, seconds = self.folder.case(name), one.seconds(JobState(state="ended"))
            status = replace(case.status(), gpu_seconds=one.spent + seconds * one.case.ranks)
            if status.state not in ENDED:
                _forget(case, status)
            else:
                case.write_status(replace(status, counted=status.attempt))

    # ---- what begins -----------------------------------------------------------------------------------------

    def _begin(self, sweep: Sweep) -> bool:
        """Begin as many cases as the launcher takes and the budget allows. -> whether any began."""
        room = self.launcher.at_once - len(self._jobs) if self.launcher.at_once else len(sweep.rows)
        left = budget_left(sweep, [one.case for one in self._jobs.values()])
        chosen = list[SweepRow]()
        for row in sweep.rows:
            cost = gpu_seconds(row.case, sweep.settings)
            if row.status.over or row.case.name in self._jobs or len(chosen) >= room:
                continue
            if left is not None and cost > left:
                continue
            left = None if left is None else left - cost
            chosen.append(row)
        if chosen:
            self._start(chosen)
        return bool(chosen)

    def _start(self, rows: Sequence[SweepRow]) -> None:
        jobs = list[CaseJob]()
        for row in rows:
            case, attempt = self.folder.case(row.case.name), row.status.attempt + 1
            case.attempt(attempt).mkdir(parents=True, exist_ok=True)
            fresh: dict[str, Any] = {"state": "pending", "since": now(), "error": None, "exit_code": None}
            case.write_status(replace(row.status, attempt=attempt, **fresh))
            jobs.append(job_of(self.folder, row.case, attempt))
        for row, handle in zip(rows, self.launcher.start(jobs), strict=True):
            case = self.folder.case(row.case.name)
            case.write_handle(
                row.status.attempt + 1, CaseHandle(launcher=self.launcher.name, handle=handle, since=now())
            )
            self._jobs[row.case.name] = _UnderWay(row.case, handle, row.status.gpu_seconds)


def _forget(case: CaseFolder, status: CaseStatus) -> None:
    """An attempt counts for nothing: the next has another number, and what it still writes is not taken."""
    case.write_status(replace(status, state="pending", since=now(), attempt=status.attempt + 1))


def job_of(folder: SweepFolder, case: SweepCase, attempt: int) -> CaseJob:
    """An attempt at a case, as launchers take it."""
    at = folder.case(case.name)
    command = (sys.executable, "-m", _RANK, str(at.path.resolve()), "--attempt", str(attempt))
    return CaseJob(name=case.name, folder=at.attempt(attempt).resolve(), ranks=case.ranks, command=command,
                   limit_s=case.limit_s)  # fmt: skip


def budget_left(sweep: Sweep, running: Sequence[SweepCase] = ()) -> float | None:
    """GPU-seconds of the budget that are neither spent nor promised to running cases; None: no bound."""
    if sweep.settings.budget_gpu_minutes is None:
        return None
    promised = sum(gpu_seconds(case, sweep.settings) for case in running)
    return 60 * sweep.settings.budget_gpu_minutes - sum(row.status.gpu_seconds for row in sweep.rows) - promised
