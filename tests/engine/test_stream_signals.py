"""Numbers that streams write and wait for, with the driver's calls replaced by a list of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from penteract.engine.comm.direct import stream_signals
from penteract.engine.comm.direct.stream_signals import SLOTS, StreamSignals

PADS = [1000, 200_000, 3_000_000]
WRITE, WAIT = "cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """(name, address, value) of each call."""
    found = list[tuple[str, int, int]]()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(stream_signals, "_call", lambda name, stream, at, value: found.append((name, at, value)))
    return found


@pytest.mark.parametrize("number", [0, 1])
def test_each_waits_for_what_the_others_write(calls: list[tuple[str, int, int]], number: int) -> None:
    first, ranks = 4 * SLOTS * number, range(len(PADS))
    every = [StreamSignals(PADS, me, number) for me in ranks]
    cleared = {at for name, at, value in calls if (name, value) == (WRITE, 0)}
    assert cleared == {PADS[me] + first + 4 * i for me in ranks for i in ranks if i != me}
    for meeting in (1, 2):
        calls.clear()
        for one in every:
            one.meet()
        written = {(at, value) for name, at, value in calls if name == WRITE}
        waited = {(at, value) for name, at, value in calls if name == WAIT}
        assert written == waited == {(at, meeting) for at in cleared}
        # A rank writes to all before it waits for any.
        assert [name for name, _, _ in calls[:4]] == [WRITE, WRITE, WAIT, WAIT]


def test_groups_of_a_rank_have_numbers_of_their_own(calls: list[tuple[str, int, int]]) -> None:
    one, other = StreamSignals(PADS, 0, 0), StreamSignals(PADS[:2], 0, 1)
    calls.clear()
    one.meet()
    first = {at for _, at, _ in calls}
    other.meet()
    assert not first & {at for _, at, _ in calls[4:]}
    assert 4 * SLOTS * 2 <= 2048  # bytes of a pad


def test_numbers_go_on_at_zero_after_the_last(calls: list[tuple[str, int, int]]) -> None:
    one = StreamSignals(PADS[:2], 0, 0)
    one.count = 2**32 - 1
    calls.clear()
    one.meet()
    assert {value for _, _, value in calls} == {0}
