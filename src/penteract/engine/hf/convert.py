"""Weights from one form to the other: our checkpoints as a Hugging Face folder, and such a folder as a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from math import prod
from pathlib import Path
from typing import Any

from penteract.config.files.read import read_toml
from penteract.config.files.write import to_toml
from penteract.config.model import LatentSpec, ModelSpec, MoESpec, RopeScaling
from penteract.config.rules.resolve import Resolved
from penteract.engine import checkpoint
from penteract.engine.checkpoint import Slice
from penteract.engine.checkpoint import durable as disk
from penteract.engine.checkpoint.slices import Dims
from penteract.engine.checkpoint.stored import Pieces
from penteract.engine.data import open_tokenizer
from penteract.engine.hf.folder import TOKENIZER, WEIGHTS_ALONE, open_folder, remembered_vocabulary, weights_alone
from penteract.engine.hf.reading import HfWeights
from penteract.engine.hf.writing import DTYPES, How, Written, unfinished, write_folder
from penteract.engine.session import rundir
from penteract.engine.session.weights import step_of
from penteract.errors import BadInput
from penteract.model.hf_names import Ours


def to_hf(path: Path, to: Path, how: How) -> Written:
    """A run's newest step, or the step at `path`, as a Hugging Face folder."""
    at = step_of(path)
    run = at.resolve().parent.parent
    with Pieces(at) as stored:
        model = _model_of(stored.manifest.extra, at)
        how = replace(how, vocabulary=_vocabulary(how.vocabulary or remembered_vocabulary(run), model))
        return write_folder(stored, model, to, _with_tokenizer(how, run))


def from_hf(path: Path, to: Path, resolved: Resolved, how: How) -> Written:
    """A Hugging Face folder as a run's, with one step that `--init` reads. `resolved`: a run of that model."""
    folder = open_folder(path, resolved.run.model)
    source = HfWeights(folder)
    fresh = unfinished(to)
    shares = list(_shares(folder.ours, how))
    total = sum(prod(size) for share in shares for _, _, size in share) * DTYPES[how.dtype].itemsize

    def slices() -> Iterator[Iterator[Slice]]:
        done = 0
        for share in shares:
            yield (
                Slice(t.name, t.shape, start, source.rectangle(t.name, (start, size), DTYPES[how.dtype]))
                for t, start, size in share
            )
            done += sum(prod(size) for _, _, size in share) * DTYPES[how.dtype].itemsize
            how.told(done, total)

    with disk.failing(to, "write a checkpoint"):
        disk.remove(fresh)
        fresh.mkdir(parents=True)
        try:
            checkpoint.save_alone(fresh / "checkpoints", 0, slices(), _extra(resolved))
            if how.tokenizer is not None:
                disk.write(fresh / TOKENIZER, [how.tokenizer.read_bytes()])
            disk.write(fresh / rundir.RUN, [to_toml(resolved).encode()])
            rundir.write_status(fresh, WEIGHTS_ALONE)
            disk.rename(fresh, to)
        except BaseException:
            disk.remove(fresh)
            raise
    numbers = sum(prod(t.shape) for t in folder.ours.values())
    return Written("penteract", len(folder.ours), numbers, total, len(shares), how.dtype)


def _shares(ours: Mapping[str, Ours], how: How) -> Iterator[list[tuple[Ours, Dims, Dims]]]:
    """Boxes of at most `shard_bytes` together, each as (tensor, start, size)."""
    width, share, filled = DTYPES[how.dtype].itemsize, list[tuple[Ours, Dims, Dims]](), 0
    for tensor in ours.values():
        row = prod(tensor.shape[1:]) * width
        step = max(1, how.shard_bytes // max(1, row))
        for at in range(0, tensor.shape[0], step):
            size = (min(step, tensor.shape[0] - at), *tensor.shape[1:])
            if share and filled + prod(size) * width > how.shard_bytes:
                yield share
                share, filled = [], 0
            share.append((tensor, (at, *(0 for _ in tensor.shape[1:])), size))
            filled += prod(size) * width
    yield share


def _extra(resolved: Resolved) -> dict[str, Any]:
    run = resolved.run
    return json.loads(json.dumps({
        "step": 0, "samples": 0, "layout": asdict(run.layout), "seed": run.train.seed,
        "sequence_length": run.sequence_length, "model": asdict(run.model),
    }))  # fmt: skip


def _model_of(extra: Mapping[str, Any], at: Path) -> ModelSpec:
    """The model that a step's manifest names."""
    try:
        said = dict(extra["model"])
        for name, kind in {"moe": MoESpec, "latent": LatentSpec, "rope_scaling": RopeScaling}.items():
            if said.get(name) is not None:
                row = {k: tuple(v) if isinstance(v, list) else v for k, v in said[name].items()}
                said[name] = kind(**row)
        return ModelSpec(**said)
    except (KeyError, TypeError, ValueError) as e:
        raise BadInput("CHECKPOINT", "does not say which model it is of", where=str(at), found=str(e)[:100],
                       allowed="a training run's step", fix="name a run's folder, or a step's") from e  # fmt: skip


def _vocabulary(asked: int, model: ModelSpec) -> int:
    if asked > model.vocab_size:
        raise BadInput("VALUE", "more ids than the model has rows", where="--vocab-size", found=asked,
                       allowed=f"<= {model.vocab_size}")  # fmt: skip
    return asked or model.vocab_size


def _with_tokenizer(how: How, run: Path) -> How:
    """The run's tokenizer, where the step lies in a run."""
    if not (run / rundir.RUN).is_file():
        return how
    said = read_toml(run / rundir.RUN).get("tokenizer.source")
    source = str(said.value) if said is not None else "bytes"
    if not Path(source).is_file() and (source != "bytes" or weights_alone(run)):
        return how  # nobody said what its ids mean
    end = int(open_tokenizer(source).end_of_document)
    if how.vocabulary <= end:
        raise BadInput("VALUE", "fewer rows than the tokenizer has ids", where="--vocab-size", found=how.vocabulary,
                       allowed=f">= {end + 1}", fix=f"--vocab-size {end + 1}")  # fmt: skip
    return replace(how, tokenizer=Path(source) if source != "bytes" else None, end_of_document=end)
