"""The kernels of a run, which another process may be compiling as its ranks start."""

from __future__ import annotations

import logging
import time

import torch

from penteract.config.resolve.write_run_file import run_values
from penteract.config.run import RunSpec
from penteract.engine.device.compiled_ahead import CompiledAhead
from penteract.engine.rank.rank import Rank

log = logging.getLogger("penteract")


def await_kernels(spec: RunSpec, rank: Rank) -> None:
    """Wait while a process of this host compiles them: this one would do the same, and one after the other. What it did
    not compile is compiled here when it is called, and a line of the log says why."""
    if rank.device.type != "cuda":
        return
    ahead = CompiledAhead.of(run_values(spec), torch.cuda.get_device_capability(rank.device))
    began = time.monotonic()
    line = "" if ahead is None else ahead.wait()
    log.debug("waited %.1f s for kernels to be compiled", time.monotonic() - began)
    if line and rank.number == 0:
        log.info("%s", line)
