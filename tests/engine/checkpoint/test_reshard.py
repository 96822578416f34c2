"""What one layout wrote, any other reads, bit for bit."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from engine.checkpoint.shards import cut, load_whole, noise, part, same, save_all, save_whole, tilings
from penteract.engine.checkpoint import Slice, latest, load, verify, writing
from penteract.errors import BadInput, Bug

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.float8_e4m3fn])
SHAPES = st.lists(st.integers(0, 9), min_size=0, max_size=3)


@settings(max_examples=30)
@given(data=st.data(), kinds=st.lists(st.tuples(SHAPES, DTYPES), min_size=1, max_size=3), world=st.integers(1, 4),
       largest=st.sampled_from([writing.LARGEST_FILE, 1000, 300]), threads=st.sampled_from([1, 3]))  # fmt: skip
def test_any_cut_reads_any_other(
    data: st.DataObject, kinds: list[tuple[list[int], torch.dtype]], world: int, largest: int, threads: int
) -> None:
    tensors = {f"layers.{i}.w": noise(shape, dtype, i) for i, (shape, dtype) in enumerate(kinds)}
    wrote, reads = ({n: data.draw(tilings(t.shape, world)) for n, t in tensors.items()} for _ in range(2))
    extra: dict[str, Any] = {"step": 7, "seed": 1, "layout": {"tp": 2}, "note": "é", "rate": 0.1}
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patched:
        patched.setattr(writing, "LARGEST_FILE", largest)
        at = save_all(Path(name), 7, [cut(tensors, wrote, r) for r in range(world)], extra)
        assert at == latest(Path(name))
        assert at.name == "step-00000007"
        assert all(file.stat().st_size <= largest for file in at.glob("*.safetensors"))
        verify(at)
        for rank in range(world):
            empty = {n: torch.zeros_like(t) for n, t in tensors.items()}
            assert load(at, cut(empty, reads, rank), threads) == extra
            for n, cuts in reads.items():
                for r, box in cuts:
                    expected = part(tensors[n], box) if r == rank else torch.zeros_like(part(tensors[n], box))
                    assert same({n: part(empty[n], box)}, {n: expected})


def test_replicas_are_written_once_and_read_by_all(tmp_path: Path) -> None:
    w = torch.arange(12.0).view(3, 4)
    ranks = [[Slice("w", (3, 4), (0, 0), w, rank == 2)] for rank in range(3)]
    at = save_all(tmp_path, 1, ranks)
    assert sorted(p.name for p in at.iterdir()) == ["manifest.json", "rank-00002.safetensors", "rectangles.bin"]
    copy = torch.zeros(3, 2)
    load(at, [Slice("w", (3, 4), (0, 1), copy, False)])
    assert copy.equal(w[:, 1:3])


def test_one_ranks_file_is_plain_safetensors(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(3, dtype=torch.uint8), "b": torch.randn(2, 3), "scalar": torch.tensor(2.0)}
    at = save_whole(tmp_path, 1, tensors)
    assert same(load_file(at / "rank-00000.safetensors"), tensors)
    assert json.loads((at / "manifest.json").read_text())["tensors"]["b"]["dtype"] == "F32"


@pytest.mark.parametrize(
    ("boxes", "said"),
    [
        ([((0, 0), (2, 4)), ((1, 0), (2, 4))], "overlap"),
        ([((0, 0), (2, 4))], "missing"),
        ([((0, 0), (4, 4))], "outside"),
        ([((0, 0), (3, 2)), ((0, 0), (3, 2))], "overlap"),
    ],
)
def test_shards_that_do_not_tile_are_never_committed(tmp_path: Path, boxes: list[Any], said: str) -> None:
    ranks = [[Slice("w", (3, 4), offset, torch.zeros(size))] for offset, size in boxes]
    with pytest.raises(Bug, match=said) as caught:
        save_all(tmp_path, 1, ranks)
    assert "w" in caught.value.where
    assert not (tmp_path / "step-00000001").exists()


def test_a_tensor_that_nobody_owns_is_never_committed(tmp_path: Path) -> None:
    ranks = [[Slice("v", (2,), (0,), torch.ones(2), rank == 0), Slice("w", (2,), (0,), torch.ones(2), False)]
             for rank in range(2)]  # fmt: skip
    with pytest.raises(Bug, match="2 elements are missing") as caught:
        save_all(tmp_path, 1, ranks)
    assert caught.value.where == "w"


def test_what_is_wanted_beyond_a_tensor_is_a_bug(tmp_path: Path) -> None:
    at = save_whole(tmp_path, 1, {"w": torch.ones(3, 4)})
    with pytest.raises(Bug, match="outside"):
        load(at, [Slice("w", (3, 4), (2, 0), torch.zeros(2, 4))])


def test_parameters_that_want_gradients_are_filled(tmp_path: Path) -> None:
    at = save_whole(tmp_path, 1, {"w": torch.ones(3, requires_grad=True)})
    leaf = torch.zeros(3, requires_grad=True)
    load(at, [Slice("w", (3,), (0,), leaf)])
    assert leaf.is_leaf and bool((leaf == 1).all())


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (Slice("v", (3, 4), (0, 0), torch.zeros(3, 4)), "no v"),
        (Slice("w", (4, 3), (0, 0), torch.zeros(4, 3)), r"found \(3, 4\).*allowed \(4, 3\)"),
        (Slice("w", (3, 4), (0, 0), torch.zeros(3, 4, dtype=torch.bfloat16)), "found F32.*allowed BF16"),
        (Slice("w", (3, 4), (0, 0), torch.zeros(3, 4, dtype=torch.complex64)), "found F32.*allowed torch.complex64"),
    ],
)
def test_another_model_is_refused_before_anything_is_filled(tmp_path: Path, wanted: Slice, said: str) -> None:
    at = save_whole(tmp_path, 1, {"w": torch.ones(3, 4)})
    fine = torch.zeros(3, 4)
    with pytest.raises(BadInput, match=said):
        load(at, [Slice("w", (3, 4), (0, 0), fine), wanted])
    assert not fine.any()


def test_what_goes_beside_is_json(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="JSON"):
        save_whole(tmp_path, 1, {"w": torch.ones(1)}, extra={"x": {1, 2}})
    with pytest.raises(BadInput, match="no checkpoint here"):
        latest(tmp_path)


def test_views_of_one_buffer_are_told_apart(tmp_path: Path) -> None:
    flat = torch.arange(20.0)
    tensors = {"a": flat[:8].view(2, 4), "b": flat[8:].view(4, 3).t()}
    at = save_whole(tmp_path, 1, tensors)
    assert same(load_whole(at, tensors), {n: t.contiguous() for n, t in tensors.items()})
