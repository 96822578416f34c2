from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penteract.engine.data.pack import DocumentPacking, WindowSamples, split
from penteract.engine.data.tokens import TokenStream
from penteract.errors import BadInput, CorruptData

END = 9


def stream(*ids: int, vocab_size: int = 10_000) -> TokenStream:
    return TokenStream((np.array(ids, np.uint16),), vocab_size)


def test_borders_of_documents_made_by_hand() -> None:
    window = np.array([1, 2, END, 3, END, END, 4, 5, 6])  # a tail, a whole document, an empty one, a head
    sample = DocumentPacking(8, END).sample(window)
    assert sample.tokens.tolist() == [1, 2, 9, 3, 9, 9, 4, 5]
    assert sample.targets.tolist() == [2, 9, -1, 9, -1, -1, 5, 6]
    assert sample.start.tolist() == [0, 0, 0, 3, 3, 5, 6, 6]
    assert sample.positions.tolist() == [0, 1, 2, 0, 1, 0, 0, 1]
    assert {a.dtype for a in (sample.tokens, sample.targets, sample.start, sample.positions)} == {np.dtype(np.int64)}
    assert window.tolist() == [1, 2, 9, 3, 9, 9, 4, 5, 6]


def test_unpacked_windows_are_one_document() -> None:
    sample = DocumentPacking(3, None).sample(np.array([1, END, 2, 3]))
    assert sample.targets.tolist() == [END, 2, 3]
    assert (sample.start.tolist(), sample.positions.tolist()) == ([0, 0, 0], [0, 1, 2])


@given(st.lists(st.integers(0, END), min_size=2, max_size=60), st.integers(1, 8))
def test_packing_agrees_with_its_definition(ids: list[int], length: int) -> None:
    packing = DocumentPacking(length, END)
    for w in range(packing.windows(len(ids))):
        window = np.array(ids[w * length : w * length + length + 1])
        sample, first = packing.sample(window), 0
        for i in range(length):
            assert (sample.start[i], sample.positions[i]) == (first, i - first)
            assert sample.targets[i] == (-1 if window[i] == END else window[i + 1])
            first = i + 1 if window[i] == END else first


@given(st.integers(2, 200), st.integers(1, 9), st.integers(0, 5))
def test_an_epoch_asks_for_every_target_once(count: int, length: int, seed: int) -> None:
    samples = WindowSamples(stream(*range(count)), DocumentPacking(length, None), seed)
    for epoch in range(2):
        seen = [int(t) for i in range(len(samples)) for t in samples.sample(epoch * len(samples) + i).targets]
        assert sorted(seen) == list(range(1, len(samples) * length + 1))
    assert len(samples) == (count - 1) // length


def test_order_depends_on_seed_and_index_alone() -> None:
    def first_tokens(samples: WindowSamples, indices: list[int]) -> list[int]:
        return [int(samples.sample(i).tokens[0]) for i in indices]

    tokens, packing, indices = stream(*range(500)), DocumentPacking(4, None), list(range(300))
    whole = first_tokens(WindowSamples(tokens, packing, 7), indices)
    assert first_tokens(WindowSamples(tokens, packing, 7), indices[::-1]) == whole[::-1]
    assert first_tokens(WindowSamples(tokens, packing, 8), indices) != whole
    n = len(WindowSamples(tokens, packing, 7))
    assert whole[:n] != whole[n : 2 * n]
    validation = WindowSamples(tokens, packing, 0, one_order=True)
    assert first_tokens(validation, list(range(n))) == first_tokens(validation, list(range(n, 2 * n)))


@given(st.lists(st.integers(0, END), min_size=1, max_size=200), st.floats(0, 0.9), st.integers(1, 4))
def test_split_keeps_every_token_on_one_side(ids: list[int], fraction: float, parts: int) -> None:
    arrays = tuple(np.array(a, np.uint16) for a in np.array_split(ids, parts))
    train, validation = split(TokenStream(arrays, 10), fraction, END)
    assert [*train.read(0, len(train)), *validation.read(0, len(validation))] == ids
    assert abs(len(validation) - fraction * len(ids)) <= fraction * len(ids) / 2 + 1


def test_split_cuts_between_documents() -> None:
    ids = [*([1] * 9), END] * 10
    train, validation = split(stream(*ids), 0.26, END)
    assert len(validation) == 30
    assert train.read(len(train) - 1, len(train)) == [END]
    assert len(split(stream(*[1] * 99, END), 0.2, END)[1]) == 20  # one long document is cut inside
    assert len(split(stream(*ids), 0, END)[1]) == 0


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_split_refuses_what_is_no_share(fraction: float) -> None:
    with pytest.raises(BadInput, match="allowed 0 <= f < 1"):
        split(stream(1, 2), fraction, END)


def test_an_id_outside_the_vocabulary_is_found() -> None:
    with pytest.raises(CorruptData, match=r"found 300 / allowed 0\.\.256"):
        WindowSamples(stream(1, 300, 2, vocab_size=257), DocumentPacking(2, None), 0).sample(0)


def test_no_sample_of_nothing() -> None:
    with pytest.raises(IndexError):
        WindowSamples(stream(1), DocumentPacking(2, None), 0).sample(0)
    with pytest.raises(IndexError):
        WindowSamples(stream(1, 2, 3), DocumentPacking(2, None), 0).sample(-1)
