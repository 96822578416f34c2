"""What casts to FP8 allocate is what they declare, in the first step as in later ones, and what they keep is priced.

A rehearsal counts every storage of a rank, and the ranks with which it agrees on largest values need not be there.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import pytest

from penteract.config.layout import FUSIONS, Elementwise, Layout
from penteract.config.model import ModelSpec
from penteract.config.precision.policy import RECIPES
from penteract.config.run import Precision, RunSpec, Training
from penteract.engine.device.zeros import Zeros
from penteract.engine.session.trainer import Trainer
from penteract.measure.rehearse.checks.kernel_calls import KernelCounter, MeasuredCall
from penteract.measure.rehearse.rank_rehearsal import RankRehearsal, rehearse_rank
from penteract.measure.rehearse.rehearsing import target_of
from penteract.ops.declarations.quantised.fp8 import ONE_SCALE
from penteract.ops.tape import Phase, Site

MODEL = ModelSpec(layers=2, hidden_size=64, heads=4, kv_heads=2, head_size=16, ffn_size=128, vocab_size=256)
LAYOUTS = {"tp1": Layout(), "recomputed": Layout(recompute=("*",)), "tp2": Layout(tp=2), "cp2": Layout(cp=2)}


@dataclass
class Observed:
    """Of a rehearsal: each call in FP8 that was run, as (op, phase, bytes allocated, bytes declared); the table of
    numbers, which the start has made, and how many were asked for in each step."""

    made: RankRehearsal | None = None
    calls: list[tuple[str, Phase, int, int]] = field(default_factory=list[tuple[str, Phase, int, int]])
    tables: list[Zeros] = field(default_factory=list[Zeros])
    asked: list[int] = field(default_factory=list[int])


def observed(layout: Layout, elementwise: Elementwise = "triton", micro_batches: int = 1) -> Observed:
    layout = replace(layout, elementwise=elementwise, fuse=FUSIONS, gradient_accumulation_steps=micro_batches)
    spec = RunSpec(
        model=MODEL, sequence_length=32, layout=replace(layout, loss="chunked"),
        precision=Precision.of(RECIPES["fp8_tensorwise"]), train=Training(validation_every=0),
    )  # fmt: skip
    found, run, following, begin = Observed(), KernelCounter._run, Zeros.next, Trainer.start

    def watched(self: KernelCounter, phase: Phase, kernel: Any, env: Any, site: Site, *about: Any) -> MeasuredCall:
        made = run(self, phase, kernel, env, site, *about)
        if "fp8" in site.attrs:
            found.calls.append((site.op_name, phase, made.workspace, self._declared(phase, site)))
        return made

    def noted(self: Zeros, *about: Any) -> Any:
        found.asked[-1] += 1
        return following(self, *about)

    def start(self: Trainer, *about: Any) -> Any:
        found.asked.append(0)
        return begin(self, *about)

    def tables(trainer: Trainer) -> None:
        found.tables.append(trainer.run.env.zeros)

    watches = (KernelCounter, "_run", watched), (Zeros, "next", noted), (Trainer, "start", start)
    with patch.object(*watches[0]), patch.object(*watches[1]), patch.object(*watches[2]):
        found.made = rehearse_rank(spec, 0, target_of(spec, None), tamper=tables)
    return found


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_casts_allocate_what_they_declare_in_every_step(layout: Layout) -> None:
    """None makes a number of its own in the first step, also where ranks agree on a largest value that is known."""
    found = observed(layout)
    assert {name for name, *_ in found.calls} == {"quantise", "fp8_linear", "fp8_glu"}
    assert not [call for call in found.calls if call[2] != call[3]]
    assert found.made is not None and found.made.faults == ()  # nor have others any bytes but those of their price


@pytest.mark.parametrize("elementwise", ["reference", "triton"])
def test_the_table_is_priced_and_does_not_grow_with_micro_batches(elementwise: Elementwise) -> None:
    """A layer has four linear layers, and casts what each reads, its weights and its gradient. A rehearsal runs some
    calls of a first step twice: the second is counted."""
    casts = 4 * 3 * MODEL.layers
    for micro_batches in (1, 3):
        found = observed(LAYOUTS["tp2"], elementwise, micro_batches)
        assert found.asked[1] == micro_batches * casts
        (zeros,) = found.tables
        assert zeros.table.nbytes == casts * ONE_SCALE
        assert found.made is not None and found.made.faults == ()
        (owner,) = [owner for owner in found.made.owners if owner.name == "data"]
        assert owner.most == owner.priced > zeros.table.nbytes
