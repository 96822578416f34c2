"""What is predicted ahead: tokens and targets k further, within documents, whoever holds them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penteract.config.layout import Layout
from penteract.config.model import ModelSpec
from penteract.engine.executor import feed
from penteract.engine.executor.feed import micro_batch, target_counts
from penteract.parallel.context import token_indices
from penteract.step.program import compile_step
from samples import Sample, sample
from tiny import SIZES

CPU = torch.device("cpu")


def test_borders_made_by_hand() -> None:
    """Two documents, 10 11 12 13 and 20 21 22; the third token of the second is the window's last target."""
    starts = torch.tensor([0, 0, 0, 0, 4, 4])
    one = Sample(torch.tensor([10, 11, 12, 13, 20, 21]), torch.tensor([11, 12, 13, -1, 21, 22]), starts,
                 torch.arange(6) - starts)  # fmt: skip
    p = compile_step(ModelSpec(**SIZES, mtp_layers=2), Layout(), 6)
    batch = micro_batch(p, [one], CPU)
    assert batch["tokens:1 ahead"][:3, 0].tolist() == [11, 12, 13]
    assert batch["targets:1 ahead"][:, 0].tolist() == [12, 13, -1, -1, 22, -1]
    assert batch["tokens:2 ahead"][:2, 0].tolist() == [12, 13]
    assert batch["targets:2 ahead"][:, 0].tolist() == [13, -1, -1, -1, -1, -1]
    assert target_counts(p, [[one], [one]]) == [2 * 5, 2 * (3 + 1)]


@given(index=st.integers(0, 40), cp=st.sampled_from([1, 2, 4]), rank=st.integers(0, 3), k=st.integers(1, 3))
def test_a_rank_sees_what_is_k_further(index: int, cp: int, rank: int, k: int) -> None:
    rank, length = rank % cp, 16
    p = compile_step(ModelSpec(**SIZES, mtp_layers=3), Layout(cp=cp), length, rank=rank)
    one = sample(index, length, 64)
    batch = micro_batch(p, [one], CPU)
    own = token_indices(length, cp, rank)
    seen = zip(own, batch[f"tokens:{k} ahead"][:, 0].tolist(), batch[f"targets:{k} ahead"][:, 0].tolist(), strict=True)
    for i, token, target in seen:
        # All targets on the way belong to the same document as token i: one that does not is ignored.
        if i + k < length and (one.targets[i : i + k + 1] >= 0).all():
            assert (token, target) == (one.tokens[i + k], one.targets[i + k])
        else:
            assert target == -1
            assert 0 <= token < 64


def test_lists_of_tokens_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long sequence they take longer than all else of a micro-batch."""
    made = list[tuple[int, int, int]]()
    monkeypatch.setattr(feed, "token_indices", lambda *about: made.append(about) or token_indices(*about))
    p = compile_step(ModelSpec(**SIZES), Layout(cp=4, cp_method="all_gather"), 48, rank=1)
    for index in range(3):
        feed.micro_batch(p, [sample(index, 48, 64)], CPU)
    assert made == [(48, 4, 1)]
