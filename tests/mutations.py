"""Faults put into a step on purpose, the same on every rank: what the suite must see."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import layouts
from layouts import Subject
from penteract.config.precision.policy import Policy
from penteract.engine.comm.comm import Work
from penteract.engine.comm.distributed import Distributed
from penteract.engine.executor import feed
from penteract.engine.executor.executor import Executor
from penteract.engine.state.state import Flat
from penteract.ops.declarations import OPS
from penteract.ops.lower import Instruction
from penteract.ops.params import reduce_ranks
from penteract.parallel import data
from penteract.parallel.data import Bucket
from penteract.readings import price as price_module
from penteract.readings.layers.expert_load import Balanced
from penteract.step.events import Around
from penteract.step.program import compile_step

# ---- wrong rules of the price ------------------------------------------------------------------------------------


def gathers_counted_by_their_input(s: Subject) -> None:
    s.patches.enter_context(patch.object(price_module, "payload", lambda kind, x, y: x))


def attention_backward_counted_as_forward(s: Subject) -> None:
    def flops(self: Any, phase: str, ins: Any, weights: Any, attrs: Any) -> int:
        return 4 * prod(ins[0]) * ins[1][0]

    s.patches.enter_context(patch.object(type(OPS["attention"].declaration), "flops", flops))


def statistics_counted_in_half_width(s: Subject) -> None:
    halved = {**s.priced.widths, "stat": 4}
    s.patches.enter_context(patch.object(Policy, "widths", property(lambda _: halved)))


def routing_taken_for_balanced(s: Subject) -> None:
    balanced = Balanced.of(s.priced.model, s.priced.layout, s.priced.sequence_length)
    s.patches.enter_context(patch.object(layouts, "Recorded", lambda rows: balanced))


# ---- a wrong rule that price and run share -----------------------------------------------------------------------


def tensor_ranks_left_out_of_reductions(s: Subject) -> None:
    p = s.priced

    def only_dp(param: Any, owning_pp_ranks: Any, mesh: Any, rank: int) -> tuple[int, ...]:
        return mesh.group("dp", rank)

    with patch.object(data, "reduce_ranks", only_dp):
        wrong = compile_step(p.model, p.layout, p.sequence_length, rank=p.rank, precision=p.precision)
    s.priced = s.program = wrong


def gathered_keys_taken_for_ordered(s: Subject) -> None:
    """The zigzag forgotten: chunks i and 2n-1-i of rank i are labelled as if they lay in a row."""
    s.patches.enter_context(patch.object(feed, "_gathered", lambda length, ranks: np.arange(length)))


# ---- collectives -------------------------------------------------------------------------------------------------


def bucket_not_reduced(s: Subject) -> None:
    events = {
        at: Around(*(tuple(e for e in some if e[0] != "reduce") for some in told))
        for at, told in s.priced.events.items()
    }
    s.program = replace(s.priced, events=events)


def bucket_reduced_twice(s: Subject) -> None:
    reduce = Executor.reduce

    def twice(self: Executor, bucket: int) -> None:
        reduce(self, bucket)
        self.comm.finish(self.reducing[bucket])
        reduce(self, bucket)

    s.patches.enter_context(patch.object(Executor, "reduce", twice))


def target_counts_not_summed(s: Subject) -> None:
    real = Distributed.sum

    def only_floats(self: Distributed, ranks: Any, x: torch.Tensor) -> Work | None:
        return real(self, ranks, x) if x.is_floating_point() else None

    s.patches.enter_context(patch.object(Distributed, "sum", only_floats))


def _instead_of(s: Subject, kind: str, stand_in: Any) -> None:
    real = Distributed.start

    def start(self: Distributed, said: str, ranks: Any, x: torch.Tensor, y: torch.Tensor, attrs: Any) -> Work:
        if said == kind:
            return stand_in(lambda: real(self, said, ranks, x, y, attrs), self, x, y)
        return real(self, said, ranks, x, y, attrs)

    s.patches.enter_context(patch.object(Distributed, "start", start))


def gather_dropped(s: Subject) -> None:
    def own(real: Any, comm: Distributed, x: torch.Tensor, y: torch.Tensor) -> Work:
        y.copy_(x.repeat(len(y) // len(x), *[1] * (x.dim() - 1)))
        return Work([], (x, y))

    _instead_of(s, "all_gather", own)


def gather_doubled(s: Subject) -> None:
    def twice(real: Any, comm: Distributed, x: torch.Tensor, y: torch.Tensor) -> Work:
        comm.finish(real())
        return real()

    _instead_of(s, "all_gather", twice)


def scatter_dropped(s: Subject) -> None:
    """Under context by gathering, the only such collective is a redistribution's backward."""

    def own(real: Any, comm: Distributed, x: torch.Tensor, y: torch.Tensor) -> Work:
        y.copy_(x[: len(y)])
        return Work([], (x, y))

    _instead_of(s, "reduce_scatter", own)


def ring_turned_round(s: Subject) -> None:
    real = Distributed._shift

    def shift(self: Distributed, group: Any, ranks: Any, x: torch.Tensor, y: torch.Tensor) -> Work:
        return real(self, group, ranks[::-1], x, y)

    s.patches.enter_context(patch.object(Distributed, "_shift", shift))


# ---- shards ------------------------------------------------------------------------------------------------------


def shards_of_the_next_holder(s: Subject) -> None:
    """Each rank takes its neighbour's part of a bucket for its own."""

    def shard(self: Bucket, rank: int) -> range:
        at = (self.shard_ranks.index(rank) + 1) % self.shards * self.shard_size
        return range(at, at + self.shard_size)

    s.patches.enter_context(patch.object(Bucket, "shard", shard))


def first_shard_gathered(s: Subject) -> None:
    first = property(lambda flat: flat.parameter[: len(flat.shard)])
    s.patches.enter_context(patch.object(Flat, "own_parameter", first))


def shards_not_gathered(s: Subject) -> None:
    s.patches.enter_context(patch.object(Executor, "gather", lambda self, bucket: None))


def shards_summed_by_all(s: Subject) -> None:
    """An all-reduce where a reduce-scatter would do."""

    def everywhere(self: Executor, bucket: int) -> None:
        flat = self.state.flats[bucket]
        self.reducing[bucket] = self.comm.sum(flat.bucket.reduce_ranks, flat.gradient)

    s.patches.enter_context(patch.object(Executor, "reduce", everywhere))


def padding_not_cleared(s: Subject) -> None:
    """What is left of another unit in a place of the ring counts in the norm."""

    def opened(self: Executor, bucket: int) -> None:
        self.written.difference_update(q.name for q in self.state.flats[bucket].bucket.params)

    s.patches.enter_context(patch.object(Executor, "acquire_gradient_buffer", opened))


def micro_batches_not_added(s: Subject) -> None:
    wait = Executor.wait_reduce_scatter

    def last(self: Executor, bucket: int) -> None:
        self.added.discard(bucket)
        wait(self, bucket)

    s.patches.enter_context(patch.object(Executor, "wait_reduce_scatter", last))


def unit_not_gathered_again(s: Subject) -> None:
    """Parameters of the unit that lay there before are taken for its own."""
    asked = set[int]()
    gather = Executor.gather

    def once(self: Executor, bucket: int) -> None:
        if bucket not in asked:
            gather(self, bucket)
        asked.add(bucket)

    s.patches.enter_context(patch.object(Executor, "gather", once))


def replicas_not_summed(s: Subject) -> None:
    s.patches.enter_context(patch.object(Executor, "replicate", lambda self, bucket: None))


# ---- kernels and registers ----------------------------------------------------------------------------------------


def weight_gradient_doubled(s: Subject) -> None:
    real = s.kernels["linear"].weight_gradient
    assert real is not None

    def doubled(env: Any, site: Any, ins: Any, into: Any, add: bool) -> None:
        real(env, site, [ins[0], 2 * ins[1]], into, add)

    s.kernels["linear"] = replace(s.kernels["linear"], weight_gradient=doubled)


def last_micro_batch_wins(s: Subject) -> None:
    real = s.kernels["rms_norm"].weight_gradient
    assert real is not None

    def written(env: Any, site: Any, ins: Any, into: Any, add: bool) -> None:
        real(env, site, ins, into, False)

    s.kernels["rms_norm"] = replace(s.kernels["rms_norm"], weight_gradient=written)


def gradient_never_written(s: Subject) -> None:
    s.kernels["rms_norm"] = replace(s.kernels["rms_norm"], weight_gradient=lambda *_: None)


def product_made_twice(s: Subject) -> None:
    real = s.kernels["linear"].forward

    def twice(*arguments: Any) -> None:
        real(*arguments)
        real(*arguments)

    s.kernels["linear"] = replace(s.kernels["linear"], forward=twice)


def rows_not_regrouped(s: Subject) -> None:
    def as_they_came(env: Any, site: Any, ins: Any, weights: Any, outs: Any) -> None:
        outs[0].copy_(ins[0])

    s.kernels["sort_chunks"] = replace(s.kernels["sort_chunks"], forward=as_they_came)


def choices_not_tallied(s: Subject) -> None:
    s.kernels["tokens_per_expert"] = replace(s.kernels["tokens_per_expert"], forward=lambda *_: None)


def register_never_freed(s: Subject) -> None:
    chunk = s.priced.chunks[0]
    actions = dict(chunk.actions)
    forward = list(actions["Fwd"])
    at = next(i for i, instruction in enumerate(forward) if instruction.frees)
    forward[at] = Instruction(forward[at].call, ())
    actions["Fwd"] = tuple(forward)
    s.program = replace(s.priced, chunks=(replace(chunk, actions=actions), *s.priced.chunks[1:]))


# ---- ranks -------------------------------------------------------------------------------------------------------


def second_rank_raises(s: Subject) -> None:
    if s.priced.rank == 1:
        raise ArithmeticError("on purpose")


# ---- latents, and what is predicted ahead ------------------------------------------------------------------------


def documents_run_together_ahead(s: Subject) -> None:
    """What is k further counts, whatever lies between."""
    real = feed._shifted

    def further(sample: Any, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        return real(replace(sample, start=torch.zeros_like(sample.start)), k)

    s.patches.enter_context(patch.object(feed, "_shifted", further))


def targets_ahead_not_counted(s: Subject) -> None:
    """Every depth is divided by the number of next tokens."""
    real = layouts.target_counts

    def counts(p: Any, batches: Any) -> list[int]:
        return [real(p, batches)[0]] * len(p.means)

    s.patches.enter_context(patch.object(layouts, "target_counts", counts))


def embedding_kept_at_home(s: Subject) -> None:
    """The last stage's use of the table is not summed with the first stage's."""
    p = s.priced

    def alone(param: Any, owning_pp_ranks: tuple[int, ...], mesh: Any, rank: int) -> tuple[int, ...]:
        here = (mesh.coordinates(rank)["pp"],)
        return reduce_ranks(param, here, mesh, rank)

    with patch.object(data, "reduce_ranks", alone):
        wrong = compile_step(p.model, p.layout, p.sequence_length, rank=p.rank, precision=p.precision)
    s.priced = s.program = wrong


def rotated_key_of_one_head(s: Subject) -> None:
    """The gradient of the key that heads share is the first head's alone."""
    real = s.kernels["unfold_heads"].input_gradient
    assert real is not None

    def first(env: Any, site: Any, ins: Any, weights: Any, outs: Any) -> None:
        real(env, site, ins, weights, outs)
        plain = int(site.attrs["plain_size"])
        outs[1].copy_(ins[0][..., plain : plain + outs[1].shape[-1]])

    s.kernels["unfold_heads"] = replace(s.kernels["unfold_heads"], input_gradient=first)
