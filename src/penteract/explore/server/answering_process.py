"""A worker process: reads requests from stdin, a line of JSON each, and writes the lines of their answers to stdout.
SIGUSR1 stops an answer. What was asked and answered before is answered again without computing it.

Run as `python -m penteract.explore.server.answering_process`. It ends when its input does.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from penteract.explore.server.remembered import RememberedAnswers

END = b'{"kind": "end"}\n'  # after the last line of an answer
_MODULES = (
    "answering", "answers.step_curve", "answers.would_fit", "answers.schedules.schedule_lanes",
    "answers.schedules.other_schedules", "answers.layouts.search", "answers.layouts.other_questions",
    "answers.layouts.side_by_side", "answers.ranks.rank_answer",
)  # fmt: skip


class Interrupted(BaseException):
    """The page has asked something else."""


class Answering:
    """Computes one answer at a time. A signal interrupts only computing, never the writing of a line.

    computing  whether the handler may raise: planner code is running
    stopped    whether a signal has come since the request was read
    """

    def __init__(self) -> None:
        """Nothing is computed yet."""
        self.computing = self.stopped = False

    def stop(self, *_: object) -> None:
        """The handler of the signal. A line that is being written is written to its end, and no other one follows."""
        self.stopped = True
        if self.computing:
            self.computing = False
            raise Interrupted

    def rows(self, line: bytes, write: Callable[[bytes], object]) -> Iterator[bytes]:
        """The lines of the answer to one request: {"request": what the page asks, "opening": what the server was
        started with}. `write`: called with lines that come in between, while a line is computed."""
        from penteract.explore.answering import answer

        self.stopped = False
        try:
            asked = json.loads(line)
            answers = answer(asked["request"], asked["opening"], lambda row: self._send_row(row, write))
            while not self.stopped:
                self.computing = True
                row: Any = next(answers, None)
                data = b"" if row is None else json.dumps(row, allow_nan=False).encode() + b"\n"
                self.computing = False
                if row is None:
                    return
                yield data
        except Interrupted:
            return
        finally:
            self.computing = False

    def _send_row(self, row: Any, write: Callable[[bytes], object]) -> None:
        """Write a line while the planner is at work. A signal that comes meanwhile interrupts it afterwards."""
        self.computing = False
        write(json.dumps(row, allow_nan=False).encode() + b"\n")
        if self.stopped:
            raise Interrupted
        self.computing = True


def main() -> None:
    """Answer until there are no more requests."""
    answering = Answering()
    signal.signal(signal.SIGUSR1, answering.stop)
    for name in _MODULES:  # before the first request
        import_module(f"penteract.explore.{name}")
    out = sys.stdout.buffer

    def write(row: bytes) -> None:
        out.write(row)
        out.flush()

    remembered = RememberedAnswers()
    for line in sys.stdin.buffer:
        lines = remembered.find(line)
        for row in lines or ():
            write(row)
        if lines is None:
            given = list[bytes]()
            for row in answering.rows(line, write):
                write(row)
                given.append(row)
            if not answering.stopped:
                remembered.keep(line, given)
        write(END)


if __name__ == "__main__":
    main()
