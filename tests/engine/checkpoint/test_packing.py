"""Shares as files: each fits, each is plain safetensors, and together they are the share."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from engine.checkpoint.shards import noise
from penteract.engine.checkpoint import rank_file
from penteract.engine.checkpoint.boxes import WIDTHS, volume
from penteract.engine.checkpoint.packing import LARGEST_FILE, FileEntry, file_of, most_files, packed, rank_of
from penteract.engine.checkpoint.slices import DTYPES, Slice, raw
from penteract.engine.checkpoint.writing import entry
from penteract.errors import Bug
from penteract.units import GIB

SHAPES = st.lists(st.integers(1, 9), min_size=0, max_size=3)
KINDS = st.lists(st.tuples(SHAPES, st.sampled_from(["F32", "BF16", "F64", "U8"])), min_size=1, max_size=6)


def entries_of(tensors: dict[str, torch.Tensor]) -> list[FileEntry]:
    return [entry(Slice(n, tuple(t.shape), (0,) * t.dim(), t), finite=False) for n, t in tensors.items()]


@settings(max_examples=40)
@given(KINDS, st.integers(280, 2000), st.integers(1, 3))
def test_files_of_any_size(kinds: list[tuple[list[int], str]], largest: int, threads: int) -> None:
    tensors = {f"layers.{i}.w": noise(shape, DTYPES[dtype], i) for i, (shape, dtype) in enumerate(kinds)}
    entries = entries_of(tensors)
    with tempfile.TemporaryDirectory() as name:
        table = rank_file.write(Path(name), entries, 3, threads, largest)
        found = {path.name: load_file(path) for path in Path(name).iterdir()}
        sizes = {path.name: path.stat().st_size for path in Path(name).iterdir()}
    assert sizes == table.files
    assert list(sizes) and max(sizes.values()) <= largest
    assert sorted(table.files, key=len) == [file_of(3, n) for n in range(len(found))]
    assert {rank_of(file) for file in found} == {3}
    for name, tensor in tensors.items():
        made = torch.zeros_like(tensor)
        for part in table.tensors[name].parts:
            at = tuple(slice(o, o + n) for o, n in zip(*part.box, strict=True))
            made[at] = found[part.file].pop(part.key)
        assert bytes(raw(made)) == bytes(raw(tensor))
    assert not any(found.values())
    assert sum(volume(part.box) for e in table.tensors.values() for part in e.parts) == sum(
        t.numel() for t in tensors.values()
    )


@given(SHAPES, st.integers(1, 400))
def test_parts_are_contiguous_and_in_order(shape: list[int], most: int) -> None:
    x = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    (whole,) = entries_of({"w": x})
    parts = [*whole.cut(most)]
    assert b"".join(bytes(data) for part in parts for data in part.parts()) == bytes(raw(x))
    assert all(part.bytes <= max(4, most) for part in parts)
    assert b"".join(bytes(d) for p in parts for part in p.cut(8) for d in part.parts()) == bytes(raw(x))
    if whole.bytes <= most:
        assert parts == [whole]


def unread(begin: int, end: int) -> Iterator[bytes]:
    raise AssertionError("only its size is asked for")


def share(*sizes: tuple[int, ...]) -> list[FileEntry]:
    zeros = [(size, (tuple(0 for _ in size), size)) for size in sizes]
    return [FileEntry(f"layers.{i}.w", shape, box, "F32", True, unread) for i, (shape, box) in enumerate(zeros)]


def test_the_limit_is_4_gib() -> None:
    assert LARGEST_FILE == 4 * GIB
    embedding = share((128_256, 16_384), (16_384,))  # 7.83 GiB
    files = packed(embedding, 0, LARGEST_FILE)
    assert [file.name for file in files] == ["rank-00000.safetensors", "rank-00000-00001.safetensors"]
    assert all(file.bytes <= LARGEST_FILE for file in files)
    assert [e.key for file in files for e in file.entries] == ["layers.0.w@0,0", "layers.0.w@65535,0", "layers.1.w"]


def test_a_share_that_fits_is_one_file_with_whole_tensors() -> None:
    (file,) = packed(share((1024, 1024), (7,)), 12, LARGEST_FILE)
    assert file.name == "rank-00012.safetensors"
    assert [e.key for e in file.entries] == ["layers.0.w", "layers.1.w"]


@given(st.lists(st.integers(1, 10**9), max_size=30))
def test_room_for_files_is_enough(sizes: list[int]) -> None:
    entries = share(*((n,) for n in sizes))
    files = packed(entries, 0, LARGEST_FILE)
    assert len(files) <= most_files(sum(e.bytes for e in entries), 1)
    assert all(a.bytes + b.bytes > LARGEST_FILE for a, b in pairwise(files))


@pytest.mark.parametrize("largest", [LARGEST_FILE, 200])
def test_a_rectangle_that_is_owned_twice_is_found(largest: int) -> None:
    with pytest.raises(Bug, match="owns one rectangle twice"):
        packed(share((4,)) * 2, 0, largest)


@pytest.mark.parametrize("name", ["", "rank-00000", "../rank-00000.safetensors", "rank-00000-1.safetensors",
                                  "rank-00000-00001-00001.safetensors", "rank-00000.safetensors\n"])  # fmt: skip
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not the name of one of its files"):
        rank_of(name)


def test_wide_elements_come_first() -> None:
    mixed = {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(2, dtype=torch.float64), "c": torch.ones(3)}
    widths = [WIDTHS[e.dtype] for file in packed(entries_of(mixed), 0, 300) for e in file.entries]
    assert widths == [8, 4, 1]
