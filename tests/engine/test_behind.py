"""A device that computes while the host goes on: outcomes are read a step late, and what is saved is the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from penteract.config.resolve.resolved_run import resolve
from penteract.engine import checkpoint
from penteract.engine.device.device import Cpu
from penteract.engine.executor.outcome import Outcome
from penteract.engine.rank.rank import Rank
from penteract.engine.session.session import Session, SessionOptions
from penteract.engine.session.trainer import Trainer
from penteract.errors import BadNumerics, CorruptData, Preempted

SMALL = ("--batch.sequence_length=64", "--batch.global_batch_size=2", "--batch.micro_batch_size=1")

Steps = list[str]


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """What began and whose outcome was read, in order, on a CPU that is taken for a device that computes alone."""
    seen, start = Steps(), Trainer.start

    def begun(self: Trainer, number: int, *about: object) -> Callable[[], Outcome]:
        seen.append(f"begin {number}")
        outcome = start(self, number, *about)  # type: ignore[arg-type]

        def read() -> Outcome:
            seen.append(f"read {number}")
            return outcome()

        return read

    monkeypatch.setattr(Trainer, "start", begun)
    monkeypatch.setattr(Cpu, "behind", True)
    return seen


def session(folder: Path, *words: str) -> Session:
    run = resolve(
        None, "tiny", [f"--output.folder={folder}", "--training.sample_tokens=0", *SMALL, *words], world=1
    ).run
    made = Session(run, Rank(0, 1, torch.device("cpu"), None), SessionOptions(folder))
    made.open()
    return made


def saved(made: Session) -> list[torch.Tensor]:
    """All numbers of the state that a step changes and a checkpoint has."""
    state = made.trainer.state
    found = [x for flat in state.flats for x in (flat.master, flat.own_parameter, *flat.optimizer_state.values())]
    found += state.biases.values()
    found += [state.scaling.values] if state.scaling is not None else []
    found += [state.history.steps] if state.history is not None else []
    return [x.clone() for x in found]


def weights(made: Session) -> list[torch.Tensor]:
    return [flat.master.clone() for flat in made.trainer.state.flats]


def rows(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_host_is_a_step_ahead_where_nobody_looks(steps: Steps, tmp_path: Path) -> None:
    session(tmp_path, "--training.steps=6", "--checkpoint.every=5", "--training.validation_every=0").go()
    assert steps == [
        "begin 1", "read 1", "begin 2", "read 2", "begin 3", "begin 4", "read 3",
        "begin 5", "read 4", "read 5", "begin 6", "read 6",
    ]  # fmt: skip
    assert rows(tmp_path) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "words",
    [
        ("--precision.dtype=fp32",),
        ("--precision.dtype=fp16",),
        ("--precision.dtype=fp16", "--precision.loss_scale=1e9"),  # the first steps are skipped
        ("--precision.dtype=fp8_delayed",),
        ("--model.moe.balance=bias", "--model.moe.experts=4", "--model.moe.top_k=2", "--model.moe.ffn_size=64"),
    ],
)
def test_a_stop_saves_the_step_before_the_one_that_was_begun(
    steps: Steps, tmp_path: Path, words: tuple[str, ...]
) -> None:
    of_run = ("--training.steps=20", "--training.validation_every=0", *words)
    made = session(tmp_path, *of_run)
    start = Trainer.start

    def stop_in_four(self: Trainer, number: int, *about: object) -> Callable[[], Outcome]:
        made.stopping.requests = int(number >= 3)
        return start(self, number, *about)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patched, pytest.raises(Preempted, match="step 4"):
        patched.setattr(Trainer, "start", stop_in_four)
        made.go()
    assert steps[-2:] == ["begin 5", "read 4"]
    assert rows(tmp_path) == [1, 2, 3, 4]
    plain = session(tmp_path / "plain", *of_run)
    for number in range(1, 5):
        plain._end(plain._begin(number), _Nobody())
    assert all(map(torch.equal, saved(made), saved(plain)))
    assert checkpoint.latest(tmp_path / "checkpoints").name.endswith("4")


class _Nobody:
    def write(self, row: object) -> None: ...


def test_nothing_is_learnt_after_a_step_that_is_not_finite(steps: Steps, tmp_path: Path) -> None:
    made = session(tmp_path, "--training.steps=9", "--training.validation_every=0")
    start = Trainer.start
    before = list[torch.Tensor]()

    def spoil_four(self: Trainer, number: int, *about: object) -> Callable[[], Outcome]:
        if number == 4:
            before.extend(weights(made))
            kernel = self.run.kernels["loss"]
            self.run.kernels = {**self.run.kernels, "loss": _not_finite(kernel)}
            self.run.registers.step_complete = False  # so that calls are bound anew
            try:
                return start(self, number, *about)  # type: ignore[arg-type]
            finally:
                self.run.kernels = {**self.run.kernels, "loss": kernel}
        return start(self, number, *about)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patched, pytest.raises(BadNumerics):
        patched.setattr(Trainer, "start", spoil_four)
        made.go()
    assert steps[-2:] == ["begin 5", "read 4"]
    assert all(map(torch.equal, weights(made), before))
    assert checkpoint.latest(tmp_path / "checkpoints").name.endswith("3")


def _not_finite(kernel):  # type: ignore[no-untyped-def]
    def forward(env, site, ins, weights, outs):  # type: ignore[no-untyped-def]
        kernel.forward(env, site, [ins[0] * torch.nan], weights, outs)

    return type(kernel)(forward, kernel.input_gradient, kernel.weight_gradient)


def test_a_batch_that_cannot_be_drawn_stops_after_the_step_before(steps: Steps, tmp_path: Path) -> None:
    made = session(tmp_path, "--training.steps=20", "--training.validation_every=0")
    sample, size = made.train.sample, made.spec.layout.global_batch_size

    class Torn:
        def __len__(self) -> int:
            return len(made.train)

        def fingerprint(self) -> dict[str, object]:
            return dict(whole.fingerprint())

        def position(self, index: int) -> dict[str, object]:
            return dict(whole.position(index))

        def close(self) -> None:
            pass

        def sample(self, index: int) -> object:
            if index >= 4 * size:
                raise CorruptData("DATA", "torn")
            return sample(index)

    whole, made.train = made.train, Torn()  # type: ignore[assignment]
    with pytest.raises(CorruptData, match="step 4 is saved"):
        made.go()
    made.train = whole
    assert steps[-2:] == ["begin 5", "read 4"]
    assert rows(tmp_path) == [1, 2, 3, 4]
