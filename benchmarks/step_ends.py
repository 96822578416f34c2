"""One GPU: what the update of FP8 weights and the end of a step cost, with the kernels that save passes and without.

    python benchmarks/step_ends.py --out FOLDER [--commit HASH]

Writes FOLDER/step_ends.json after each part:

update    AdamW of weights as large as those of Llama-3-8B, in both kinds of master weights: with the largest value found
          on the way, without, and the pass that this saves. Each is timed twice, in either order. Held: state and
          weights have the same bits, and the value is that of the weights.
end       the end of a step by one kernel and by plain torch: seconds of the GPU, and of the host that asks for it.
          Held: the same bits.
training  four steps of a small model, with the values from the update and from passes. Held: the same bits.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]

import torch
from measuring import form_options, measured_on, run_parts, seconds
from update_forms import FACTORS, NUMBERS

from penteract.config.layout import FUSIONS, Layout
from penteract.config.model import ModelSpec
from penteract.config.precision.policy import RECIPES
from penteract.config.run import Data, Precision, RunSpec, Training
from penteract.engine.data import open_samples, open_tokenizer
from penteract.engine.kernels.quantised.largest_rows import LargestRows
from penteract.engine.rank.rank import Rank
from penteract.engine.session.trainer import Trainer
from penteract.engine.state.state import TrainingState
from penteract.ops import casts

SIZES = (4096 * 4096, 6144 * 4096, 14336 * 4096, 28672 * 4096)  # of `o`, of q, k and v, of `down`, of gate and up
MODEL = ModelSpec(layers=8, hidden_size=256, heads=4, kv_heads=4, head_size=64, ffn_size=512, vocab_size=512)
LENGTH, CALLS = 256, 50


# ---- the update ----------------------------------------------------------------------------------------------------------


def updated(n: int, split: bool, device: torch.device) -> dict[str, Any]:
    """A row of `update`: milliseconds in the order of measurement."""
    from penteract.engine.kernels.triton.optimizer.adamw import update
    from penteract.engine.kernels.triton.quantised.fp8_linear import largest_of

    generator = torch.Generator(device).manual_seed(3)
    gradient, mean, master = (torch.randn(n, device=device, generator=generator) * 0.02 for _ in range(3))
    square, parameter = gradient.square() * 0.05, master.bfloat16()
    if split:
        master = torch.zeros(n, dtype=torch.int16, device=device)
    factors, nonfinite = torch.tensor(FACTORS, device=device), torch.zeros((), device=device)
    state, bound = (mean, square, master, parameter), dict[Any, Any]()
    largest = LargestRows.of(torch.zeros(1, 4, device=device), [(0, n)])
    assert largest is not None

    def run(rows: LargestRows | None) -> None:
        if rows is not None:
            rows.rows[:, 0].zero_()
        update(gradient, *state, factors, nonfinite, NUMBERS, decay=True, largest=rows, bound=bound)

    before = [x.clone() for x in state]
    run(None)
    plain = [x.clone() for x in state]
    for x, y in zip(state, before, strict=True):
        x.copy_(y)
    run(largest)
    held = all(torch.equal(x, y) for x, y in zip(state, plain, strict=True))
    held = held and largest.rows[0, 0].item() == parameter.abs().max().item()
    place, find = torch.zeros(1, device=device), largest_of(parameter)
    ways: dict[str, Callable[[], Any]] = {"found": lambda: run(largest), "plain": lambda: run(None)}
    ways |= {"pass": lambda: find(place)}
    took = {name: [1e3 * seconds(ways[name])] for name in ways}
    for name in reversed(ways):
        took[name].append(1e3 * seconds(ways[name]))
    return {"elements": n, "split": split, "ms": took, "held": held}


# ---- a step --------------------------------------------------------------------------------------------------------------


def trainer(*, by_update: bool = True) -> Trainer:
    """Of a small model in FP8, by Triton's kernels."""
    spec = RunSpec(
        model=MODEL, layout=Layout(micro_batch_size=2, elementwise="triton", fuse=FUSIONS), sequence_length=LENGTH,
        precision=Precision.of(RECIPES["fp8_tensorwise"]), train=Training(steps=4),
    )  # fmt: skip
    with patch.object(casts, "largest_by_update", lambda layout: by_update and layout.updates_whole):
        return Trainer.build(spec, Rank(0, 1, torch.device("cuda", 0), None))


def bits(state: TrainingState) -> list[torch.Tensor]:
    """All that an update moves."""
    return [x.clone() for f in state.flats for x in (f.own_parameter, f.master, *f.moments.values())]


def ended() -> dict[str, Any]:
    """The row of `end`: microseconds in the order of measurement."""
    run = trainer().run
    kernel, found = run.step_end, list[list[torch.Tensor]]()
    assert kernel is not None and run.optimizer is not None
    run.summed.next_targets = lambda: None
    run.optimizer.step.fill_(7)
    run.optimizer.rate.fill_(3e-4)

    def way(by: Any) -> None:
        run.step_end = by
        run.factors()

    for by in (kernel, None):
        run.totals.copy_(torch.tensor([37.1, 5.0, 0.0]))
        way(by)
        assert run.common is not None
        found.append([x.clone() for x in (*run.common, run.totals, run.latch, run.done, run.counts)])
    held = all(torch.equal(x, y) for x, y in zip(*found, strict=True))
    took = dict[str, list[dict[str, float]]](kernel=[], torch=[])
    for name, by in (("kernel", kernel), ("torch", None), ("torch", None), ("kernel", kernel)):
        way(by)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(CALLS):
            way(by)
        host = (time.perf_counter() - begun) / CALLS
        torch.cuda.synchronize()
        took[name].append({"host": 1e6 * host, "gpu": 1e6 * (time.perf_counter() - begun) / CALLS})
    return {"us": took, "held": held}


def trained() -> dict[str, Any]:
    """The row of `training`."""
    samples, _ = open_samples(Data(), open_tokenizer("bytes"), LENGTH, 0)
    found, losses = list[list[torch.Tensor]](), list[list[float]]()
    for by_update in (True, False):
        one = trainer(by_update=by_update)
        with torch.no_grad():  # as a run does
            losses.append([one.step(n, samples, 2 * (n - 1)).loss for n in range(1, 5)])
        found.append(bits(one.state))
    held = losses[0] == losses[1] and all(torch.equal(x, y) for x, y in zip(*found, strict=True))
    return {"losses": losses, "held": held}


def main() -> None:
    args = form_options(__doc__ or "").parse_args()
    found: dict[str, Any] = measured_on(args)
    device = torch.device(args.device)
    parts: dict[str, Callable[[], Any]] = {
        "training": trained,
        "end": ended,
        "update": lambda: [updated(n, split, device) for split in (True, False) for n in SIZES],
    }
    for name, part in parts.items():
        found[name] = run_parts(name, {"all": part})["all"]
        print(name, json.dumps(found[name]), flush=True)
        (args.out / "step_ends.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
