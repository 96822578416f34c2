"""What a rank died of, by the signal that ended it: each has its own cause, and its own fix."""

from __future__ import annotations

import signal
from collections.abc import Mapping

from penteract.errors import OutOfMemory, PeerLost, PenteractError

_RESUME = "--resume continues from the last checkpoint"
_WHERE = "PYTHONFAULTHANDLER=1 shows in which call"
_SENT = "sent by a person, a scheduler or a time limit"

# signal -> (what happened, what to do besides resuming)
_CAUSES: Mapping[int, tuple[str, str]] = {
    signal.SIGSEGV: ("a library used memory that is not its own", _WHERE),
    signal.SIGABRT: ("a library gave up: an assertion, or a time limit of NCCL", "what it printed last says why"),
    signal.SIGBUS: ("a mapped file was cut shorter, or /dev/shm is full", "df /dev/shm; leave data files as they are"),
    signal.SIGILL: ("this processor lacks an instruction", "install packages that are built for this processor"),
    signal.SIGFPE: ("a library divided by zero", _WHERE),
    signal.SIGSYS: ("this container forbids a system call", "allow it in the container's seccomp profile"),
    signal.SIGXCPU: ("its limit of processor time was reached", "ulimit -t unlimited"),
    signal.SIGXFSZ: ("its limit of a file's size was reached", "ulimit -f unlimited"),
    signal.SIGPIPE: ("what it wrote to was closed", "keep the reader of its output open"),
    signal.SIGHUP: ("its terminal was closed", "start it with nohup, tmux or a scheduler"),
}


def death(rank: int, number: int, where: str, memory_kills: int | None) -> PenteractError:
    """The error of a rank that ended by signal `number`.

    `memory_kills`: processes that the kernel has killed for memory in this control group since the ranks started; None
    where nothing counts them. Only a count makes a SIGKILL a lack of memory: whoever sends it, it looks the same.
    """
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    what = f"rank {rank} was ended by {name}"
    if number == signal.SIGKILL and memory_kills:
        fix = f"a smaller micro-batch, fewer ranks a host, or a larger memory limit; {_RESUME}"
        return OutOfMemory("MEMORY", f"{what}: the host had no memory left", where=where,
                           found=f"{memory_kills} killed for memory in this control group", fix=fix)  # fmt: skip
    if number == signal.SIGKILL:
        counted = "none was killed for memory" if memory_kills == 0 else "nothing here counts kills for memory"
        return PeerLost("LOST", f"{what}: {_SENT}; {counted}", where=where, fix=_RESUME)
    cause, fix = _CAUSES.get(number, (_SENT, ""))
    return PeerLost("LOST", f"{what}: {cause}", where=where, fix=f"{fix}; {_RESUME}" if fix else _RESUME)
