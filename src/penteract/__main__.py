"""`python -m penteract`."""

import sys

from penteract.cli import main

if __name__ == "__main__":
    sys.exit(main())
