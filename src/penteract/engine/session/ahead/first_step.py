"""The first step of a rank without numbers, of which each kernel is compiled. Imported once packages of kernels are
being imported beside it: what it imports takes as long."""

from __future__ import annotations

from typing import Any

import torch

from penteract.config.run import RunSpec
from penteract.engine.comm.comm import Comm, Ranks
from penteract.engine.comm.fake import FakeComm
from penteract.engine.comm.journal import Journal
from penteract.engine.data.blank import Blank
from penteract.engine.device.device import Meta
from penteract.engine.kernels import registry
from penteract.engine.rank.rank import Rank
from penteract.engine.rank.rank_progress import RankProgress
from penteract.engine.session.ahead.without_gpu import Compiling
from penteract.engine.session.stand_ins import stand_ins
from penteract.engine.session.trainer import Place, Trainer


class _Alone(Meta):
    """No device, and no peers."""

    def comm(self, rank: int, journal: Journal | None = None, limit: float = 600.0) -> Comm:
        return FakeComm(rank, self)

    def on_wire(self, kind: str, ranks: Ranks, amount: int, what: str = "") -> Any:
        return self

    def wait(self) -> None: ...


def compile_first_step(spec: RunSpec, rank: int, capability: tuple[int, int], compiling: Compiling) -> None:
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
        if trainer.repeated is not None:  # which may walk any step again, with other kernels
            trainer.ask(1, samples, 0, trainer.repeated.exact)
