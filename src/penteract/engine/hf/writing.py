"""Write our weights as a Hugging Face folder (config.json and safetensors files), one tensor in memory at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from penteract.config.hf.write_config import config_of
from penteract.config.model import ModelSpec
from penteract.engine.checkpoint import durable as disk
from penteract.engine.checkpoint.slices import NAMES, raw
from penteract.engine.hf.folder import CONFIG, ELSEWHERE, TOKENIZER
from penteract.engine.hf.headers import INDEX, SINGLE
from penteract.engine.hf.weights import Weights
from penteract.errors import DiskFailure
from penteract.model.hf_names import HfPart, Theirs, by_theirs, hf_names
from penteract.units import gib

DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
_CONFIG_NAMES = {"bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteOptions:
    """`vocabulary`: rows of the written embedding, 0: all of ours. `on_progress(done, total)`: bytes, after each
    tensor."""

    dtype: str = "bf16"
    shard_bytes: int = 5 * 10**9
    vocabulary: int = 0
    tokenizer: Path | None = None  # a tokenizer.json to copy into the folder
    end_of_document: int | None = None
    on_progress: Callable[[int, int], None] = lambda done, total: None


@dataclass(frozen=True, slots=True)
class Written:
    """Counts of a written folder. `kind`: the model family, or `penteract`."""

    kind: str
    tensors: int
    parameters: int
    bytes: int
    files: int
    dtype: str


@dataclass(frozen=True, slots=True)
class _Shard:
    names: tuple[str, ...]
    bytes: int


def write_folder(source: Weights, m: ModelSpec, to: Path, options: WriteOptions) -> Written:
    """Write `m`'s weights to the new folder `to`: complete, or not at all.

    Raises BadInput when no Hugging Face family can describe the model, DiskFailure.
    """
    rows = options.vocabulary or m.vocab_size
    config = config_of(replace(m, vocab_size=rows))
    theirs = by_theirs(hf_names(m, str(config["model_type"]), rows), copies=True)
    sizes = {name: prod(t.shape) * _dtype(t, options).itemsize for name, t in theirs.items()}
    shards = _shards(theirs, sizes, options.shard_bytes)
    fresh = unfinished(to)
    with disk.failing(to, "write weights", fix=ELSEWHERE):
        disk.remove(fresh)
        fresh.mkdir(parents=True)
        _check_room(fresh, sum(sizes.values()))
        try:
            _write_shards(fresh, shards, theirs, source, options)
            _write_rest(fresh, config, options)
            disk.sync(fresh)
            disk.rename(fresh, to)
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
    numbers = sum(prod(t.shape) for t in theirs.values())
    return Written(
        str(config["model_type"]), len(theirs), numbers, sum(sizes.values()), len(shards), options.dtype
    )  # fmt: skip


def unfinished(to: Path) -> Path:
    """The temporary name of a folder until it is complete."""
    return to.with_name(f".{to.name}.unfinished")


def _dtype(t: Theirs, options: WriteOptions) -> torch.dtype:
    return torch.promote_types(DTYPES[options.dtype], torch.float32) if t.parts[0][0].exact else DTYPES[options.dtype]


def _shards(theirs: Mapping[str, Theirs], sizes: Mapping[str, int], most: int) -> list[_Shard]:
    """Tensors in order, a new file where one would grow beyond `most` bytes."""
    found: list[tuple[list[str], int]] = [([], 0)]
    for name in theirs:
        if found[-1][0] and found[-1][1] + sizes[name] > most:
            found.append(([], 0))
        names, size = found[-1]
        found[-1] = ([*names, name], size + sizes[name])
    # Wide elements first, so that each tensor begins at a multiple of its element's size.
    return [_Shard(tuple(sorted(names, key=lambda n: not theirs[n].parts[0][0].exact)), size) for names, size in found]


def _check_room(folder: Path, need: int) -> None:
    if need > (free := disk.room(folder).bytes):
        raise DiskFailure("DISK", "no room for the weights", where=str(folder), found=f"{gib(free):.3f} GiB free",
                          allowed=f"{gib(need):.3f} GiB", fix="free some space")  # fmt: skip


def _write_shards(
    fresh: Path, shards: list[_Shard], theirs: Mapping[str, Theirs], source: Weights, options: WriteOptions
) -> None:
    total, done = sum(s.bytes for s in shards), 0
    where: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        where |= dict.fromkeys(shard.names, file)

        def on_progress(done_in_file: int, before: int = done) -> None:
            options.on_progress(before + done_in_file, total)

        disk.write(fresh / file, _stream({n: theirs[n] for n in shard.names}, source, options, on_progress))
        done += shard.bytes
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        disk.write(fresh / INDEX, [json.dumps(index, indent=2).encode()])


def _stream(
    tensors: Mapping[str, Theirs], source: Weights, options: WriteOptions, on_progress: Callable[[int], None]
) -> Iterator[bytes | memoryview]:
    """The safetensors format, one tensor at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, t in tensors.items():
        dtype = _dtype(t, options)
        begin, end = end, end + prod(t.shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(t.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name, t in tensors.items():
        yield raw(_assembled(t, source, _dtype(t, options)))
        on_progress(header[name]["data_offsets"][1])


def _assembled(t: Theirs, source: Weights, dtype: torch.dtype) -> torch.Tensor:
    """One Hugging Face tensor, assembled from parts of ours."""
    out = torch.empty(t.shape, dtype=dtype)
    for ours, part in t.parts:
        _place(out, part, source.rectangle(ours.name, (part.start, part.size), dtype))
    return out


def _place(out: torch.Tensor, part: HfPart, box: torch.Tensor) -> None:
    """Write a box of our tensor to its place in the Hugging Face tensor."""
    box = box[0] if part.stacked else box
    rows = (out.T if part.transposed else out).narrow(0, part.first, box.shape[0])
    if part.rotary is None:
        rows.copy_(box)
    else:
        rows[part.rotary.order(box.shape[0])] = box


def _write_rest(fresh: Path, config: dict[str, Any], options: WriteOptions) -> None:
    """Write config.json, and the tokenizer's file."""
    rest = {"torch_dtype": _CONFIG_NAMES[options.dtype], "bos_token_id": None, "eos_token_id": options.end_of_document}
    text = json.dumps({**config, **rest}, indent=2)
    disk.write(fresh / CONFIG, [text.encode() + b"\n"])
    if options.tokenizer is not None:
        disk.write(fresh / TOKENIZER, [options.tokenizer.read_bytes()])
