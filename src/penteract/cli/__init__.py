"""The command line: one thin file for each verb."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Ctrl-C during imports gives 130; `train` ends with 75 whenever it is
    asked to stop, and goes on when nobody reads what it prints."""
    with ExitStack() as stack:
        try:  # imported here: it takes a while
            if "train" in (sys.argv[1:] if argv is None else argv):
                from penteract.engine.rank.stopping import Stopping
                from penteract.engine.runtime.printing import never_fails

                stack.enter_context(Stopping.of_process())
                stack.enter_context(never_fails())
            from penteract.cli.app import main as run
        except KeyboardInterrupt:
            return 130
        return run(argv)
