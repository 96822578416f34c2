"""The launcher of one case on this machine: `python -m penteract.measure.bench.local_ranks ATTEMPT RANKS WORDS…`.

It starts the ranks as a training run's are, in fresh processes that end with it, and gives on the exit code of the one
that failed first.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from penteract.engine.runtime.launch import launch


def main(argv: list[str]) -> int:
    """Run `python WORDS` as so many ranks; ATTEMPT is the folder for their logs and errors."""
    folder, ranks, *words = argv
    return launch(int(ranks), words, Path(folder), os.environ, again="penteract bench goes on with the other cases")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
