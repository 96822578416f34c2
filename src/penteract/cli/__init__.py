"""The command line: one thin file a verb."""

from penteract.cli.app import main

__all__ = ["main"]
