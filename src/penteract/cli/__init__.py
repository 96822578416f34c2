"""The command line: one thin file for each verb."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack

__all__ = ["main"]


_PRINTS = {"--draw", "--dry-run", "--help", "-h"}  # of `train`, which then does nothing else


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Ctrl-C during imports gives 130; `train` ends with 75 whenever it is
    asked to stop, and goes on when nobody reads what it prints. Output of others that cannot be written gives 74."""
    words = sys.argv[1:] if argv is None else argv
    with ExitStack() as stack:
        try:  # imported here: it takes a while
            from penteract.engine.runtime.printing import fails_once, never_fails

            if "train" in words:
                from penteract.engine.rank.stopping import Stopping

                stack.enter_context(Stopping.of_process())
            trains = "train" in words and _PRINTS.isdisjoint(words)
            stack.enter_context(never_fails() if trains else fails_once())
            from penteract.cli.app import main as run
        except KeyboardInterrupt:
            return 130
        return run(argv)
