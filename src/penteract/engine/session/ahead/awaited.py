"""The kernels of a run, which another process may be compiling as its ranks start."""

from __future__ import annotations

import logging
import time

from penteract.config.resolve.write_run_file import run_values
from penteract.config.run import RunSpec
from penteract.engine.device.compiled_ahead import WAIT_S, CompiledAhead
from penteract.engine.kernels.registry import TargetHere
from penteract.engine.rank.rank import Rank

log = logging.getLogger("penteract")


def await_kernels(spec: RunSpec, rank: Rank) -> None:
    """Wait while a process of this host compiles them: this one would do the same, and one after the other. What it did
    not compile is compiled here when it is called."""
    capability = TargetHere(rank.device).capability
    if not any(capability):  # no GPU
        return
    ahead = CompiledAhead.of(run_values(spec), capability)
    began = time.monotonic()
    found = None if ahead is None else ahead.wait(min(WAIT_S, rank.progress.limit / 2))
    seconds, failed = time.monotonic() - began, [row for row in found or [] if row["error"]]
    log.debug("waited %.1f s for kernels, of which %d were not compiled ahead: %s", seconds, len(failed), failed[:3])
    if ahead is not None and (found is None or failed) and ahead.log.exists() and rank.number == 0:
        log.info("not all kernels were compiled ahead: see %s", ahead.log)
