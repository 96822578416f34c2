"""The first format of manifests, which is read for ever: each rectangle was an object of JSON in `manifest.json`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penteract.engine.checkpoint.boxes import WIDTHS, Dims, count_of, dims_of
from penteract.engine.checkpoint.stored_boxes import StoredBoxes, key_of


def entries(table: Mapping[str, Any], files: Sequence[str]) -> Iterator[tuple[str, str, StoredBoxes]]:
    """The tensors of a manifest, by its value of "tensors": name, dtype, rectangles. Raises ValueError, TypeError,
    KeyError or AttributeError where it is not valid."""
    numbers = {name: number for number, name in enumerate(files)}
    for name, row in table.items():
        if row["dtype"] not in WIDTHS:
            raise ValueError(f"{name}: unknown dtype")
        shape = dims_of(row["shape"])
        rows = [_numbers(name, shape, numbers, part) for part in row["parts"]]
        digests = b"".join(bytes.fromhex(part["digest"]) for part in row["parts"])
        found = StoredBoxes.of_rows(name, shape, files, rows, digests)
        found.refuse_wrong()
        yield name, row["dtype"], found


def _numbers(name: str, shape: Dims, numbers: Mapping[str, int], part: Mapping[str, Any]) -> list[int]:
    """The file, offset and size of a rectangle. Its key follows from these."""
    offset, size = ([count_of(n) for n in part[which]] for which in ("offset", "size"))
    if not len(offset) == len(size) == len(shape):
        raise ValueError(f"{name}: a rectangle of other dims")
    if part["key"] != key_of(name, shape, (tuple(offset), tuple(size))):
        raise ValueError(f"{name}: another key")
    return [numbers[part["file"]], *offset, *size]
