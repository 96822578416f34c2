"""The process that compiles a run's kernels before its ranks need them: `python -m …compile_step RUN.toml
--capability=9.0 --ranks=0,1`. It makes the first step of each rank without numbers, on the host's cores."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from penteract.config.mesh import Mesh
from penteract.config.resolve.resolved_run import resolve
from penteract.config.run import RunSpec
from penteract.engine.comm.comm import Comm, Ranks
from penteract.engine.comm.fake import FakeComm
from penteract.engine.comm.journal import Journal
from penteract.engine.data.blank import Blank
from penteract.engine.device.compiled_ahead import WAIT_S, CompiledAhead
from penteract.engine.device.cpu_affinity import usable_here
from penteract.engine.device.device import Meta
from penteract.engine.kernels import registry
from penteract.engine.rank.rank import Rank
from penteract.engine.rank.rank_progress import RankProgress
from penteract.engine.session.ahead.without_gpu import Compiling
from penteract.engine.session.stand_ins import stand_ins
from penteract.engine.session.trainer import Place, Trainer

MOST, EXPENDABLE = 16, "500"  # children at once; of all processes, these are the first that a lack of memory ends


class _Alone(Meta):
    """No device, and no peers."""

    def comm(self, rank: int, journal: Journal | None = None, limit: float = 600.0) -> Comm:
        return FakeComm(rank, self)

    def on_wire(self, kind: str, ranks: Ranks, amount: int, what: str = "") -> Any:
        return self

    def wait(self) -> None: ...


def compile_step_of(spec: RunSpec, rank: int, capability: tuple[int, int], compiling: Compiling) -> None:
    """Go through the first step of a rank, and compile each kernel of it for GPUs of a compute capability."""
    meta = torch.device("meta")
    target, cuda = registry.TargetElsewhere("cuda", "", capability), torch.device("cuda")
    place = Place(
        _Alone(), target, lambda p: compiling.of(p, registry.kernels(p, cuda)), initialise=lambda p, state, seed: None
    )
    with stand_ins(launches=False):
        trainer = Trainer.on(spec, Rank(rank, spec.layout.world, meta, None, RankProgress(spec.limits)), place)
        samples: Any = Blank(spec.sequence_length)
        trainer.start(1, samples, 0)


def kinds_of_ranks(spec: RunSpec, ranks: Sequence[int]) -> list[int]:
    """One of these ranks for each pipeline rank: the others have the same kernels."""
    mesh = Mesh(spec.layout)
    return sorted({mesh.coordinates(rank)["pp"]: rank for rank in reversed(ranks)}.values())


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
        left = {"seconds": WAIT_S, "folder": "", "error": "was not compiled while ranks waited"}
        ahead.note([*made(), *({"name": name, **left} for name in compiling.children.values())])
        os._exit(1)  # its children end with it

    signal.signal(signal.SIGALRM, late)
    signal.alarm(int(WAIT_S))
    registry.load_package = lambda name: None
    compiling.triton(asked.capability)
    whole = True
    for rank in kinds_of_ranks(spec, asked.ranks):
        with compiling.failing():
            compile_step_of(spec, rank, asked.capability, compiling)
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
