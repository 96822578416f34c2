"""Small trainings in any precision, on one rank, and what is left when they end."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache

import torch

from penteract.config.layout import Layout
from penteract.config.model import ModelSpec
from penteract.config.precision.fp8 import usual
from penteract.config.precision.module_patterns import Pattern
from penteract.config.precision.policy import RECIPES, Policy
from penteract.config.run import Data, Optimizer, Precision, RunSpec, Training
from penteract.engine.data import Samples, open_samples, open_tokenizer
from penteract.engine.executor.outcome import Outcome
from penteract.engine.rank.rank import Rank
from penteract.engine.session.trainer import Trainer
from penteract.engine.state.state import TrainingState

SMALL = ModelSpec(
    layers=2, hidden_size=32, heads=4, kv_heads=2, head_size=8, ffn_size=96, vocab_size=264, initial_std=0.05
)


def patterns(*words: str) -> tuple[Pattern, ...]:
    return tuple(map(Pattern.of, words))


# As Dettmers 2022 (2110.02861) §2.3 has it: the embedding's moments stay in fp32. Others so that buckets of every kind
# are in more than one dtype.
BY_NAME = replace(
    RECIPES["bf16"],
    moments="int8",
    modules=patterns("embedding*:moments=fp32", "layers.0.*:moments=bf16", "*.attention.o.weight:moments=fp32"),
)
POLICIES = {name: p for name, p in RECIPES.items() if name not in ("fp64", "fp32")} | {
    "fp8_blockwise": replace(RECIPES["fp8_blockwise"], fp8=replace(usual("blockwise"), block=16)),
    "fp8_rowwise, powers of two, last layer and output projections in bf16": replace(
        RECIPES["fp8_rowwise"],
        fp8=replace(usual("rowwise"), powers=True, last=1),
        modules=patterns("*.attention.o.weight:linears=bf16"),
    ),
    "bf16, whole master weights": replace(RECIPES["bf16"], master="fp32"),
    "bf16, moments in 8 bits": replace(RECIPES["bf16"], moments="int8"),
    "bf16, moments in 16 bits": replace(RECIPES["bf16"], moments="bf16"),
    "bf16, sums in 16 bits": replace(RECIPES["bf16"], reduce="bf16"),
    "bf16, no master, moments in 8 bits": replace(RECIPES["bf16"], master="", stochastic=True, moments="int8"),
    "fp16, moments in 8 bits": replace(RECIPES["fp16"], moments="int8"),
    "bf16, moments in 8 bits but of the embedding, of others in 16 and 32": BY_NAME,
}


@cache
def _text() -> Samples:
    return open_samples(Data(), open_tokenizer("bytes"), 64, 0)[0]


@dataclass
class Small:
    """One rank's trainer on the text that travels with the program: batches of 4 sequences of 64 bytes."""

    policy: Policy
    model: ModelSpec = SMALL
    steps: int = 30
    layout: Layout = field(default_factory=lambda: Layout(micro_batch_size=4))
    optimizer: Optimizer = field(default_factory=lambda: Optimizer(learning_rate=3e-3))

    def __post_init__(self) -> None:
        self.spec = RunSpec(
            model=self.model, layout=self.layout, sequence_length=64, precision=Precision.of(self.policy),
            optimizer=self.optimizer, train=Training(steps=self.steps),
        )  # fmt: skip
        self.samples = _text()
        self.trainer = Trainer.build(self.spec, Rank(0, 1, torch.device("cpu"), None))  # type: ignore[arg-type]

    @property
    def state(self) -> TrainingState:
        return self.trainer.state

    @torch.no_grad()  # as a run does, and without a word to the tests that follow
    def step(self, number: int) -> Outcome:
        return self.trainer.step(number, self.samples, (number - 1) * self.layout.global_batch_size)

    def losses(self) -> list[float]:
        return [self.step(n).loss for n in range(1, self.steps + 1)]


def master_weights(state: TrainingState) -> dict[str, torch.Tensor]:
    """The weights that the optimizer updates, fp32 copies by name; of shards, this rank's part."""
    wide = [f.read("master", slice(0, len(f.master)), torch.float32) for f in state.flats]
    return {part.param.name: part.values for part in state.parameter_parts_of(wide)}


def kept(state: TrainingState, *, whole: bool = True) -> list[torch.Tensor]:
    """Copies of all that an update may move, as bits; unless `whole`, of parameters the rank's own alone."""
    flats = [(f, f.parameter if whole else f.own_parameter) for f in state.flats]
    tensors = [t for f, own in flats for t in (own, f.master, *f.moments.values(), *f.scales.values())]
    return [t.clone().view(torch.uint8) for t in [*tensors, *state.biases.values()]]


def differ(xs: list[torch.Tensor], ys: list[torch.Tensor]) -> list[int]:
    return [i for i, (x, y) in enumerate(zip(xs, ys, strict=True)) if not torch.equal(x, y)]
