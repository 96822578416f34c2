"""The command line: one thin file for each verb."""

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Ctrl-C during imports gives 130."""
    try:
        from penteract.cli.app import main as run  # imported here: it takes a while
    except KeyboardInterrupt:
        return 130
    return run(argv)
