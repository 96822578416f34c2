"""The process that compiles a run's kernels before its ranks need them: `python -m …compile_step RUN.toml
--capability=9.0 --ranks=0,1`. It makes the first step of each rank without numbers, on the host's cores.

Ranks wait for its slowest kernel, which is one that a package compiles. So it imports torch and what tells which
packages those are, and a child begins to import them; the rest of this is done meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from penteract.config.mesh import Mesh
from penteract.config.resolve.resolved_run import resolve
from penteract.config.run import RunSpec
from penteract.engine.device.compiled_ahead import WAIT_S, CompiledAhead
from penteract.engine.device.cpu_affinity import usable_here
from penteract.engine.device.lazy_compiler import leave_out_compiler
from penteract.engine.kernels import registry
from penteract.engine.kernels.kernel import WithoutGpu
from penteract.engine.session.ahead.package_calls import without_gpu
from penteract.engine.session.ahead.without_gpu import Compiling
from penteract.ops.declarations import implementation
from penteract.step.program import compile_run

STEP = "penteract.engine.session.ahead.first_step"  # imported late
MOST, EXPENDABLE = 16, "500"  # children at once; of all processes, these are the first that a lack of memory ends


def kinds_of_ranks(spec: RunSpec, ranks: Sequence[int]) -> list[int]:
    """One of these ranks for each pipeline rank: the others have the same kernels."""
    mesh = Mesh(spec.layout)
    return sorted({mesh.coordinates(rank)["pp"]: rank for rank in reversed(ranks)}.values())


def packages_of(spec: RunSpec, rank: int) -> list[WithoutGpu]:
    """What compiles the kernels of a rank's step, beside Triton. Empty where that cannot be told."""
    with suppress(Exception):  # what goes through the step says why
        p = compile_run(spec, rank)
        chosen = [implementation(site, p.layout)[0] for site in registry.computed_sites(p)]
        found = {one.kernels["cuda"]: without_gpu(one) for one in chosen}
        return [how for how in found.values() if how is not None]
    return []


def main(argv: list[str]) -> int:
    """Compile; the kernels that were are noted for ranks and later runs."""
    parser = argparse.ArgumentParser(prog="penteract.engine.session.ahead.compile_step")
    parser.add_argument("run", type=Path)
    parser.add_argument("--capability", type=lambda text: tuple(map(int, text.split("."))))
    parser.add_argument("--ranks", type=lambda text: list(map(int, text.split(","))))
    asked = parser.parse_args(argv)
    with suppress(OSError):
        os.nice(5)
        Path("/proc/self/oom_score_adj").write_text(EXPENDABLE)
    torch.set_grad_enabled(False)
    spec = resolve(asked.run, "").run
    ahead = CompiledAhead(asked.run.with_suffix(""))
    rows = asked.run.with_suffix(".rows")
    rows.unlink(missing_ok=True)
    compiling = Compiling(rows, min(MOST, max(2, usable_here() - len(asked.ranks))))

    def made() -> list[dict[str, Any]]:
        return [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []

    def late(*_: object) -> None:
        """Ranks wait no longer, and compile what is left: a later run need not wait for it again."""
        done, left = made(), {"seconds": WAIT_S, "folder": "", "error": "was not compiled while ranks waited"}
        ahead.note([*done, *({"name": name, **left} for name in compiling.pending(row["name"] for row in done))])
        os._exit(1)  # its children end with it

    signal.signal(signal.SIGALRM, late)
    signal.alarm(int(WAIT_S))
    registry.load_package = lambda name: None
    compiling.triton(asked.capability)
    kinds, whole = kinds_of_ranks(spec, asked.ranks), True
    with compiling.failing():
        compiling.import_packages(packages_of(spec, kinds[0]))
    leave_out_compiler()
    step = import_module(STEP)
    for rank in kinds:
        with compiling.failing():
            step.compile_first_step(spec, rank, asked.capability, compiling)
            continue
        whole = False  # what was raised is printed
    compiling.wait()
    signal.alarm(0)
    if not whole or compiling.died:  # a later run tries again
        return 1
    ahead.note(made())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
