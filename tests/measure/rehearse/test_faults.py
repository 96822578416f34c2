"""Each planted fault is named by a rehearsal in one line; without one there is none."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from measure.rehearse import faults
from measure.rehearse.faults import RANK, Fault
from penteract.config.layout import Layout
from penteract.config.model import ModelSpec
from penteract.config.run import Precision, RunSpec, Training
from penteract.measure.rehearse.checks.price_check import check_price, owners
from penteract.measure.rehearse.findings import Findings
from penteract.measure.rehearse.rehearsing import rehearse_run
from tiny import SIZES

PLAIN = Layout(dp=2, tp=2, pp=2, gradient_accumulation_steps=2)
SHARDED = Layout(dp=2, tp=2, zero=3, gradient_accumulation_steps=2)
# The fault, a layout in which it can show, its code, and words of its line.
FAULTS: tuple[tuple[Fault, Layout, str, str], ...] = (
    (faults.send_left_out, PLAIN, "MESSAGE", "has no send there"),
    (faults.message_in_another_dtype, PLAIN, "MESSAGE", "of float64"),
    (faults.group_never_made, PLAIN, "GROUP", "{0,1}, a group that no round makes"),
    (faults.collectives_in_another_order, PLAIN, "COLLECTIVE", "reduce bucket"),
    (faults.collective_left_out, PLAIN, "COLLECTIVE", "has no partner on rank 1"),
    (faults.no_wires_at_all, PLAIN, "COLLECTIVE", "has no partner on rank"),
    (faults.register_freed_too_early, PLAIN, "FREED", "freed after"),
    (faults.free_left_out, PLAIN, "KEPT", "is never freed"),
    (faults.wait_left_out, PLAIN, "WAIT", "still fills it"),
    (faults.registers_over_each_other, PLAIN, "ARENA", "which lives"),
    (faults.shape_refused, PLAIN, "KERNEL", "'reference' of rms_norm refuses"),
    (faults.workspace_not_declared, PLAIN, "WORKSPACE", "'reference' of swiglu allocates"),
    (faults.bucket_never_gathered, SHARDED, "GATHER", "which is not gathered"),
    (faults.gather_not_waited_for, SHARDED, "GATHER", "is waited for too late"),
    (faults.update_of_what_is_not_reduced, SHARDED, "REDUCE", "whose gradients are not reduced"),
    (faults.gradient_buffer_not_acquired, SHARDED, "GRADIENT", "whose buffer is another's"),
)


def run_of(layout: Layout) -> RunSpec:
    return RunSpec(
        model=ModelSpec(**SIZES), layout=layout, sequence_length=16, precision=Precision(dtype="fp32", device="cpu"),
        train=Training(validation_every=0),
    )  # fmt: skip


@pytest.mark.parametrize("layout", [PLAIN, SHARDED], ids=["plain", "sharded"])
def test_a_sound_run_has_none(layout: Layout) -> None:
    assert rehearse_run(run_of(layout), RANK).mismatches == ()


@pytest.mark.parametrize(("fault", "layout", "code", "words"), FAULTS, ids=[f[0].__name__ for f in FAULTS])
def test_a_fault_is_named(fault: Fault, layout: Layout, code: str, words: str) -> None:
    with ExitStack() as stack:
        fault(stack)
        found = rehearse_run(run_of(layout), RANK).mismatches
    named = [str(m) for m in found if m.code == code and words in f"{m.what} · {m.where}"]
    assert named, [str(m) for m in found]
    assert all("\n" not in line for line in named)


@pytest.mark.parametrize(("owner", "more", "wrong"), [("host", 1, False), ("host", -1, True), ("activations", 1, True),
                                                      ("activations", 0, False), ("workspace", -1, False)])  # fmt: skip
def test_bytes_are_held_to_their_price(owner: str, more: int, wrong: bool) -> None:
    price: Any = SimpleNamespace(resident={}, arena=1 << 20, routed=0, workspace=1 << 20, host=1 << 20)
    most = {"activations": 1 << 20, "workspace": 1 << 20, "host": 1 << 20}
    most[owner] += more
    findings = Findings(0)
    check_price([*owners(most, most, price)], findings)
    assert [f.code for f in findings.faults] == ["PRICE"] * wrong
