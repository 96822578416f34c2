"""The command line: one thin file a verb."""

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code, 130 where Ctrl-C comes before it is there."""
    try:
        from penteract.cli.app import main as run  # here: what it needs takes a while
    except KeyboardInterrupt:
        return 130
    return run(argv)
