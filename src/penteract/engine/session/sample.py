"""Let the model write text: one forward pass of the whole layout for each token."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from penteract.engine.dtypes import dtype_of
from penteract.engine.executor.allocator import Fresh
from penteract.engine.executor.executor import Executor
from penteract.engine.executor.feed import constants, micro_batch
from penteract.engine.kernels.kernel import Env, TorchKernel
from penteract.engine.kernels.registry import import_packages, kernels
from penteract.engine.session.trainer import Trainer, sampling_layout
from penteract.ops.tape import Site
from penteract.parallel.context import token_indices
from penteract.step.program import Program, compile_run
from penteract.step.walk import walk_forward


def write(trainer: Trainer, prompt: list[int], tokens: int, *, temperature: float = 0.8, seed: int = 0) -> list[int]:
    """Continue `prompt` by `tokens` sampled ids. Every rank returns the same ids."""
    spec, rank = sampling_layout(trainer.spec), trainer.rank
    p = compile_run(spec, rank.number, training=False)
    capture = _LogitsCapture(p)
    run = Executor(p, trainer.state, trainer.run.comm, capture.kernels(rank.device), Fresh(p.precision, rank.device))
    fixed = constants(p, rank.device)
    trainer.run.settle_parameters()
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(tokens):
        run.micro_batches = [fixed | micro_batch(p, [_window(text, spec.sequence_length)], rank.device)]
        capture.begin(min(len(text), spec.sequence_length) - 1)
        walk_forward(p, run)
        logits = capture.logits(run).double().cpu() / temperature
        text.append(int(torch.multinomial(logits.softmax(-1), 1, generator=generator)))
    return text


@dataclass(slots=True)
class _LogitsCapture:
    """Copies the logits of one token. The kernel `row_max` gets logits in the order in which this rank holds its
    tokens, of all tokens at once or of some at a time."""

    p: Program
    row: int = -1  # of the token, among those whose logits are still to come; negative: not on this rank, or done
    captured: torch.Tensor | None = None  # [V@tp]

    def begin(self, at: int) -> None:
        """Capture the logits of token `at` of the sequence in the next forward pass."""
        own = token_indices(self.p.sequence_length, self.p.layout.cp, self._coordinates["cp"])
        self.row, self.captured = own.index(at) if at in own else -1, None

    def kernels(self, device: torch.device) -> dict[str, TorchKernel]:
        """The layout's kernels, with a `row_max` that captures its input."""
        import_packages(self.p, device)
        all_of_them = kernels(self.p, device)

        def row_max(env: Env, site: Site, ins: list[Any], weights: list[Any], outs: list[Any]) -> None:
            count = ins[0].shape[0]
            if 0 <= self.row < count:
                self.captured = ins[0][self.row, 0].clone()
            self.row -= count
            all_of_them["row_max"].forward(env, site, ins, weights, outs)

        return all_of_them | {"row_max": TorchKernel(row_max)}

    def logits(self, run: Executor) -> torch.Tensor:
        """The token's logits [V], gathered from the ranks that hold parts of them."""
        p, captured, tp = self.p, self.captured, self._coordinates["tp"]
        out = torch.zeros(p.model.vocab_size, dtype=dtype_of("stat", p.precision), device=run.memory.device)
        if captured is not None and self._coordinates["dp"] == 0:
            out[tp * len(captured) : (tp + 1) * len(captured)] = captured
        run.comm.finish(run.comm.sum(p.mesh.group("world", p.rank), out))
        return out

    @property
    def _coordinates(self) -> dict[str, int]:
        return self.p.mesh.coordinates(self.p.rank)


def _window(text: list[int], length: int) -> Any:
    tokens = torch.zeros(length, dtype=torch.int64)
    tail = text[-length:]
    tokens[: len(tail)] = torch.tensor(tail)
    zeros = torch.zeros(length, dtype=torch.int64)
    return SimpleNamespace(tokens=tokens, targets=zeros - 1, start=zeros, positions=torch.arange(length))
