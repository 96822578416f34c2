"""The loop of a sweep against a launcher without processes: what begins, what is written, and what is never lost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from measured_sweeps import case, result
from penteract.errors import BadInput, PeerLost
from penteract.measure.bench.attempt_outcome import outcome, state_of
from penteract.measure.bench.cases.sweep_question import SweepQuestion
from penteract.measure.bench.launcher import CaseJob, JobState
from penteract.measure.bench.ranks.rank_process import Attempt
from penteract.measure.bench.sweep_loop import SweepLoop, budget_left
from penteract.measure.bench.sweep_run import again, held, renewed
from penteract.measure.schemas.sweep import CaseHandle, CaseStatus, State, SweepCase, SweepSettings
from penteract.measure.schemas.sweep_folder import SweepFolder

ENDED, RUNNING = JobState(state="ended", exit_code=0, seconds=10.0), JobState(state="running", seconds=5.0)
LOST = JobState(state="ended", exit_code=1, cause="lost", seconds=10.0, about="NODE_FAIL on gpu-17")


@dataclass
class FakeLauncher:
    """A job follows a script: the first job of a case has the first list, and so on. One that ends with code 0
    and no cause writes that its case is done, as rank 0 does."""

    folder: SweepFolder
    scripts: dict[str, list[list[JobState | None]]] = field(default_factory=dict)
    at_once: int = 1
    outlives: bool = False
    name: str = "fake"
    started: list[str] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    most: int = 0

    def start(self, jobs: Sequence[CaseJob]) -> list[str]:
        handles = list[str]()
        for job in jobs:
            assert job.folder.is_dir() and job.command[-2:] == ("--attempt", job.folder.name.removeprefix("attempt-"))
            self.started.append(job.name)
            handles.append(f"{job.name} {self.started.count(job.name)}")
        return handles

    def states(self, handles: Sequence[str]) -> list[JobState | None]:
        self.most = max(self.most, len(handles))
        return [self._state(handle) for handle in handles]

    def _state(self, handle: str) -> JobState | None:
        name, number = handle.split()
        if handle in self.stopped:
            return JobState(state="ended", exit_code=137, seconds=61.0)
        scripts = self.scripts.setdefault(name, [])
        while len(scripts) < int(number):
            scripts.append([RUNNING, ENDED])
        script = scripts[int(number) - 1]
        state = script.pop(0) if script else ENDED
        if state is not None and state.state == "ended" and not state.exit_code and not state.cause:
            at = self.folder.case(name)
            status = at.status()
            at.write_result(replace(result([1.0] * 10, at.case()), attempt=status.attempt))
            at.ends(replace(status, state="done"))
        return state

    def stop(self, handles: Sequence[str]) -> None:
        self.stopped += handles


class SlowToEnd(FakeLauncher):
    """A scheduler's job runs on for some time after it was told to end."""

    def _state(self, handle: str) -> JobState | None:
        script = self.scripts["001"][0]
        return script.pop(0) if script else JobState(state="ended", exit_code=137, seconds=61.0)


def make(at: Path, *cases: SweepCase, budget: float | None = None) -> SweepFolder:
    folder = SweepFolder(at)
    for one in cases:
        folder.case(one.name).make(one, "")
    names = tuple(one.name for one in cases)
    folder.write_settings(SweepSettings(name="s", steps=10, warmup=0, limit_s=60.0, data="random", cluster="",
                                        command="", cases=names, budget_gpu_minutes=budget))  # fmt: skip
    return folder


def states(folder: SweepFolder) -> list[State]:
    return [row.status.state for row in folder.read().rows]


def loop(folder: SweepFolder, launcher: FakeLauncher, **more: Any) -> SweepLoop:
    return SweepLoop(folder, launcher, poll=0.0, **more)


def test_one_case_after_the_other(tmp_path: Path) -> None:
    folder = make(tmp_path, case(1), case(2), case(3))
    launcher, seen = FakeLauncher(folder), list[Any]()
    swept = loop(folder, launcher, watch=lambda s: seen.append([r.status.state for r in s.rows])).run()
    assert swept.ended and states(folder) == ["done"] * 3 and launcher.started == ["001", "002", "003"]
    assert launcher.most == 1 and ["done", "running", "pending"] in seen
    assert [row.status.gpu_seconds for row in swept.rows] == [80.0] * 3
    loop(folder, launcher).run()
    assert launcher.started == ["001", "002", "003"]  # nothing is left to do


def test_a_scheduler_gets_all_at_once_and_no_answer_is_no_news(tmp_path: Path) -> None:
    folder = make(tmp_path, case(1), case(2), case(3))
    waits = JobState(state="waiting")
    launcher = FakeLauncher(folder, {"002": [[None, waits, None, RUNNING, None, ENDED]]}, at_once=0, outlives=True)
    assert loop(folder, launcher).run().ended and launcher.most == 3


def test_no_broken_case_stops_the_rest(tmp_path: Path) -> None:
    folder = make(tmp_path, *(case(n) for n in range(1, 7)))
    fails = JobState(state="ended", exit_code=70, seconds=1.0)
    launcher = FakeLauncher(folder, {
        "001": [[fails]], "002": [[replace(fails, cause="memory")]], "003": [[replace(fails, exit_code=71)]],
        "004": [[replace(RUNNING, seconds=61.0)]], "005": [[RUNNING, replace(fails, cause="time")]],
    })  # fmt: skip
    assert loop(folder, launcher).run().ended
    assert states(folder) == ["failed", "out of memory", "out of memory", "timed out", "timed out", "done"]
    assert launcher.stopped == ["004 1"]
    error = folder.case("004").status().error
    assert error is not None and error["what"] == "not done in 60 s"


def test_a_lost_case_is_tried_once_more(tmp_path: Path) -> None:
    folder = make(tmp_path, case(1), case(2))
    launcher = FakeLauncher(folder, {"001": [[RUNNING, LOST], [RUNNING, ENDED]], "002": [[LOST], [LOST], [ENDED]]})
    assert loop(folder, launcher).run().ended
    assert launcher.started == ["001", "001", "002", "002"] and states(folder) == ["done", "lost"]
    one, two = (folder.case(name).status() for name in ("001", "002"))
    assert (one.attempt, one.losses, one.gpu_seconds, one.error) == (2, 1, 160.0, None)
    assert two.losses == 2 and two.error is not None and two.error["found"] == "NODE_FAIL on gpu-17"


def test_the_budget_ends_the_sweep_before_it_is_exceeded(tmp_path: Path) -> None:
    # a case is predicted to take 8 GPUs for 30 + 10 s, and takes 10
    folder = make(tmp_path, case(1), case(2), case(3), budget=500 / 60)
    swept = loop(folder, FakeLauncher(folder)).run()
    assert states(folder) == ["done", "done", "done"] and budget_left(swept) == pytest.approx(260.0)
    folder = make(tmp_path / "small", case(1), case(2), case(3), budget=401 / 60)
    swept = loop(folder, FakeLauncher(folder)).run()
    assert states(folder) == ["done", "done", "pending"] and not swept.ended
    folder.write_settings(replace(folder.settings(), budget_gpu_minutes=60.0))
    assert loop(folder, FakeLauncher(folder)).run().ended


def test_skipped_cases_are_not_begun(tmp_path: Path) -> None:
    folder = make(tmp_path, case(1), case(2))
    folder.case("001").write_status(CaseStatus(state="skipped"))
    launcher = FakeLauncher(folder)
    assert loop(folder, launcher).run().ended and launcher.started == ["002"]


def test_it_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    """Jobs that ended with the killed process count for nothing; what they still write is not taken."""
    folder = make(tmp_path, case(1), case(2), case(3))
    folder.case("001").write_status(CaseStatus(state="done", attempt=1, since="then"))
    folder.case("002").write_handle(1, CaseHandle(launcher="fake", handle="002 1", since=""))
    folder.case("002").write_status(running := CaseStatus(state="running", attempt=1))
    folder.case("003").write_status(CaseStatus(state="pending", attempt=1))  # killed before it was started
    launcher = FakeLauncher(folder)
    assert loop(folder, launcher).run().ended and launcher.started == ["002", "003"]
    assert folder.case("001").status().since == "then"
    assert not folder.case("002").ends(replace(running, state="failed")) and states(folder) == ["done"] * 3
    assert folder.case("002").status().losses == 0


def test_jobs_that_outlive_it_are_found_again(tmp_path: Path) -> None:
    folder = make(tmp_path, case(1), case(2))
    folder.case("001").write_handle(1, CaseHandle(launcher="fake", handle="001 1", since=""))
    folder.case("001").write_status(CaseStatus(state="running", attempt=1, gpu_seconds=5.0))
    folder.case("002").write_handle(1, CaseHandle(launcher="other", handle="002 1", since=""))
    folder.case("002").write_status(CaseStatus(state="running", attempt=1))
    launcher = FakeLauncher(folder, outlives=True, at_once=0)
    assert loop(folder, launcher).run().ended
    assert launcher.started == ["002"] and folder.case("001").status().gpu_seconds == 85.0
    folder = make(tmp_path / "gone", case(1))
    folder.case("001").write_handle(1, CaseHandle(launcher="fake", handle="001 1", since=""))
    folder.case("001").write_status(CaseStatus(state="running", attempt=1))
    launcher = FakeLauncher(folder, {"001": [[JobState(state="unknown")]]}, outlives=True)
    assert loop(folder, launcher).run().ended and launcher.started == ["001"]  # unknown: lost, and tried again


def test_what_ended_while_nobody_looked_has_its_cost_once(tmp_path: Path) -> None:
    folder = make(tmp_path, case(1), case(2), case(3))
    for name in ("001", "002", "003"):
        folder.case(name).write_handle(1, CaseHandle(launcher="fake", handle=f"{name} 1", since=""))
    folder.case("001").write_status(CaseStatus(state="done", attempt=1))
    lost = CaseStatus(state="lost", attempt=1, losses=1, gpu_seconds=80.0, counted=1)
    folder.case("002").write_status(lost)
    folder.case("003").write_status(CaseStatus(state="done", attempt=1, gpu_seconds=80.0, counted=1))
    launcher = FakeLauncher(folder, {"001": [[ENDED]], "002": [[LOST], [ENDED]]}, outlives=True, at_once=0)
    launcher.started.append("002")  # its first job, by an earlier process
    swept = loop(folder, launcher).run()
    assert [row.status.gpu_seconds for row in swept.rows] == [80.0, 160.0, 80.0] and states(folder) == ["done"] * 3


def test_a_job_is_told_to_end_once(tmp_path: Path) -> None:
    folder = make(tmp_path, case(1))
    launcher = SlowToEnd(folder, {"001": [[replace(RUNNING, seconds=61.0)] * 5]}, outlives=True, at_once=0)
    assert loop(folder, launcher).run().ended
    assert launcher.stopped == ["001 1"] and states(folder) == ["timed out"]


@pytest.mark.parametrize("outlives", [False, True])
def test_a_stop_leaves_nothing_half_done(tmp_path: Path, outlives: bool) -> None:
    folder = make(tmp_path, case(1), case(2))
    launcher = FakeLauncher(folder, {"001": [[RUNNING] * 99]}, outlives=outlives)
    turns = list[int]()
    swept = loop(folder, launcher, stopped=lambda: turns.append(1) or len(turns) > 3).run()
    assert not swept.ended and launcher.started == ["001"]
    assert launcher.stopped == ([] if outlives else ["001 1"])
    assert (swept.rows[0].status.gpu_seconds > 0) == (not outlives)  # what ended has cost something
    assert states(folder) == ["running" if outlives else "pending", "pending"]


def test_the_ranks_own_error_says_why(tmp_path: Path) -> None:
    rows = [PeerLost("PEER", "rank 1 failed").as_dict(), {"code": "MEMORY", "what": "no room", "exit_code": 71}]
    (tmp_path / "errors.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"code"')
    found = outcome(tmp_path, JobState(state="ended", exit_code=72))
    assert (found.state, found.error["what"]) == ("out of memory", "no room")
    (tmp_path / "errors.jsonl").unlink()
    (tmp_path / "launcher.log").write_text("loading\nerror[DEVICE]: torch sees no GPU\nbye\n")
    found = outcome(tmp_path, JobState(state="ended", exit_code=2))
    assert (found.state, found.error["what"]) == ("failed", "error[DEVICE]: torch sees no GPU")
    assert outcome(tmp_path, JobState(state="ended", exit_code=0)).error["what"] == "it ended without a result"
    assert [state_of(72, "HUNG"), state_of(72), state_of(75), state_of(73)] == ["timed out", "lost", "lost", "failed"]


def test_a_longer_limit_gives_more_time_to_what_ran_out_of_it(tmp_path: Path) -> None:
    asked = SweepQuestion(name="s", limit=60.0, budget=5.0)
    folder = make(tmp_path, case(1), case(2, limit_s=5.0), case(3))
    folder.write_settings(replace(folder.settings(), asked=asked.digest, budget_gpu_minutes=5.0))
    timed_out = CaseStatus(state="timed out", attempt=1, gpu_seconds=480.0, counted=1, error={"code": "LIMIT"})
    for name in ("001", "002"):
        folder.case(name).write_status(timed_out)
    with held(folder), pytest.raises(BadInput, match="another process"):
        again(folder, replace(asked, limit=120.0))
    again(folder, asked)
    assert folder.case("001").status() == timed_out and folder.settings().budget_gpu_minutes == 5.0
    longer = renewed(folder, replace(asked, limit=120.0))
    assert [row.status.state for row in longer.rows] == ["pending", "timed out", "pending"]
    assert folder.case("001").status() == timed_out  # a dry run writes nothing
    again(folder, replace(asked, limit=120.0, budget=None))
    assert [row.case.limit_s for row in folder.read().rows] == [120.0, 5.0, 120.0]
    assert states(folder) == ["pending", "timed out", "pending"]
    assert folder.case("001").status().gpu_seconds == 480.0 and folder.settings().budget_gpu_minutes is None
    with pytest.raises(BadInput, match="another sweep"):
        again(folder, replace(asked, steps=99))


def test_a_late_result_of_an_earlier_attempt_is_not_taken(tmp_path: Path) -> None:
    folder = make(tmp_path, case(1))
    at = folder.case("001")
    good = replace(result([1.0] * 10, at.case()), attempt=2)
    at.write_status(CaseStatus(state="done", attempt=2))
    at.write_result(good)
    with pytest.raises(BadInput, match="another attempt"):
        Attempt(at, 1, folder.settings(), "").write(replace(good, attempt=1))
    assert folder.read().rows[0].result == good
