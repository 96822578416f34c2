"""The recipe for a mutation test is followed: a fault of a step, and one of a schedule."""

from __future__ import annotations

import pytest

from layouts import Case, Subject, run_case
from penteract.config.layout import Layout
from penteract.config.model import ModelSpec
from penteract.engine.kernels.kernel import Env, Tensors, TorchKernel
from penteract.errors import Bug
from penteract.ops.tape import Site
from penteract.schedule.actions import P2PBatch
from penteract.schedule.check import check
from penteract.schedule.registry import generate
from penteract.schedule.schedule import round_robin
from penteract.schedule.transfers import with_transfers
from pool import Pool
from tiny import SIZES

DENSE = ModelSpec(**SIZES)


def swiglu_of_the_wrong_sign(s: Subject) -> None:
    """A fault of a step: a function that changes the program, its kernels or a rule before the step runs."""
    real = s.kernels["swiglu"].forward

    def turned(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
        real(env, site, ins, weights, outs)
        outs[0].neg_()

    s.kernels["swiglu"] = TorchKernel(turned, s.kernels["swiglu"].input_gradient)


def test_a_fault_of_a_step_turns_one_comparison_red(pool: Pool) -> None:
    case = Case(DENSE, Layout(dp=2))
    assert not set().union(*(v.red for v in pool.run(run_case, case)))
    assert set().union(*(v.red for v in pool.run(run_case, case, swiglu_of_the_wrong_sign))) == {"values"}


def test_a_fault_of_a_schedule_is_named() -> None:
    """Lists that would deadlock: what rank 1 sends waits for what it has not received."""
    placement = round_robin(2, 1)
    lists = with_transfers(generate("1f1b", 2, 1, 3), placement)
    at = next(i for i, a in enumerate(lists[1]) if isinstance(a, P2PBatch) and len(a.transfers) == 2)
    late = [*lists[1][:at], *lists[1][at + 1 :], lists[1][at]]
    check(lists, placement, 3)
    with pytest.raises(Bug, match="SCHEDULE"):
        check([lists[0], late], placement, 3)
