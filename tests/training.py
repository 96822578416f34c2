"""Several optimizer steps of one rank, in float64, and the parameters that they end with."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from layouts import CPU, Case
from penteract.config.run import Optimizer
from penteract.engine.comm.distributed import Gloo
from penteract.engine.comm.groups import ProcessGroups
from penteract.engine.executor.allocator import Fresh
from penteract.engine.executor.executor import Executor
from penteract.engine.executor.feed import constants, micro_batch, samples_of, target_count
from penteract.engine.executor.initial_weights import initialise
from penteract.engine.kernels.reference import REFERENCE
from penteract.engine.optim.muon import Muon
from penteract.engine.optim.optimizer import AdamW
from penteract.engine.state.state import allocate
from penteract.step.program import Program
from penteract.step.walk import walk
from samples import sample

OPTIMIZER = Optimizer(learning_rate=1e-2, weight_decay=0.1, clip_norm=0.5)


def trainer(case: Case, p: Program, groups: ProcessGroups) -> Executor:
    """One rank in float64, with AdamW, or Muon where the case has it move matrices."""
    state = allocate(p, CPU)
    initialise(p, state, 0)
    comm = Gloo(p.rank, groups)
    muon = case.optimizer_kinds.matrices.by_matrix
    optimizer = Muon(OPTIMIZER, CPU, comm=comm, policy=p.precision) if muon else AdamW(OPTIMIZER, CPU)
    optimizer.rate.fill_(OPTIMIZER.learning_rate)
    return Executor(p, state, comm, REFERENCE, Fresh(p.precision, CPU), optimizer)


def train(run: Executor, steps: int) -> Iterator[float]:
    """-> the loss of each step. At the end no all-gather of parameters is under way: an answer to the pool moves its
    storages to shared memory, and a gather that began before would read what was freed."""
    p = run.p
    for step in range(steps):
        assert run.optimizer is not None
        run.optimizer.step.fill_(step + 1)
        first = step * p.layout.global_batch_size
        mine = [[sample(i, p.sequence_length, p.model.vocab_size) for i in ids] for ids in samples_of(p, first)]
        run.micro_batches = [constants(p, CPU) | micro_batch(p, samples, CPU) for samples in mine]
        run.counts.fill_(sum(target_count(samples) for samples in mine))
        walk(p, run, targets_counted=False)
        yield run.totals[1].item()
    run.settle_parameters()


def whole(run: Executor) -> dict[str, torch.Tensor]:
    """This rank's parameters, gathered where they are cut; padding is no parameter and stays zero."""
    run.settle_parameters()
    out = dict[str, torch.Tensor]()
    for flat in run.state.flats:
        b, buffer = flat.bucket, flat.parameter
        if b.cut_parameters:
            buffer = torch.full((b.size,), float("nan"), dtype=flat.own_parameter.dtype)
            run.comm.finish(run.comm.start("all_gather", b.shard_ranks, flat.own_parameter, buffer, {}))
        for q, at in zip(b.params, b.offsets, strict=True):
            out[q.name] = buffer[at : at + q.numel(run.p.mesh)].view(q.local_shape(run.p.mesh))
        assert not buffer[b.offsets[-1] + b.params[-1].numel(run.p.mesh) :].any()
    return out
