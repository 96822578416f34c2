"""Places for largest values: zero whenever one is asked for, at addresses that are the same in every step."""

from __future__ import annotations

import pytest
import torch

from penteract.engine.device.zeros import Zeros
from penteract.errors import Bug

CPU = torch.device("cpu")


@pytest.mark.parametrize("asked", [2, 3, 8])
def test_each_is_zero_and_steps_get_the_same(asked: int) -> None:
    """Also where a step asks for more than there are."""
    zeros, steps = Zeros(3, CPU), list[list[int]]()
    for _ in range(2):
        zeros.begin()
        steps.append([])
        for _ in range(asked):
            number = zeros.next()
            assert number.item() == 0
            number.fill_(float("nan"))
            steps[-1].append(number.data_ptr())
    assert steps[0] == steps[1]
    assert not any(address % 16 for address in steps[0])
    assert len({*steps[0]}) == min(asked, 3)


def test_a_rank_that_casts_nothing_has_none() -> None:
    zeros = Zeros(0, CPU)
    zeros.begin()
    assert zeros.table.nbytes == 0
    with pytest.raises(Bug, match="has none"):
        zeros.next()
