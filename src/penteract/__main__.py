"""`python -m penteract`."""

import sys

from penteract.cli import main
from penteract.engine.runtime.exits import ends_with

if __name__ == "__main__":
    sys.exit(ends_with(main()))
