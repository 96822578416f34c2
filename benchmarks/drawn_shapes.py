"""Six shapes that no kernel was tuned for, drawn by a seed: cases of `step_kernels.py`.

    python benchmarks/drawn_shapes.py                                    # writes sweeps/shapes.json, as it is committed
    python benchmarks/step_kernels.py --cases D1,D2,D3,D4,D5,D6 --out FILE.json

Hidden sizes of 1,024 to 8,192, heads of 64 and 128, biases, QK-norm, tied tables, sequences of 2,048 to 131,072 tokens; two
of the six have 8 to 128 experts. Layers are as many as make the weights about 1.5 billion numbers. A shape is kept if its
step is predicted to take at most 70 % of an H200 and 1.5 s.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]

from beside_sides import Case

from penteract.config.catalog import model as find_model
from penteract.config.hardware import cluster
from penteract.config.layout import Layout
from penteract.config.model import MoESpec
from penteract.errors import BadInput
from penteract.model.count import parameters
from penteract.readings.estimator import Estimator

SEED, WEIGHTS, ROOM, MOST_S = 20261127, 1.5e9, 0.7, 1.5
FILE = Path(__file__).parent / "sweeps" / "shapes.json"
SHAPES = 6
WITH_EXPERTS = 2  # of them


def pools(rng: random.Random) -> dict[str, list[Any]]:
    """What is dealt out rather than drawn, so that six shapes cover it: hidden sizes, head sizes, lengths."""
    return {
        "hidden": rng.sample((1024, 1536, 2048, 3072, 4096, 5120, 8192), SHAPES),
        "head": rng.sample((64, 128) * (SHAPES // 2), SHAPES),
        "length": rng.sample([2**n for n in range(11, 18)], SHAPES),
    }


def drawn(
    rng: random.Random, hidden: int, head: int, length: int, with_experts: bool
) -> tuple[dict[str, Any], int, int]:
    """Changes of a model, tokens of a sequence, and sequences of a step."""
    heads = hidden // head
    changes: dict[str, Any] = {
        "hidden_size": hidden, "head_size": head, "heads": heads, "kv_heads": rng.choice([n for n in (4, 8) if heads % n == 0]),
        "ffn_size": 128 * round(hidden * rng.choice((2.6875, 3.5, 4)) / 128), "qkv_bias": rng.choice((True, False)),
        "qk_norm": rng.choice((True, False)), "tied": rng.choice((True, False)), "vocab_size": rng.choice((32_000, 128_256, 151_936)),
        "moe": None,
    }  # fmt: skip
    if with_experts:
        many = rng.choice((8, 16, 32, 64, 128))
        changes["moe"] = MoESpec(experts=many, top_k=rng.choice((2, 4, 8) if many > 8 else (2,)), balance="none",
                                 ffn_size=128 * max(2, round(hidden * 8 / many / 128)))  # fmt: skip
    return changes, length, max(1, 32_768 // length)


def case_of(name: str, changes: dict[str, Any], length: int, sequences: int) -> Case:
    """The drawn model, with as many layers as its weights allow."""
    one = replace(find_model("llama-3.2-1b"), **changes, layers=1)
    two = replace(one, layers=2)
    each = parameters(two).total - parameters(one).total
    layers = max(2, round((WEIGHTS - parameters(one).total) / each) + 1)
    return Case(
        name, "llama-3.2-1b", {**changes, "layers": layers}, "", "", {}, length, sequences, changes["vocab_size"]
    )


def fits(case: Case) -> bool:
    """Whether an H200 holds it, and a step is short enough."""
    try:
        node, model = cluster("1xH200"), replace(find_model(case.model), **case.changes)
        prices = Estimator(model, node, case.sequence_length)
        estimate = prices.estimate(Layout(
            micro_batch_size=case.micro_batch_size, loss="chunked", attention="cudnn", elementwise="triton", fuse=("norm", "add", "mlp", "qkv", "loss"),
        ))  # fmt: skip
        return estimate.allocated <= ROOM * node.usable() and prices.time(estimate).seconds <= MOST_S
    except BadInput:
        return False


def drawn_cases() -> dict[str, Case]:
    """The six cases. Where one does not fit, all are drawn again."""
    rng = random.Random(SEED)
    while True:
        dealt = pools(rng)
        sizes = zip(dealt["hidden"], dealt["head"], dealt["length"], strict=True)
        cases = [case_of(f"D{n}", *drawn(rng, *given, n > SHAPES - WITH_EXPERTS)) for n, given in enumerate(sizes, 1)]
        if all(map(fits, cases)):
            return {case.name: case for case in cases}


def read_cases() -> dict[str, Case]:
    """The cases of the file."""
    found = dict[str, Case]()
    for row in json.loads(FILE.read_text()):
        changes = row["changes"]
        moe = changes["moe"] and MoESpec(**changes["moe"])
        found[row["name"]] = Case(
            row["name"], "llama-3.2-1b", {**changes, "moe": moe}, "", "", {}, row["sequence_length"], row["sequences"],
            changes["vocab_size"])  # fmt: skip
    return found


def main() -> None:
    rows = [
        {"name": case.name, "sequence_length": case.sequence_length, "sequences": case.micro_batch_size,
         "changes": {**case.changes, "moe": case.changes["moe"] and {
             key: getattr(case.changes["moe"], key) for key in ("experts", "top_k", "ffn_size", "balance")}}}
        for case in drawn_cases().values()
    ]  # fmt: skip
    FILE.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
