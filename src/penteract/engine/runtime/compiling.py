"""Start the process that compiles a run's kernels while its ranks start. Imports no torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec

from penteract.config.resolve.resolved_run import Resolved
from penteract.config.resolve.write_run_file import run_values, to_toml
from penteract.engine.device.children import bound_to_parent
from penteract.engine.device.compiled_ahead import CompiledAhead
from penteract.engine.device.cpu_affinity import usable_here

COMPILER = "penteract.engine.session.ahead.compile_step"
SPARE = 4  # cores beside one for each rank: with fewer, ranks compile sooner by themselves


@contextmanager
def compiling(
    resolved: Resolved, capability: tuple[int, int] | None, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes] | None]:
    """Within: a process compiles for the ranks of this host. None where that is done already, where another rank's
    process does it, without GPUs (which have a `capability`), or with too few cores. It uses no GPU, and nothing fails
    if it does."""
    process = None
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        process = None if capability is None else _begun(resolved, capability, environment)
    try:
        yield process
    finally:
        if process is not None:
            process.kill()
            process.wait()


def _begun(
    resolved: Resolved, capability: tuple[int, int], environment: Mapping[str, str]
) -> subprocess.Popen[bytes] | None:
    world = resolved.run.layout.world
    here, first = int(environment.get("LOCAL_WORLD_SIZE", world)), int(environment.get("RANK", 0))
    last = min(first + here, world)
    if int(environment.get("LOCAL_RANK", 0)) or usable_here() < here + SPARE or find_spec("triton") is None:
        return None
    ahead = CompiledAhead.of(run_values(resolved.run), capability)
    if ahead is None or (lock := ahead.hold()) is None:
        return None
    words = ["-m", COMPILER, str(ahead.run), f"--capability={'.'.join(map(str, capability))}"]
    words.append(f"--ranks={','.join(map(str, range(first, last)))}")
    hidden = dict(environment) | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    try:
        ahead.run.write_text(to_toml(resolved))
        with ahead.log.open("wb") as said:
            return subprocess.Popen(
                [sys.executable, *words], env=hidden, stdin=subprocess.DEVNULL, stdout=said, stderr=said,
                pass_fds=(lock,), start_new_session=True, preexec_fn=bound_to_parent(),
            )  # fmt: skip
    finally:
        os.close(lock)  # the process has it
