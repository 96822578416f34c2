"""Error classes: each message names what is wrong, where, what was found, what is allowed and the fix. Each class has
its exit code."""

from __future__ import annotations

from functools import partial
from typing import Any

_MOST_FOUND = 400  # characters of what was found in a message: it may be a whole line of a file


class PenteractError(Exception):
    """A problem the user can act on.

    Printed as at most three lines, `error[CODE]: what · where · found / allowed · fix: …`; the
    process ends with `exit_code`.  A traceback is shown only with `--debug`.
    """

    exit_code = 70

    def __init__(
        self, code: str, what: str, *, where: str = "", found: object = "", allowed: object = "", fix: str = ""
    ) -> None:
        """`code`: the error's kind in capitals, as LAYOUT; the other parts make the message and may be empty."""
        self.code, self.what, self.where = code, what, where
        self.found, self.allowed, self.fix = str(found), str(allowed), fix
        super().__init__(str(self))

    def __str__(self) -> str:
        """The message as one line, `error[CODE]: what · where · found / allowed · fix: …`."""
        parts, found = [self.what], self.found
        if len(found) > _MOST_FOUND:
            found = f"{found[:_MOST_FOUND]}…"
        if self.where:
            parts.append(self.where)
        if found or self.allowed:
            parts.append(
                " / ".join(
                    s for s in (f"found {found}" * bool(found), f"allowed {self.allowed}" * bool(self.allowed)) if s
                )
            )
        if self.fix:
            parts.append(f"fix: {self.fix}")
        return f"error[{self.code}]: " + " · ".join(" ".join(p.split()) for p in parts)

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickling: ranks send errors to each other."""
        details = {"where": self.where, "found": self.found, "allowed": self.allowed, "fix": self.fix}
        return partial(type(self), self.code, self.what, **details), ()

    def as_dict(self) -> dict[str, object]:
        """The error as JSON: a row of `errors.jsonl`, and what `--json` prints."""
        return {"code": self.code, "what": self.what, "where": self.where, "found": self.found,
                "allowed": self.allowed, "fix": self.fix, "exit_code": self.exit_code}  # fmt: skip


class BadInput(PenteractError):
    """The command, file, model or layout is invalid; nothing was started."""

    exit_code = 2


class CorruptData(PenteractError):
    """Data is damaged, truncated, different from its manifest, or not supported by the run's kernels."""

    exit_code = 65


class Bug(PenteractError):
    """A bug in penteract: an internal invariant is broken."""

    exit_code = 70


class OutOfMemory(PenteractError):
    """The device or host has no memory left."""

    exit_code = 71


class PeerLost(PenteractError):
    """Another rank failed or hangs; its own error is in `errors.jsonl`."""

    exit_code = 72


class BadNumerics(PenteractError):
    """A loss or gradient is not finite."""

    exit_code = 73


class DiskFailure(PenteractError):
    """A file could not be written: no space, no permission."""

    exit_code = 74

    @staticmethod
    def of(error: OSError, where: object) -> DiskFailure:
        """What a command says of a file or folder of its own that it could not write."""
        return DiskFailure("DISK", f"cannot be written: {error.strerror or error}", where=str(where),
                           fix="name another place, or make room there and allow writing")  # fmt: skip


class Preempted(PenteractError):
    """Stopped from outside after a checkpoint; `--resume` continues the run."""

    exit_code = 75
