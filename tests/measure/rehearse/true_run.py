"""A true run on gloo beside a rehearsal of the same rank: every call on a wire, and the bytes after each action."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest.mock import patch

from layouts import CPU
from observe import Watched, Wires, dropped_at_once
from penteract.config.run import RunSpec
from penteract.engine.comm.groups import ProcessGroups
from penteract.engine.device.storages import bytes_of
from penteract.engine.executor.batch_loader import BatchLoader
from penteract.engine.kernels.moe import experts
from penteract.engine.kernels.moe.experts import Splits
from penteract.engine.kernels.registry import TargetElsewhere
from penteract.engine.rank.rank import Rank
from penteract.engine.rank.rank_progress import RankProgress
from penteract.engine.session.trainer import Trainer
from penteract.measure.rehearse.rank_rehearsal import RankRehearsal, rehearse_rank
from penteract.measure.rehearse.wires import RehearsedWire
from samples import sample

Call = tuple[str, tuple[int, ...], int]  # kind, ranks, bytes; of a message: this rank and its peer


class _Ordered(Counter[Any]):
    """A counter that remembers what was added, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.added: list[Call] = []

    def __setitem__(self, key: Any, value: int) -> None:
        self.added.append((*key, value - self[key]))
        super().__setitem__(key, value)


class Truth(NamedTuple):
    """What a rank did in its second step: bytes after each action and at most; and of both steps, its routing."""

    calls: list[Call]
    alive: list[int]
    peak: int
    splits: list[Splits]


@dataclass
class Text:
    """Samples, drawn."""

    spec: RunSpec
    made: dict[int, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return 1 << 20

    def sample(self, index: int) -> Any:
        return sample(index, self.spec.sequence_length, self.spec.model.vocab_size)


def true_step(spec: RunSpec, number: int) -> Truth:
    """Two steps of a rank of the pool, the second watched."""
    watched, wires, alive, splits = Watched(), Wires(number), list[int](), list[Splits]()
    wires.bytes = ordered = _Ordered()

    def noted(*about: Any) -> Splits:
        splits.append(Splits(*about))
        return splits[-1]

    load = BatchLoader.load

    def loaded(self: BatchLoader, *about: Any) -> Any:
        counts = load(self, *about)
        watched.peak = watched.now  # what a batch takes on the host is not the step's
        return counts

    with ExitStack() as stack:
        stack.enter_context(patch.object(experts, "Splits", noted))
        stack.enter_context(patch.object(BatchLoader, "load", loaded))
        stack.enter_context(dropped_at_once())
        stack.enter_context(wires.watch())
        stack.enter_context(watched)
        rank = Rank(number, spec.layout.world, CPU, None, RankProgress(spec.limits))
        trainer = Trainer.build(spec, rank)
        samples, batch = Text(spec), spec.layout.global_batch_size
        trainer.start(1, samples, 0)()  # type: ignore[arg-type]
        ordered.added.clear()
        trainer.run.on_action = lambda _: alive.append(watched.now)
        more = _unseen(watched, trainer)
        trainer.start(2, samples, batch)  # type: ignore[arg-type]
        peak = watched.peak
    return Truth(ordered.added, [n + more for n in alive], peak + more, splits)


def _unseen(watched: Watched, trainer: Trainer) -> int:
    """Bytes of what `torch.tensor` makes of lists on a CPU: it passes no dispatcher there."""
    lists = [x for batch in trainer.run.micro_batches for x in batch.values()]
    return bytes_of(x for x in lists if watched.number(x) is None)


def call_of(wire: RehearsedWire, rank: int) -> Call:
    """A wire of a rehearsal as `Wires` sees it."""
    kind = wire.kind.removesuffix(" (max)")
    return kind, (wire.ranks if kind != "recv" else wire.ranks[::-1]), wire.bytes


def differences(rank: int, groups: ProcessGroups, spec: RunSpec) -> list[str]:
    """Where a true rank and its rehearsal differ."""
    truth = true_step(spec, rank)
    left = iter(truth.splits)
    made = rehearse_rank(spec, rank, TargetElsewhere("cpu", "cpu", (0, 0)), given=lambda *_: next(left))
    return [*map(str, made.faults), *_calls(truth, made), *_bytes(truth, made)]


def _calls(truth: Truth, made: RankRehearsal) -> list[str]:
    mine = [call_of(made.wires[i], made.rank) for i in made.steady if made.wires[i].kind != "copy"]
    for i, (a, b) in enumerate(zip(truth.calls, mine, strict=False)):
        if a != b:
            return [f"call {i}: {a} in truth, rehearsed {b}"]
    return [f"{len(truth.calls)} calls in truth, rehearsed {len(mine)}"] * (len(truth.calls) != len(mine))


def _bytes(truth: Truth, made: RankRehearsal) -> list[str]:
    alive = [point.now + point.host for point in made.timeline[:-1]]
    wrong = [f"{made.timeline[i].what}: {a} bytes in truth, rehearsed {b}"
             for i, (a, b) in enumerate(zip(truth.alive, alive, strict=True)) if a != b]  # fmt: skip
    if truth.peak != (peak := made.peak + made.timeline[0].host):
        wrong.append(f"peak {truth.peak} in truth, rehearsed {peak}")
    return wrong[:3]
