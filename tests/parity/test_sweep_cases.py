"""The sweep leaves nothing out: its cases counted by hand, and every pair of options met."""

from __future__ import annotations

from collections import Counter
from math import comb

from sweep_cases import possible_pairs, sweep


def meshes(power: int, axes: int) -> int:
    """Ways to share 2^power ranks over `axes` axes."""
    return comb(power + axes - 1, axes - 1)


def expected(power: int) -> tuple[int, int]:
    """(dense, experts): four schedules on every mesh, three context methods where cp > 1, every ep that divides dp·cp.

    Without a pipeline "overlapped" stands in for "interleaved".
    """
    dense = experts = 0
    for cp in range(power + 1):
        for dp in range(power - cp + 1):
            rest = meshes(power - cp - dp, 2)  # tp, pp
            runs = 4 * rest * (3 if cp else 1)
            dense, experts = dense + runs, experts + runs * (dp + cp + 1)
    return dense, experts


def test_every_mesh_with_every_schedule_and_method() -> None:
    cases, coverage = sweep()
    counted = Counter((case.layout.world, case.model.moe is not None) for case in cases)
    for power in (1, 2, 3):
        assert (counted[2**power, False], counted[2**power, True]) == expected(power)
    assert len(set(map(repr, cases))) == len(cases)
    assert coverage.covered == possible_pairs()
