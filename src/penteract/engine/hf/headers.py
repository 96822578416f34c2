"""Which tensors a folder of safetensors files holds, from their headers alone: no tensor is read, torch is not needed.

The format: eight bytes with the header's size, the header as JSON, then the tensors' bytes. The input is not trusted:
every field is checked before it is used. Pickled files are never opened.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from penteract.config.files.regular import read_regular
from penteract.errors import BadInput, CorruptData

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
WIDTHS: Mapping[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1,
    "BOOL": 1,
}  # fmt: skip
_LARGEST = 100 * 2**20  # bytes of a header or an index; the format's own limit
_FILE = re.compile(r"[\w][\w.-]*\.safetensors")


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor as its file's header describes it. `dtype` is the name in the safetensors format."""

    file: Path
    key: str  # its name in the file
    dtype: str
    shape: tuple[int, ...]


def held_tensors(folder: Path) -> dict[str, TensorHeader]:
    """Every tensor of the folder's model, by name. Raises BadInput when there is none, CorruptData for damage."""
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    if not (folder / INDEX).is_file():
        raise _without(folder)
    headers: dict[str, dict[str, TensorHeader]] = {}
    found: dict[str, TensorHeader] = {}
    for name, file in _weight_map(folder / INDEX).items():
        if file not in headers:
            headers[file] = read_header(folder / file)
        if name not in headers[file]:
            raise _damaged(folder / file, f"no {name[:80]}, which {INDEX} says is here")
        found[name] = headers[file][name]
    return found


def read_header(path: Path) -> dict[str, TensorHeader]:
    """The tensors of one file, each with bytes of its size inside the file."""
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is no regular file")
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(_LARGEST, size - 8):
                raise ValueError("its header does not fit into it")
            content = json.loads(file.read(length))
        rows = {name: row for name, row in content.items() if name != "__metadata__"}
        found = {name: _held(path, name, row, size - 8 - length) for name, row in rows.items()}
        spans = sorted((int(row["data_offsets"][0]), int(row["data_offsets"][1])) for row in rows.values())
        ends = [0, *(end for _, end in spans)]
        if ends[-1] != size - 8 - length:
            raise ValueError(f"{size - 8 - length} bytes of tensors where its header says {ends[-1]}")
        if any(begin != end for (begin, _), end in zip(spans, ends, strict=False)):
            raise ValueError("its tensors overlap, or leave gaps")
        about = content.get("__metadata__", {})
        if not isinstance(about, dict) or any(type(x) is not str for x in (*about, *about.values())):  # pyright: ignore[reportUnknownVariableType]
            raise ValueError("its metadata is not text by name")
    except OSError as e:
        raise CorruptData("WEIGHTS", "a file of weights cannot be read", where=str(path), found=e.strerror or str(e),
                          fix="download the folder again") from e  # fmt: skip
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as e:
        raise _damaged(path, str(e) if type(e) is ValueError else f"no safetensors header: {type(e).__name__}") from e
    return found


def _held(path: Path, name: str, row: Any, most: int) -> TensorHeader:
    dtype, shape, (begin, end) = row["dtype"], tuple(row["shape"]), row["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)) or end > most:
        raise ValueError("a tensor lies outside the file: it is cut short, or its header is wrong")
    if dtype not in WIDTHS:
        raise ValueError(f"a tensor of type {str(dtype)[:20]}")
    if end - begin != math.prod(shape) * WIDTHS[dtype]:
        raise ValueError("a tensor's bytes are not those of its shape")
    return TensorHeader(path, name, dtype, shape)


def _weight_map(path: Path) -> dict[str, str]:
    """Tensor name -> file name. Raises CorruptData for a path that leads out of the folder."""
    try:
        table = json.loads(read_regular(path, largest=_LARGEST))["weight_map"]
        if not isinstance(table, dict) or not table:
            raise ValueError("no weight_map")
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as e:
        raise _damaged(path, f"{type(e).__name__}: {e}") from e
    for file in cast("dict[str, Any]", table).values():
        if not isinstance(file, str) or not _FILE.fullmatch(file):
            raise _damaged(path, f"{json.dumps(file)[:80]} is not the name of a file in the same folder")
    return cast("dict[str, str]", table)


def _without(folder: Path) -> BadInput:
    """The error for a folder without safetensors files: what was found instead, and the fix."""
    pickled = sorted(p.name for p in folder.glob("*.bin")) if folder.is_dir() else []
    if pickled:
        return BadInput(
            "WEIGHTS", "pickled weights are never opened: they can run any program", where=str(folder),
            found=pickled[0], allowed=f"{SINGLE}, or {INDEX} and its files",
            fix="convert them first: transformers' save_pretrained writes safetensors",
        )  # fmt: skip
    return BadInput("WEIGHTS", "no weights here", where=str(folder), allowed=f"{SINGLE}, or {INDEX} and its files",
                    fix="name a folder with config.json and safetensors files")  # fmt: skip


def _damaged(path: Path, found: str) -> CorruptData:
    return CorruptData("WEIGHTS", "a file of weights is damaged", where=str(path), found=found[:200],
                       fix="download it again")  # fmt: skip
