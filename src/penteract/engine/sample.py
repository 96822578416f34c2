"""Let the model write: each token a forward pass of the whole layout, whatever it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from penteract.engine.bodies.body import Env, TorchBody
from penteract.engine.bodies.kernels import bodies
from penteract.engine.feed import constants, micro_batch
from penteract.engine.memory import Fresh
from penteract.engine.run import Run
from penteract.engine.trainer import Trainer, sampling_layout
from penteract.ops.tape import Site
from penteract.parallel.context import token_indices
from penteract.spec.layout import Layout
from penteract.step.program import compile_step
from penteract.step.walk import walk_forward


def write(trainer: Trainer, prompt: list[int], tokens: int, *, temperature: float = 0.8, seed: int = 0) -> list[int]:
    """Go on from `prompt`. Every rank returns the same ids."""
    spec, rank = sampling_layout(trainer.spec), trainer.rank
    p = compile_step(
        spec.model, spec.layout, spec.sequence_length, rank=rank.number, precision=spec.precision.dtype, training=False
    )
    seen: list[torch.Tensor] = []
    run = Run(p, trainer.state, trainer.run.comm, _listening(spec.layout, seen), Fresh(p.precision, rank.device))
    fixed = constants(p, rank.device)
    trainer.run.settle_parameters()
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(tokens):
        run.batches = [fixed | micro_batch(p, [_window(text, spec.sequence_length)], rank.device)]
        walk_forward(p, run)
        at = min(len(text), spec.sequence_length) - 1
        logits = _logits(run, seen, at).double().cpu() / temperature
        text.append(int(torch.multinomial(logits.softmax(-1), 1, generator=generator)))
        seen.clear()
    return text


def _listening(layout: Layout, seen: list[torch.Tensor]) -> dict[str, TorchBody]:
    """The layout's bodies, and an ear at the logits."""
    all_of_them = bodies(layout)

    def row_max(env: Env, site: Site, ins: list[Any], weights: list[Any], outs: list[Any]) -> None:
        seen.append(ins[0])
        all_of_them["row_max"].forward(env, site, ins, weights, outs)

    return all_of_them | {"row_max": TorchBody(row_max)}


def _window(text: list[int], length: int) -> Any:
    tokens = torch.zeros(length, dtype=torch.int64)
    tail = text[-length:]
    tokens[: len(tail)] = torch.tensor(tail)
    nothing = torch.zeros(length, dtype=torch.int64)
    return SimpleNamespace(tokens=tokens, targets=nothing - 1, start=nothing, positions=torch.arange(length))


def _logits(run: Run, seen: list[torch.Tensor], at: int) -> torch.Tensor:
    """The logits [V] of token `at`, put together from the ranks that hold them."""
    p = run.p
    me = p.mesh.coordinates(p.rank)
    out = torch.zeros(
        p.model.vocab_size, dtype=torch.float64 if p.precision == "fp64" else torch.float32, device=run.memory.device
    )
    own = token_indices(p.sequence_length, p.layout.cp, me["cp"])
    if seen and me["dp"] == 0 and at in own:
        mine = seen[0][own.index(at), 0]
        out[me["tp"] * len(mine) : (me["tp"] + 1) * len(mine)] = mine
    run.comm.finish(run.comm.sum(p.mesh.group("world", p.rank), out))
    return out
