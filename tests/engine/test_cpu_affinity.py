"""Threads are shared by what this process may use, not by what the machine has."""

from __future__ import annotations

import os

import pytest

from penteract.engine.device import cpu_affinity as cores
from penteract.engine.runtime.rank_environment import rank_environment


@pytest.mark.parametrize(
    ("mask", "quota", "ranks", "threads"),
    [
        (64, None, 1, 64),
        (8, None, 2, 4),
        (8, 2.5, 1, 2),
        (8, 2.5, 2, 1),
        (8, 0.5, 1, 1),
        (3, 16.0, 2, 1),
        (2, None, 5, 1),
    ],
)
def test_ranks_share_what_mask_and_control_group_leave(
    monkeypatch: pytest.MonkeyPatch, mask: int, quota: float | None, ranks: int, threads: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(mask)), raising=False)
    monkeypatch.setattr(cores.cgroup, "cores", lambda: quota)
    assert cores.threads_of(ranks) == threads
    assert rank_environment({}, 0, ranks, 0)["OMP_NUM_THREADS"] == str(threads)
    assert rank_environment({"OMP_NUM_THREADS": "7"}, 0, ranks, 0)["OMP_NUM_THREADS"] == "7"  # the user's stays


def test_where_there_is_no_mask_all_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cores.allowed() == 1
