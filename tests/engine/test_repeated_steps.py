"""Steps whose copies of tokens do not fit the blocks that ranks send each other: they are repeated with exact sizes,
and the run is that of exact sizes, to the bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch

from layouts import CPU
from penteract.config.layout import Layout
from penteract.config.resolve.resolved_run import resolve
from penteract.config.run import RunSpec
from penteract.engine.comm.groups import ProcessGroups
from penteract.engine.executor.allocator import Arena, Spare
from penteract.engine.executor.outcome import Outcome
from penteract.engine.kernels.kernel import Env, TorchKernel
from penteract.engine.rank.rank import Rank
from penteract.engine.rank.rank_progress import RankProgress
from penteract.engine.session.trainer import Trainer
from penteract.measure.bench.ranks.random_samples import RandomSamples
from pool import Pool

SMALL = (
    "parallel.dp=2", "parallel.ep=2", "parallel.ep_method=all_to_all", "kernels.experts=grouped",
    "precision.dtype=fp32", "batch.sequence_length=32", "batch.micro_batch_size=1", "batch.global_batch_size=4",
    "training.steps=40", "model.layers=2", "model.hidden_size=64", "model.moe.every=1",
)  # fmt: skip
STEPS = 12
REPEATS = 8  # steps of which the first that is in blocks is repeated, and one after those of exact sizes
NEVER = range(0)


class Trained(NamedTuple):
    """What a rank saw of a run: losses and norms, its weights at the end, and the steps that were repeated."""

    numbers: list[tuple[float, float]]
    weights: list[torch.Tensor]
    repeated: list[tuple[int, int]]
    exact: list[int]  # steps that had exact sizes


def run_of(*more: str) -> RunSpec:
    return resolve(None, "tiny-moe", [*SMALL, *more], world=2).run


def trained(
    rank: int, groups: ProcessGroups, layout: Layout, run: RunSpec, steps: int, ahead: bool, full: range = NEVER
) -> Trained:
    """`ahead`: outcomes are read when the next step has begun; `full`: steps of which copies are said not to fit."""
    trainer = Trainer.build(run, Rank(rank, 2, CPU, None, RankProgress(run.limits)))
    started = _started(trainer)
    samples, size = RandomSamples(run.model.vocab_size, run.sequence_length, 8), run.layout.global_batch_size
    numbers, repeated, exact = list[tuple[float, float]](), list[tuple[int, int]](), set[int]()
    if trainer.repeated is not None:
        trainer.repeated.warn = lambda *about: repeated.append(about)
        exact = trainer.repeated.exact_steps
        if full:
            _fill(trainer, full)
    under_way = list[Callable[[], Outcome]]()
    for number in range(1, steps + 1):
        under_way.append(trainer.start(number, samples, (number - 1) * size))  # type: ignore[arg-type]
        while len(under_way) > (ahead and number < steps):
            outcome = under_way.pop(0)()
            numbers.append((outcome.loss, outcome.norm))
    trainer.run.settle_parameters()
    assert not started, "a collective that nobody waits for"
    weights = [flat.master.clone() for flat in trainer.state.flats]
    assert int(trainer.run.done) == steps
    return Trained(numbers, weights, repeated, sorted(exact))


def _started(trainer: Trainer) -> set[Any]:
    """Gathers that have begun and are not waited for yet, from now on."""
    comm, started = trainer.run.comm, set[Any]()
    start, finish = comm.start, comm.finish

    def begun(kind: str, *about: Any) -> Any:
        work = start(kind, *about)
        if kind == "all_gather":
            started.add(id(work))
        return work

    def ended(work: Any) -> None:
        started.discard(id(work))
        finish(work)

    comm.start, comm.finish = begun, ended  # type: ignore[method-assign]
    return started


def _fill(trainer: Trainer, full: range) -> None:
    kernel, step = trainer.run.kernels["block_places"], trainer.run.optimizer
    assert step is not None

    def forward(env: Env, *about: Any) -> None:
        kernel.forward(env, *about)  # type: ignore[misc]
        if int(step.step) in full:
            env.overflow.fill_(torch.nan)  # type: ignore[union-attr]

    trainer.run.kernels = {**trainer.run.kernels, "block_places": TorchKernel(forward)}


@cache
def exact_run(pool: Pool, more: tuple[str, ...]) -> list[Trained]:
    """What blocks must give, whether the host is ahead or not."""
    run = run_of(*more)
    return pool.run(trained, run.layout, run, REPEATS, False)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    "more",
    [
        (), ("parallel.zero=3", "memory.recompute=full"), ("parallel.zero=1", "optimizer.kind=muon"),
        ("model.moe.score=sigmoid", "model.moe.balance=bias", "memory.offload_optimizer=true", "parallel.zero=1"),
        ("precision.dtype=fp8_delayed",), ("precision.dtype=fp8_tensorwise", "parallel.zero=3"),
        ("precision.dtype=bf16", "model.moe.top_k=4", "precision.moments=int8", "memory.offload=layer_inputs",
         "memory.recompute=full"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_run_in_blocks_is_the_run_of_exact_sizes(pool: Pool, ahead: bool, more: tuple[str, ...]) -> None:
    run = run_of(*more, "parallel.expert_rows=padded", "parallel.capacity_percent=100")
    padded = pool.run(trained, run.layout, run, REPEATS, ahead)
    for rank, (one, other) in enumerate(zip(exact_run(pool, more), padded, strict=True)):
        assert len(other.repeated) > 1 and not one.repeated, rank
        assert one.numbers == other.numbers
        assert all(map(torch.equal, one.weights, other.weights))


def test_the_more_often_copies_do_not_fit_the_longer_sizes_are_exact(pool: Pool) -> None:
    """And when they fit again, blocks are back; the device is asked for a step more where the host is ahead."""
    run = run_of("parallel.expert_rows=padded", "parallel.capacity_percent=200")
    never = pool.run(trained, run.layout, run, STEPS, True)[0]
    assert not never.repeated and not never.exact
    for ahead, repeated, exact in (
        (False, [(3, 1), (5, 2)], [3, 4, 5, 6, 7]), (True, [(3, 1), (6, 2)], [3, 4, 5, 6, 7, 8, 9]),
    ):  # fmt: skip
        made = pool.run(trained, run.layout, run, STEPS, ahead, range(3, 7))[0]
        assert (made.repeated, made.exact) == (repeated, exact)
        assert made.numbers == never.numbers and all(map(torch.equal, made.weights, never.weights))


def ended(
    rank: int, groups: ProcessGroups, layout: Layout, run: RunSpec, stops: bool
) -> tuple[list[Outcome], int, bool]:
    """Three steps, of which copies of the second do not fit, and the third begins before its outcome is read. A stop is
    asked for in the second (`stops`), or its loss is not finite. -> outcomes, what is done, and whether the third left
    the weights alone."""
    trainer = Trainer.build(run, Rank(rank, 2, CPU, None, RankProgress(run.limits)))
    samples, size = RandomSamples(run.model.vocab_size, run.sequence_length, 8), run.layout.global_batch_size
    assert trainer.repeated is not None
    _fill(trainer, range(2, 3))
    first = trainer.start(1, samples, 0)()  # type: ignore[arg-type]
    if stops:
        trainer.run.stop.fill_(float(rank == 0))
    else:
        next(iter(trainer.state.parameters.values())).view(-1)[0] = torch.nan
    second = trainer.start(2, samples, size)  # type: ignore[arg-type]
    trainer.run.stop.fill_(0)
    third = trainer.start(3, samples, 2 * size)  # type: ignore[arg-type]
    outcomes = [first, second()]
    weights = [flat.master.nan_to_num() for flat in trainer.state.flats]
    outcomes.append(third())
    same = all(torch.equal(flat.master.nan_to_num(), x) for flat, x in zip(trainer.state.flats, weights, strict=True))
    return outcomes, int(trainer.run.done), same


@pytest.mark.parametrize("stops", [True, False])
def test_a_step_that_ends_the_run_ends_it_repeated_too(pool: Pool, stops: bool) -> None:
    run = run_of("parallel.expert_rows=padded", "parallel.capacity_percent=200")
    for outcomes, done, same in pool.run(ended, run.layout, run, stops):
        assert [one.finite for one in outcomes] == [True, stops, False] and same
        assert (outcomes[1].stop, done) == (stops, 2 if stops else 1)


class _Once:
    """Samples that cannot be read once, by one rank, from that of a step on."""

    def __init__(self, samples: Any, rank: int, first: int, times: int) -> None:
        self.samples, self.first, self.left = samples, first, times if rank == 1 else 0

    def sample(self, index: int) -> Any:
        if index >= self.first and self.left:
            self.left -= 1
            raise OSError("not now")
        return self.samples.sample(index)


def unread(
    rank: int, groups: ProcessGroups, layout: Layout, run: RunSpec, at: int, ahead: bool
) -> tuple[list[Outcome], int]:
    """Steps of which copies of the third do not fit, while one rank cannot read the batch of step `at` at first. ->
    outcomes up to the one that stops, and what is done then."""
    trainer = Trainer.build(run, Rank(rank, 2, CPU, None, RankProgress(run.limits)))
    _fill(trainer, range(3, 4))
    size = run.layout.global_batch_size
    samples: Any = _Once(RandomSamples(run.model.vocab_size, run.sequence_length, 8), rank, (at - 1) * size, 1)
    outcomes, under_way = list[Outcome](), list[Callable[[], Outcome]]()
    for number in range(1, STEPS):
        under_way.append(trainer.start(number, samples, (number - 1) * size))
        while len(under_way) > ahead:
            outcomes.append(under_way.pop(0)())
            if outcomes[-1].stop:
                assert (trainer.loader.failed is None) == (rank == 0)
                return outcomes, int(trainer.run.done)
    raise AssertionError("no step stopped the run")


@pytest.mark.parametrize("at", [4, 5, 6, 7])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_batch_that_cannot_be_read_stops_all_ranks_after_the_step_before(pool: Pool, at: int, ahead: bool) -> None:
    """Also while a step is repeated, and where sizes are exact: that step is done, and nobody waits for anybody."""
    run = run_of("parallel.expert_rows=padded", "parallel.capacity_percent=200")
    for outcomes, done in pool.run(unread, run.layout, run, at, ahead, timeout=60):
        assert [one.finite for one in outcomes] == [True] * (at - 1) and done == at - 1
        assert [one.stop for one in outcomes] == [False] * (at - 2) + [True]


def roomy(rank: int, groups: ProcessGroups, layout: Layout, run: RunSpec) -> tuple[int, int, bool]:
    """Registers of routed size of a repeated step: those that lay in the spare room of blocks, those that did not, and
    whether all of it is free again."""
    trainer = Trainer.build(run, Rank(rank, 2, CPU, None, RankProgress(run.limits)))
    _fill(trainer, range(2, 3))
    assert trainer.repeated is not None
    memory = trainer.repeated.exact.memory
    assert isinstance(memory, Arena) and memory.spare is not None
    free, found, take = [*memory.spare.free], Counter[bool](), Spare.take
    updated = list[int]()
    trainer.run.before_update = updated.append  # as a save in the background sets it

    def taken(self: Spare, size: int) -> Any:
        made = take(self, size)
        found[made is not None] += 1
        return made

    samples, size = RandomSamples(run.model.vocab_size, run.sequence_length, 8), run.layout.global_batch_size
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Spare, "take", taken)
        for number in (1, 2, 3):
            assert trainer.start(number, samples, (number - 1) * size)().finite  # type: ignore[arg-type]
    assert len(updated) == 4 * len(trainer.state.flats)  # the second step twice, and the third with exact sizes
    return found[True], found[False], memory.spare.free == free


def test_rows_of_a_repeated_step_lie_where_blocks_would(pool: Pool) -> None:
    run = run_of("parallel.expert_rows=padded", "parallel.capacity_percent=200")
    for inside, outside, all_free in pool.run(roomy, run.layout, run):
        assert inside and not outside and all_free
