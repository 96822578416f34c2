"""What Slurm says of jobs: `squeue` for those that wait, run or have just ended, `sacct` for older ones, where there is
accounting. Texts are parsed here; whoever asks decides what they mean."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from penteract.errors import BadInput
from penteract.slurm.job_shape import seconds_of
from penteract.slurm.slurm_calls import call
from penteract.units import Seconds

WAITING = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
)
RUNNING = frozenset({"RUNNING", "COMPLETING", "STAGE_OUT", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING"})
_SQUEUE = "%i|%T|%M|%N|%r"
_SACCT = "JobID,State,ExitCode,ElapsedRaw,NodeList"


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Slurm's word on a job.

    state      in capitals, one word: PENDING, RUNNING, COMPLETED, NODE_FAIL, …
    exit_code  of its script; 128 + the signal that ended it; None: not said
    seconds    for which it has run; None: not said
    about      for people: the state, where, and why it waits
    """

    state: str
    exit_code: int | None = None
    seconds: Seconds | None = None
    about: str = ""


def ask(jobs: Iterable[str]) -> dict[str, Answer]:
    """Slurm's word on each job, by its number or `ARRAY_INDEX`; those that it does not remember are missing.

    One question to `squeue`, and one to `sacct` for jobs that are over. Raises PeerLost where the controller does not
    answer.
    """
    wanted = list(jobs)
    numbers = ",".join(dict.fromkeys(job.partition("_")[0] for job in wanted))
    if not numbers:
        return {}
    try:
        now = parse_squeue(call("squeue", "--noheader", "--array", "--states=all", f"--jobs={numbers}", "-o", _SQUEUE))
    except BadInput as e:
        if "Invalid job id" not in e.found:
            raise
        now = {}  # it has forgotten them
    over = [job for job in wanted if job not in now or now[job].state not in WAITING | RUNNING]
    if over:
        try:
            text = call("sacct", "--noheader", "--parsable2", f"--format={_SACCT}", f"--jobs={numbers}")
        except BadInput:  # no accounting
            text = ""
        then = parse_sacct(text)
        now |= {job: then[job] for job in over if job in then and then[job].state not in WAITING | RUNNING}
    return {job: now[job] for job in wanted if job in now}


def parse_squeue(text: str) -> dict[str, Answer]:
    """Lines of `_SQUEUE`."""
    found = dict[str, Answer]()
    for line in text.splitlines():
        job, *rest = line.strip().split("|")
        if len(rest) == 4:
            state, used, nodes, why = rest
            at = f" on {nodes}" if nodes else f": {why}" if why not in ("", "None") else ""
            found[job] = Answer(state=state, seconds=_elapsed(used), about=f"{state}{at}")
    return found


def parse_sacct(text: str) -> dict[str, Answer]:
    """Lines of `_SACCT`. A job whose step ran out of memory did so itself, whatever its script made of it."""
    found, full = dict[str, Answer](), set[str]()
    for line in text.splitlines():
        name, *rest = line.strip().split("|")
        if len(rest) != 4:
            continue
        job, is_step, _ = name.partition(".")
        state, code, elapsed, nodes = rest[0].split(" ")[0], *rest[1:]  # CANCELLED by 1000
        if state == "OUT_OF_MEMORY":
            full.add(job)
        if not is_step:
            seconds = float(elapsed) if elapsed.isdigit() else None
            at = f" on {nodes}" if nodes and nodes != "None assigned" else ""
            found[job] = Answer(state=state, exit_code=_code(code), seconds=seconds, about=f"{state}{at}")
    for job in full & found.keys():
        about = found[job].about.replace(found[job].state, "OUT_OF_MEMORY")
        found[job] = replace(found[job], state="OUT_OF_MEMORY", about=about)
    return found


def _code(text: str) -> int | None:
    """`code:signal` as a shell has it."""
    code, _, number = text.partition(":")
    if not (code.isdigit() and number.isdigit()):
        return None
    return 128 + int(number) if int(number) else int(code)


def _elapsed(text: str) -> Seconds | None:
    try:
        return seconds_of(text)
    except BadInput:  # INVALID, where clocks differ
        return None
