"""Token ids on disk and in memory: one long stream in which every document ends with `end_of_document`.

A token file is two files. `NAME.bin` holds nothing but ids, little-endian uint16 or uint32, so that
`numpy.memmap(NAME.bin, dtype)` reads it too. `NAME.bin.json` describes it:

    {"dtype": "uint16", "tokens": 1000, "end_of_document": 256, "vocab_size": 257, "largest": 256}

Only `dtype` is required; other keys are checked if they are there. A file should end with `end_of_document`, because
files are concatenated unchanged.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import numpy.typing as npt

from penteract.config.files.regular import read_regular
from penteract.engine.data.corpus import TextPart
from penteract.engine.data.joined_arrays import JoinedArrays
from penteract.engine.data.tokenizer import Ids, TextTokenizer, id_type
from penteract.errors import BadInput, CorruptData, DiskFailure

_SCANNED = 256 * 2**20  # bytes
_BATCH_CHARACTERS = 2 * 2**20  # tokenised together: enough for the library to use every core
_DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


@dataclass(frozen=True)
class TokenStream:
    """A read-only stream of ids, in memory or memory-mapped, made of one array or several."""

    arrays: tuple[Ids, ...]
    vocab_size: int

    @cached_property
    def _joined(self) -> JoinedArrays:
        return JoinedArrays(self.arrays)

    def __len__(self) -> int:
        return len(self._joined)

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Token ids start … stop - 1: int64 [stop - start]. Raises CorruptData at an id outside the vocabulary."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens {start}..{stop} of {len(self)}")
        out, at = np.empty(stop - start, np.int64), 0
        for part in self._joined.parts(start, stop):
            out[at : at + len(part)] = part
            at += len(part)
        if out.size and out.max() >= self.vocab_size:
            raise _id_out_of_vocabulary(int(out.max()), self.vocab_size, f"tokens {start}..{stop - 1}")
        return out

    def split_at(self, at: int) -> tuple[TokenStream, TokenStream]:
        """The ids before `at`, and those from `at` on, without a copy."""
        head, tail = list[Ids](), list[Ids]()
        for array in self.arrays:
            inside = min(max(at, 0), len(array))
            head.append(array[:inside])
            tail.append(array[inside:])
            at -= len(array)
        before, after = (tuple(array for array in arrays if len(array)) for arrays in (head, tail))
        return TokenStream(before, self.vocab_size), TokenStream(after, self.vocab_size)


def tokenize(parts: Iterable[TextPart], tokenizer: TextTokenizer) -> Iterator[Ids]:
    """Ids of each part, in order, with `end_of_document` after the last part of a document."""
    for batch in batches(parts):
        yield from tokenize_batch(batch, tokenizer)


def tokenize_batch(batch: Sequence[TextPart], tokenizer: TextTokenizer) -> Iterator[Ids]:
    """The same of parts that are tokenised at once."""
    end = np.array([tokenizer.end_of_document], id_type(tokenizer.vocab_size))
    for part, ids in zip(batch, tokenizer.encode_many([p.text for p in batch]), strict=True):
        yield np.concatenate([ids, end]) if part.ends_document else ids


def batches(parts: Iterable[TextPart]) -> Iterator[list[TextPart]]:
    """Parts that are tokenised together. No part is asked for before the batch is needed that it is in."""
    batch, size = list[TextPart](), 0
    for part in parts:
        batch.append(part)
        size += len(part.text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def write_tokens(path: Path, ids: Iterable[Ids], tokenizer: TextTokenizer) -> None:
    """Write `path` (a `.bin`), then its `.bin.json`, each by atomic rename.

    Several processes may write the same file at once: each writes a temporary file, and the last rename wins.
    `.bin.json` is written last: if it exists, the `.bin` is complete. Raises DiskFailure.
    """
    dtype, count, largest = id_type(tokenizer.vocab_size), 0, 0

    def write_ids(file: BinaryIO) -> None:
        nonlocal count, largest
        for array in ids:
            file.write(array.astype(dtype, copy=False).tobytes())
            count, largest = count + len(array), max(largest, int(array.max(initial=0)))

    def write_description(file: BinaryIO) -> None:
        description = {"dtype": dtype.name, "tokens": count, "end_of_document": tokenizer.end_of_document,
                 "vocab_size": tokenizer.vocab_size, "largest": largest}  # fmt: skip
        file.write(json.dumps(description).encode() + b"\n")

    _write_atomically(path, write_ids)
    _write_atomically(_description_path(path), write_description)


def read_tokens(path: Path, tokenizer: TextTokenizer) -> Ids:
    """Memory-map a token file: ids [tokens].

    Raises BadInput when its `.bin.json` is missing or it was made by another tokenizer, CorruptData when the two
    files do not agree.
    """
    description, where = _read_description(path), str(path)
    dtype = _DTYPES.get(str(description.get("dtype")))
    if dtype is None:
        raise BadInput("TOKENS", "unknown dtype of ids", where=str(_description_path(path)),
                       found=description.get("dtype"), allowed=" ".join(_DTYPES),
                       fix='write "dtype": "uint16"')  # fmt: skip
    size = path.stat().st_size
    wanted = description.get("tokens", size // dtype.itemsize)
    if wanted != size / dtype.itemsize:
        raise CorruptData("TOKENS", "the file's size is not what its .bin.json says", where=where,
                          found=f"{size} bytes", allowed=f"{wanted} ids of {dtype.itemsize} bytes",
                          fix="write or download it again")  # fmt: skip
    end = description.get("end_of_document", tokenizer.end_of_document)
    if end != tokenizer.end_of_document:
        raise BadInput("TOKENS", "these ids were made by another tokenizer", where=where,
                       found=f"end_of_document {end}", allowed=tokenizer.end_of_document,
                       fix="use the tokenizer that made them")  # fmt: skip
    largest = description.get("largest", 0)
    if isinstance(largest, int) and largest >= tokenizer.vocab_size:
        raise _id_out_of_vocabulary(largest, tokenizer.vocab_size, where)
    return np.memmap(path, dtype, mode="r") if size else np.empty(0, dtype)


def check_ids(paths: Sequence[Path], tokenizer: TextTokenizer) -> None:
    """Raise CorruptData for an id outside the vocabulary, in files whose `.bin.json` does not give the largest.

    All ids are read in the first _SCANNED bytes of files: a fraction of a second.
    """
    left = _SCANNED
    for path in paths:
        ids = read_tokens(path, tokenizer)
        if left <= 0 or not len(ids) or "largest" in _read_description(path):
            continue
        largest = int(ids[: max(1, left // ids.dtype.itemsize)].max())
        left -= ids.nbytes
        if largest >= tokenizer.vocab_size:
            raise _id_out_of_vocabulary(largest, tokenizer.vocab_size, str(path))


def is_complete(path: Path) -> bool:
    """Whether a token file exists and is complete."""
    return path.is_file() and _description_path(path).is_file()


def _description_path(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _read_description(path: Path) -> dict[str, object]:
    file = _description_path(path)
    if not file.is_file():
        raise BadInput("TOKENS", "a .bin file needs a .bin.json that says how to read it", where=str(path),
                       fix=f"""echo '{{"dtype": "uint16"}}' > {shlex.quote(str(file))}""")  # fmt: skip
    try:
        description: object = json.loads(read_regular(file, largest=2**20))
    except (ValueError, RecursionError) as e:
        raise CorruptData("TOKENS", "not JSON", where=str(file), found=str(e)[:120], allowed='{"dtype": "uint16"}',
                          fix="write it again") from e  # fmt: skip
    if not isinstance(description, dict):
        raise CorruptData("TOKENS", "not a JSON object", where=str(file), allowed='{"dtype": "uint16"}',
                          fix="write it again")  # fmt: skip
    return cast("dict[str, object]", description)


def _write_atomically(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """`write` into a temporary file of this process, then rename it."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as e:
        raise DiskFailure("WRITE", "could not write tokens", where=str(path), found=e.strerror,
                          fix="free some space, or choose another cache folder") from e  # fmt: skip
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _id_out_of_vocabulary(found: int, vocab_size: int, where: str) -> CorruptData:
    return CorruptData("TOKEN_ID", "a token id is outside the vocabulary", where=where, found=found,
                       allowed=f"0..{vocab_size - 1}", fix="use the tokenizer that made these ids")  # fmt: skip
