"""Convert our checkpoints to Hugging Face folders, and such folders to checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from math import prod
from pathlib import Path
from shlex import quote
from typing import Any

from penteract.config.files.read import read_toml
from penteract.config.model import LatentSpec, ModelSpec, MoESpec, RopeScaling
from penteract.config.resolve.resolved_run import Resolved
from penteract.config.resolve.write_run_file import to_toml
from penteract.engine import checkpoint
from penteract.engine.checkpoint import Slice
from penteract.engine.checkpoint import durable as disk
from penteract.engine.checkpoint.boxes import Dims
from penteract.engine.checkpoint.stored import StoredTensors
from penteract.engine.data import open_tokenizer
from penteract.engine.hf.folder import (
    ELSEWHERE,
    TOKENIZER,
    WEIGHTS_ALONE,
    open_folder,
    remembered_vocabulary,
    weights_alone,
)
from penteract.engine.hf.reading import HfWeights
from penteract.engine.hf.weights import step_of
from penteract.engine.hf.writing import DTYPES, WriteOptions, Written, unfinished, write_folder
from penteract.engine.run_folder import rundir
from penteract.errors import BadInput
from penteract.model.hf_names import Ours
from penteract.units import printable

_HEAD = """\
# A run's file for weights that `penteract convert` wrote: their model; every other value is a default. Start a run:
#   penteract train --init {to}
"""


def to_hf(path: Path, to: Path, options: WriteOptions) -> Written:
    """A run's newest step, or the step at `path`, as a Hugging Face folder."""
    at = step_of(path)
    run = at.resolve().parent.parent
    with StoredTensors(at) as stored:
        model = _model_of(stored.manifest.extra, at)
        options = replace(options, vocabulary=_vocabulary(options.vocabulary or remembered_vocabulary(run), model))
        return write_folder(stored, model, to, _with_tokenizer(options, run))


def from_hf(path: Path, to: Path, resolved: Resolved, options: WriteOptions) -> Written:
    """Write a Hugging Face folder as a run folder with one step, which `--init` reads. `resolved`: a run of its
    model."""
    folder = open_folder(path, resolved.run.model)
    source = HfWeights(folder)
    fresh = unfinished(to)
    files = list(_files(folder.ours, options))
    total = sum(prod(size) for boxes in files for _, _, size in boxes) * DTYPES[options.dtype].itemsize

    def slices() -> Iterator[Iterator[Slice]]:
        done = 0
        for boxes in files:
            yield (
                Slice(t.name, t.shape, start, source.rectangle(t.name, (start, size), DTYPES[options.dtype]))
                for t, start, size in boxes
            )
            done += sum(prod(size) for _, _, size in boxes) * DTYPES[options.dtype].itemsize
            options.on_progress(done, total)

    with disk.failing(to, "write a checkpoint", fix=ELSEWHERE):
        disk.remove(fresh)
        fresh.mkdir(parents=True)
        try:
            checkpoint.save_alone(fresh / "checkpoints", 0, slices(), _extra(resolved))
            if options.tokenizer is not None:
                disk.write(fresh / TOKENIZER, [options.tokenizer.read_bytes()])
            disk.write(fresh / rundir.RUN, [to_toml(resolved, _HEAD.format(to=printable(quote(str(to))))).encode()])
            rundir.write_status(fresh, WEIGHTS_ALONE)
            disk.rename(fresh, to)
        except BaseException:
            disk.remove(fresh)
            raise
    numbers = sum(prod(t.shape) for t in folder.ours.values())
    return Written("penteract", len(folder.ours), numbers, total, len(files), options.dtype)


def _files(ours: Mapping[str, Ours], options: WriteOptions) -> Iterator[list[tuple[Ours, Dims, Dims]]]:
    """The boxes (tensor, start, size) of each file: at most `shard_bytes` together."""
    width, boxes, filled = DTYPES[options.dtype].itemsize, list[tuple[Ours, Dims, Dims]](), 0
    for tensor in ours.values():
        row = prod(tensor.shape[1:]) * width
        step = max(1, options.shard_bytes // max(1, row))
        for at in range(0, tensor.shape[0], step):
            size = (min(step, tensor.shape[0] - at), *tensor.shape[1:])
            if boxes and filled + prod(size) * width > options.shard_bytes:
                yield boxes
                boxes, filled = [], 0
            boxes.append((tensor, (at, *(0 for _ in tensor.shape[1:])), size))
            filled += prod(size) * width
    yield boxes


def _extra(resolved: Resolved) -> dict[str, Any]:
    run = resolved.run
    return json.loads(json.dumps({
        "step": 0, "samples": 0, "layout": asdict(run.layout), "seed": run.train.seed,
        "sequence_length": run.sequence_length, "model": asdict(run.model),
    }))  # fmt: skip


def _model_of(extra: Mapping[str, Any], at: Path) -> ModelSpec:
    """The model described in a step's manifest."""
    try:
        fields = dict(extra["model"])
        for name, kind in {"moe": MoESpec, "latent": LatentSpec, "rope_scaling": RopeScaling}.items():
            if fields.get(name) is not None:
                row = {k: tuple(v) if isinstance(v, list) else v for k, v in fields[name].items()}
                fields[name] = kind(**row)
        return ModelSpec(**fields)
    except (KeyError, TypeError, ValueError) as e:
        raise BadInput("CHECKPOINT", "does not say which model it is of", where=str(at), found=str(e)[:100],
                       allowed="a training run's step", fix="name a run's folder, or a step's") from e  # fmt: skip


def _vocabulary(requested: int, model: ModelSpec) -> int:
    if requested > model.vocab_size:
        raise BadInput("VALUE", "more ids than the model has rows", where="--vocab-size", found=requested,
                       allowed=f"<= {model.vocab_size}")  # fmt: skip
    return requested or model.vocab_size


def _with_tokenizer(options: WriteOptions, run: Path) -> WriteOptions:
    """`options` with the run's tokenizer; unchanged where `run` is not a run's folder."""
    if not (run / rundir.RUN).is_file():
        return options
    setting = read_toml(run / rundir.RUN).get("tokenizer.source")
    source = str(setting.value) if setting is not None else "bytes"
    if not Path(source).is_file() and (source != "bytes" or weights_alone(run)):
        return options  # it is not known which tokenizer the ids belong to
    end = int(open_tokenizer(source).end_of_document)
    if options.vocabulary <= end:
        raise BadInput("VALUE", "fewer rows than the tokenizer has ids", where="--vocab-size", found=options.vocabulary,
                       allowed=f">= {end + 1}", fix=f"--vocab-size {end + 1}")  # fmt: skip
    return replace(options, tokenizer=Path(source) if source != "bytes" else None, end_of_document=end)
