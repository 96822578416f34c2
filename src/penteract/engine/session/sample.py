"""Let the model write: each token a forward pass of the whole layout, whatever it is."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from penteract.engine.dtypes import dtype_of
from penteract.engine.executor.allocator import Fresh
from penteract.engine.executor.executor import Run
from penteract.engine.executor.feed import constants, micro_batch
from penteract.engine.kernels.kernel import Env, TorchKernel
from penteract.engine.kernels.registry import kernels
from penteract.engine.session.trainer import Trainer, sampling_layout
from penteract.ops.tape import Site
from penteract.parallel.context import token_indices
from penteract.step.program import Program, compile_step
from penteract.step.walk import walk_forward


def write(trainer: Trainer, prompt: list[int], tokens: int, *, temperature: float = 0.8, seed: int = 0) -> list[int]:
    """Go on from `prompt`. Every rank returns the same ids."""
    spec, rank = sampling_layout(trainer.spec), trainer.rank
    p = compile_step(
        spec.model, spec.layout, spec.sequence_length, rank=rank.number, precision=spec.precision.policy,
        optimizer_kinds=spec.optimizer.optimizer_kinds, training=False,
    )  # fmt: skip
    ear = _Ear(p)
    run = Run(p, trainer.state, trainer.run.comm, ear.kernels(rank.device), Fresh(p.precision, rank.device))
    fixed = constants(p, rank.device)
    trainer.run.settle_parameters()
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(tokens):
        run.batches = [fixed | micro_batch(p, [_window(text, spec.sequence_length)], rank.device)]
        ear.begin(min(len(text), spec.sequence_length) - 1)
        walk_forward(p, run)
        logits = ear.logits(run).double().cpu() / temperature
        text.append(int(torch.multinomial(logits.softmax(-1), 1, generator=generator)))
    return text


@dataclass(slots=True)
class _Ear:
    """Listens at the logits of one token. They pass by in the order in which this rank holds its tokens, all at once or
    some at a time."""

    p: Program
    row: int = -1  # of the token, among those that are still to pass
    heard: torch.Tensor | None = None  # [V@tp]

    def begin(self, at: int) -> None:
        """Listen for token `at` of the sequence."""
        own = token_indices(self.p.sequence_length, self.p.layout.cp, self._me["cp"])
        self.row, self.heard = own.index(at) if at in own else -1, None

    def kernels(self, device: torch.device) -> dict[str, TorchKernel]:
        """The layout's kernels, with this ear at the logits."""
        all_of_them = kernels(self.p, device)

        def row_max(env: Env, site: Site, ins: list[Any], weights: list[Any], outs: list[Any]) -> None:
            count = ins[0].shape[0]
            if 0 <= self.row < count:
                self.heard = ins[0][self.row, 0].clone()
            self.row -= count
            all_of_them["row_max"].forward(env, site, ins, weights, outs)

        return all_of_them | {"row_max": TorchKernel(row_max)}

    def logits(self, run: Run) -> torch.Tensor:
        """The token's logits [V], put together from the ranks that hold them."""
        p, heard, tp = self.p, self.heard, self._me["tp"]
        out = torch.zeros(p.model.vocab_size, dtype=dtype_of("stat", p.precision), device=run.memory.device)
        if heard is not None and self._me["dp"] == 0:
            out[tp * len(heard) : (tp + 1) * len(heard)] = heard
        run.comm.finish(run.comm.sum(p.mesh.group("world", p.rank), out))
        return out

    @property
    def _me(self) -> dict[str, int]:
        return self.p.mesh.coordinates(self.p.rank)


def _window(text: list[int], length: int) -> Any:
    tokens = torch.zeros(length, dtype=torch.int64)
    tail = text[-length:]
    tokens[: len(tail)] = torch.tensor(tail)
    nothing = torch.zeros(length, dtype=torch.int64)
    return SimpleNamespace(tokens=tokens, targets=nothing - 1, start=nothing, positions=torch.arange(length))
