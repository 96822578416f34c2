"""The weights that a run starts from: each parameter is a function of (seed, name) alone, so every layout starts from
the same model. Parameters are drawn side by side on the host's cores, as each has a generator of its own."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from penteract.engine.executor.state import TrainingState, fill
from penteract.engine.runtime.cpu_affinity import usable_here
from penteract.ops.params import Param
from penteract.step.program import Program

FEW = 2**24  # elements: so many are drawn before threads have started
MOST = 8  # threads: each holds one whole parameter in fp32


def initialise(p: Program, state: TrainingState, seed: int) -> None:
    """Fill parameters, and their master weights."""
    few = sum(q.numel(p.mesh) for q in p.params) < FEW
    fill(state, ((q, initial(p, q, seed)) for q in p.params) if few else drawn(p, seed))


def drawn(p: Program, seed: int) -> Iterator[tuple[Param, torch.Tensor]]:
    """The parameters of a rank in their order, each with its rectangle; a few are drawn ahead."""
    here = max(1, torch.cuda.device_count())  # ranks that share the host's cores
    threads = max(1, min(MOST, usable_here() // here))
    waiting = deque[tuple[Param, Future[torch.Tensor]]]()
    with ThreadPoolExecutor(threads) as pool:
        for q in p.params:
            waiting.append((q, pool.submit(initial, p, q, seed)))
            if len(waiting) > threads:
                yield _first(waiting)
        while waiting:
            yield _first(waiting)


def _first(waiting: deque[tuple[Param, Future[torch.Tensor]]]) -> tuple[Param, torch.Tensor]:
    q, made = waiting.popleft()
    return q, made.result()


def initial(p: Program, q: Param, seed: int) -> torch.Tensor:
    """This rank's rectangle of a parameter, made from the whole."""
    if q.scale is None:
        return torch.full(q.local_shape(p.mesh), q.fill)
    digest = hashlib.sha256(f"{seed}/{q.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    whole = torch.randn(q.shape, generator=generator).mul_(q.scale)
    for dim, (at, n) in enumerate(zip(q.offset(p.mesh, p.rank), q.local_shape(p.mesh), strict=True)):
        whole = whole.narrow(dim, at, n)
    return whole
