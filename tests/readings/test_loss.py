"""What the end of a network takes: all its logits at once, or those of some tokens, by the price and by watching a
step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from observe import Watched
from penteract.config.hardware import cluster
from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.config.model import ModelSpec
from penteract.config.precision.policy import RECIPES
from penteract.config.resolve.presets import TINY
from penteract.engine.comm.distributed import Gloo
from penteract.engine.executor.allocator import Fresh
from penteract.engine.executor.executor import Executor
from penteract.engine.executor.feed import constants, micro_batch, target_counts
from penteract.engine.executor.initial_weights import initialise
from penteract.engine.kernels.reference import REFERENCE
from penteract.engine.state.state import allocate
from penteract.ops.declarations import OPS
from penteract.ops.do import Do
from penteract.ops.lower import lower
from penteract.ops.params import Param, Shard
from penteract.parallel.tensor import linear_cross_entropy
from penteract.readings.estimator import Estimator
from penteract.readings.price import price
from penteract.schedule.registry import ScheduleName
from penteract.step.offsets import offsets
from penteract.step.program import Program, compile_step
from penteract.step.walk import walk
from samples import sample

GIB = 2**30
LARGE = ModelSpec(
    layers=1, hidden_size=4096, heads=32, kv_heads=8, head_size=128, ffn_size=14336, vocab_size=128256
)  # fmt: skip
WIDE = ModelSpec(layers=1, hidden_size=8, heads=2, kv_heads=2, head_size=4, ffn_size=8, vocab_size=4096)


def transient(layout: Layout, tokens: int) -> int:
    """Bytes that the loss takes in bf16 where its registers have fixed places: what it is given and its gradient, all
    that is in flight, and what a declaration allocates at most."""
    do, widths = Do(Mesh(layout)), RECIPES["bf16"].widths
    h, targets = do.receive((tokens, 1, LARGE.hidden_size)), do.input("targets", (tokens, 1))
    w = Param("head.weight", (LARGE.vocab_size, LARGE.hidden_size), (Shard(0, "tp"),))
    linear_cross_entropy(do, h, w, targets, "cross_entropy", z=1e-4)
    chunk = lower(do.tape, layout.edit(-1), split=layout.schedule == "zb_h1")
    found = offsets(chunk, widths)
    calls = [i.call for some in chunk.actions.values() for i in some if i.call.phase not in ("start", "finish")]
    beside = [
        OPS[c.site.op_name].declaration.workspace(
            c.phase, [s.shape for s in c.site.ins], c.site.weights, c.site.attrs, widths
        )  # type: ignore[misc]
        for c in calls
    ]
    return sum(found.buffers.values()) + max(s.size for s in found.temporary.values()) + max(beside)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_128k_words_of_8k_tokens_take_less_than_a_gib(schedule: str) -> None:
    chunked = Layout(loss="chunked", schedule=schedule)  # type: ignore[arg-type]
    assert transient(chunked, 8192) < GIB
    assert transient(replace(chunked, loss="reference"), 8192) > 6 * GIB
    assert transient(replace(chunked, loss_chunk=512), 8192) < GIB / 2


def test_no_product_is_made_twice() -> None:
    flops = [
        price(compile_step(LARGE, Layout(loss=loss), 8192, precision="bf16")).flops for loss in ("reference", "chunked")
    ]
    assert flops[0] == flops[1]


@pytest.mark.parametrize("z", [0.0, 0.01])
def test_a_step_takes_at_most_what_is_priced(z: float) -> None:
    """The most bytes that live at once in a step, watched: those of the price, to the byte."""
    seen = {}
    for layout in (Layout(), Layout(loss="chunked", loss_chunk=48)):
        p = compile_step(replace(WIDE, z_loss_coefficient=z), layout, 256, precision="bf16")
        run = _run(p)
        with Watched() as watched:
            walk(p, run)
        seen[layout.loss] = watched.peak
        assert watched.peak == price(p).peak
    assert seen["chunked"] < seen["reference"] / 3


def _run(p: Program) -> Executor:
    cpu = torch.device("cpu")
    state = allocate(p, cpu)
    initialise(p, state, 0)
    run = Executor(p, state, Gloo(0), dict(REFERENCE), Fresh("bf16", cpu))
    drawn = [sample(0, p.sequence_length, p.model.vocab_size)]
    run.micro_batches = [constants(p, cpu) | micro_batch(p, drawn, cpu)]
    run.counts.copy_(torch.tensor(target_counts(p, [drawn])))
    return run


@pytest.mark.parametrize(("chunk", "kinds"), [(256, {False}), (64, {False, True})])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_further_chunks_add_to_the_weight_gradient_of_the_first(
    schedule: ScheduleName, chunk: int, kinds: set[bool]
) -> None:
    """So they are priced, in a step's only micro-batch too."""
    steps = Estimator(TINY, cluster("1xH100"), 256).steps
    steps.seconds(Layout(loss="chunked", loss_chunk=chunk, schedule=schedule))
    found = {adds for _, site, phase, _, adds in steps.costs if (site.op_name, phase) == ("logits", "weight_gradient")}
    assert found == kinds
