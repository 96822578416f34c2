"""The chunked loss where it has most to get right; `test_layouts.py` draws it with all others."""

from __future__ import annotations

import pytest
import torch

from layouts import CPU, Case, run_case
from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.config.model import ModelSpec
from penteract.engine.comm.distributed import Gloo
from penteract.engine.executor.allocator import Fresh
from penteract.engine.executor.executor import Executor
from penteract.engine.executor.feed import constants, micro_batch, target_counts
from penteract.engine.executor.initial_weights import initialise
from penteract.engine.kernels.reference import REFERENCE
from penteract.engine.state.state import allocate
from penteract.errors import Bug
from penteract.ops.do import Do, Redistribution, Steps, Value, Values
from penteract.step.program import compile_step
from penteract.step.walk import walk_forward
from pool import Pool
from samples import sample
from tiny import SIZES
from tolerances import PARITY

AHEAD = ModelSpec(**SIZES, tied=True, mtp_layers=2, mtp_loss_coefficient=0.7, z_loss_coefficient=0.05)
PLAIN = ModelSpec(**SIZES | {"layers": 4}, z_loss_coefficient=0.05)


@pytest.mark.parametrize("case", [
    Case(AHEAD, Layout(tp=2, pp=2, schedule="zb_h1", gradient_accumulation_steps=3, loss="chunked", loss_chunk=5)),
    Case(AHEAD, Layout(dp=2, cp=2, cp_method="ring", zero=1, micro_batch_size=2, loss="chunked", loss_chunk=6)),
    Case(PLAIN, Layout(tp=2, pp=2, vpp=2, schedule="interleaved", gradient_accumulation_steps=2, loss="chunked",
                       loss_chunk=7, recompute=("*",))),
], ids=["zb_h1", "ring", "interleaved"])  # fmt: skip
def test_a_layout_is_one_process_and_its_price(pool: Pool, case: Case) -> None:
    red = [str(v) for v in pool.run(run_case, case) if v.red]
    assert not red, "\n".join(red)


def test_judged_as_trained() -> None:
    """Forward passes alone give the loss of all logits at once, z-loss with it."""
    found = [_validation_samples(Layout(loss=loss, loss_chunk=5)) for loss in ("reference", "chunked")]  # type: ignore[arg-type]
    assert found[0].min() > 0
    assert (found[0] - found[1]).abs().max() <= PARITY


def _validation_samples(layout: Layout) -> torch.Tensor:
    p = compile_step(PLAIN, layout, 16, precision="fp64", training=False)
    state = allocate(p, CPU)
    initialise(p, state, 0)
    run = Executor(p, state, Gloo(0), dict(REFERENCE), Fresh("fp64", CPU))
    drawn = [sample(0, 16, PLAIN.vocab_size)]
    run.micro_batches = [constants(p, CPU) | micro_batch(p, drawn, CPU)]
    run.counts.copy_(torch.tensor(target_counts(p, [drawn])))
    walk_forward(p, run)
    return run.totals[1:-1]


def test_what_others_hold_is_not_written_over() -> None:
    def forward(steps: Steps, *ins: Value) -> tuple[Values, Values]:
        return steps.forward("logits_gradient", *ins, axis="tp"), ()

    do = Do(Mesh(Layout()))
    ins = [do.receive((4, 1, 8)), do.input("a", (4, 1), "stat"), do.input("b", (4, 1)), do.input("c", (), "stat")]
    with pytest.raises(Bug, match="overwrites"):
        do.redistribute(Redistribution("careless", forward, lambda steps, kept: ()), *ins)
