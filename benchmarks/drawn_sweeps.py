"""Draws the cases by which the planner's times and memory are judged, before anything is measured.

    python benchmarks/drawn_sweeps.py        writes benchmarks/sweeps/*.toml, as they are committed
    penteract bench benchmarks/sweeps/one_card.toml --out FOLDER

`one_card`      twelve models of 0.5 to 6B on one H200: dtype, sequences of 2k to 64k, micro-batches, recomputation
`two_cards`     twelve layouts of one model and one step on two: ZeRO, tensor, pipeline and context parallelism, recomputation
`two_experts`   twelve layouts of one model with experts on two, expert parallelism too

A drawn case is kept if it is legal, needs at most 92 % of the GPUs' memory and takes at most 1.2 s a step by prediction.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "src")]

from penteract.config.hardware import cluster
from penteract.config.resolve.resolved_run import resolve
from penteract.config.resolve.write_run_file import toml_value
from penteract.errors import BadInput
from penteract.readings.estimator import Estimator

SEED, CASES, MOST_S, ROOM = 20261125, 12, 1.2, 0.92
SHAPES = (  # hidden size, layers, heads, key-value heads, head size, MLP size
    (1024, 28, 16, 8, 64, 4096), (2048, 16, 32, 8, 64, 8192), (2048, 28, 16, 8, 128, 6144), (3072, 28, 24, 8, 128, 8192),
    (4096, 22, 32, 8, 128, 14_336),
)  # fmt: skip
NAMES = ("hidden_size", "layers", "heads", "kv_heads", "head_size", "ffn_size")
KERNELS = {"kernels.elementwise": "triton", "kernels.attention": "cudnn", "kernels.fuse": "all"}
Draw = Callable[[random.Random], dict[str, Any]]


def one_card(rng: random.Random) -> dict[str, Any]:
    """A model, its sequences, and how it is held on one GPU."""
    length = rng.choice((2048, 4096, 8192, 16_384, 32_768, 65_536))
    size = rng.choice([n for n in (1, 2, 4, 8, 16) if 8192 <= n * length <= 65_536])
    shape = {f"model.{name}": value for name, value in zip(NAMES, rng.choice(SHAPES), strict=True)}
    return {
        **shape, "precision.dtype": rng.choice(("bf16", "fp8_tensorwise")), "batch.sequence_length": length,
        "batch.micro_batch_size": size, "batch.global_batch_size": size * rng.choice((1, 2)),
        "memory.recompute": rng.choice(("none", "none", "swiglu", "full")),
    }  # fmt: skip


def two_cards(rng: random.Random) -> dict[str, Any]:
    """A layout of two GPUs for eight sequences of 8,192 tokens."""
    dim = rng.choice(("dp", "dp", "tp", "pp", "cp"))
    found: dict[str, Any] = {
        f"parallel.{dim}": 2, "batch.micro_batch_size": rng.choice((1, 2, 4)), "parallel.zero": rng.choice((0, 1, 2, 3)),
        "memory.recompute": rng.choice(("none", "none", "full")),
    }  # fmt: skip
    if dim == "pp":
        found |= rng.choice(({"parallel.schedule": "1f1b"}, {"parallel.schedule": "zb_h1"},
                             {"parallel.schedule": "interleaved", "parallel.vpp": 2}))  # fmt: skip
    if dim == "cp":
        found["parallel.cp_method"] = rng.choice(("all_gather", "ulysses"))
    return found


def two_experts(rng: random.Random) -> dict[str, Any]:
    """As `two_cards`, with or without expert parallelism."""
    return two_cards(rng) | {"parallel.ep": rng.choice((1, 2))}


_TWO: Mapping[str, Any] = {"batch.sequence_length": 8192, "batch.global_batch_size": 8, "precision.dtype": "bf16"}
_DENSE = dict(zip((f"model.{name}" for name in NAMES), SHAPES[2], strict=True))
SWEEPS: Mapping[str, tuple[Draw, str, int, Mapping[str, Any]]] = {
    "one_card": (one_card, "llama-3.2-1b", 1, {"model.tied": False}),
    "two_cards": (two_cards, "llama-3.2-1b", 2, {**_TWO, **_DENSE, "model.tied": False}),
    "two_experts": (two_experts, "qwen3-30b-a3b", 2, {
        **_TWO, "batch.sequence_length": 4096, "model.layers": 4, "kernels.experts": "quack"}),
}  # fmt: skip


def fits(preset: str, gpus: int, words: Mapping[str, Any]) -> bool:
    """Whether a case is legal, and small and fast enough by prediction."""
    try:
        run = resolve(None, preset, [f"{key}={toml_value(value)}" for key, value in words.items()], gpus).run
        node = cluster(f"{gpus}xH200")
        prices = Estimator(run.model, node, run.sequence_length, run.precision.policy)
        estimate = prices.estimate(run.layout)
        return estimate.allocated <= ROOM * node.memory_gib * 2**30 and prices.time(estimate).seconds <= MOST_S
    except BadInput:
        return False


def drawn(name: str) -> str:
    """The sweep as TOML."""
    draw, preset, gpus, same = SWEEPS[name]
    rng, cases = random.Random(f"{SEED} {name}"), list[dict[str, Any]]()
    while len(cases) < CASES:
        case = draw(rng)
        if case not in cases and fits(preset, gpus, {**KERNELS, **same, **case}):
            cases.append(case)
    lines = ["# Written by benchmarks/drawn_sweeps.py before any case was run.", f'preset = "{preset}"',
             f'gpus = "{gpus}xH200"', "steps = 10", "warmup = 3", "limit = 120", "", "[set]"]  # fmt: skip
    lines += [f"{key} = {toml_value(value)}" for key, value in {**KERNELS, **same}.items()]
    for case in cases:
        lines += ["", "[[case]]", *(f"{key} = {toml_value(value)}" for key, value in case.items())]
    return "\n".join(lines) + "\n"


def main() -> None:
    for name in SWEEPS:
        (Path(__file__).parent / "sweeps" / f"{name}.toml").write_text(drawn(name))


if __name__ == "__main__":
    main()
