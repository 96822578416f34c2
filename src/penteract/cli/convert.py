"""`penteract convert`: weights to and from Hugging Face folders."""

from __future__ import annotations

import json as json_module
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from penteract.cli.resolve.weights import Source, find_weights, model_words, tokenizer_of, tokenizer_setting
from penteract.cli.torch_modules import torch_module
from penteract.config.files.keys import keys
from penteract.config.resolve.resolved_run import Resolved, resolve
from penteract.engine.hf.folder import open_folder
from penteract.errors import BadInput
from penteract.units import show_bytes, show_count

EXAMPLES = (
    "penteract convert runs/latest hf-model",
    "penteract convert runs/latest/checkpoints/step-00000040 hf-model --dtype fp32",
    "penteract convert path/to/hf-model start",
)


def convert(
    weights: Annotated[str, Parameter(help="A run folder, one of its checkpoints, latest, or a Hugging Face folder.")],
    to: Annotated[Path, Parameter(help="The folder to write; it must not exist.")],
    /,
    *,
    dtype: Annotated[
        Literal["bf16", "fp32", "fp64"] | None,
        Parameter(help="Dtype of the written tensors; by default bf16 for Hugging Face, fp32 for penteract."),
    ] = None,
    shard_gib: Annotated[
        float, Parameter(help="The largest size of a file in GiB; converting takes up to twice as much memory.")
    ] = 5.0,
    vocab_size: Annotated[
        int,
        Parameter(help="Rows of the embedding to write, without padding rows; 0: as many as the original weights had."),
    ] = 0,
    json: Annotated[bool, Parameter(negative="", help="Print one JSON object at the end.")] = False,
    debug: Annotated[bool, Parameter(negative="", help="Show the traceback of an error.")] = False,
) -> int:
    """Write weights as a folder that transformers and vLLM load, or read such a folder.

    A step becomes config.json, safetensors files and the run's tokenizer; a Hugging Face folder becomes a folder that
    `penteract train --init` reads. One tensor is in memory at a time.
    """
    source = find_weights(weights, keys()["output.folder"].default, flag="convert")
    _check(to, shard_gib, vocab_size)
    if source.theirs and vocab_size:
        fix = "give it when you convert back"
        raise BadInput("VALUE", "padding is only dropped when a Hugging Face folder is written", where="--vocab-size",
                       found=vocab_size, allowed="0", fix=fix)  # fmt: skip
    resolved = _run_of(source, to) if source.theirs else None
    converting, writing = (torch_module(f"engine.hf.{name}", "weights need") for name in ("convert", "writing"))
    how = writing.WriteOptions(
        dtype=dtype or ("fp32" if source.theirs else "bf16"),
        shard_bytes=int(shard_gib * 2**30),
        vocabulary=vocab_size,
        tokenizer=Path(tokenizer_of(source)) if source.theirs and tokenizer_of(source) else None,
        on_progress=_print_progress if sys.stderr.isatty() else _no_progress,
    )
    made = converting.from_hf(source.path, to, resolved, how) if resolved else converting.to_hf(source.path, to, how)
    _finish(made, to, json)
    if not json and not source.theirs and tokenizer_setting(source) == "bytes":
        print("no tokenizer written: the run used bytes")
    return 0


def _check(to: Path, shard_gib: float, vocab_size: int) -> None:
    if to.exists() or to.is_symlink():
        raise BadInput("FILE", "it exists already", where="convert", found=to, fix="choose another name, or remove it")
    if not 2**-20 <= shard_gib <= 2**20:
        raise BadInput("VALUE", "not a file size", where="--shard-gib", found=shard_gib, allowed="about 1 to 100")
    if vocab_size < 0:
        raise BadInput("VALUE", "not a number of rows", where="--vocab-size", found=vocab_size, allowed="0 or more")


def _run_of(source: Source, to: Path) -> Resolved:
    """A run of a Hugging Face folder's model with default settings, for `run.toml` in the new folder."""
    model = open_folder(source.path).model  # checks the folder before torch is loaded
    length = keys()["batch.sequence_length"].default
    words = model_words(source)
    if model.positions == "learned" and model.max_positions < length:
        words.append(f"batch.sequence_length={model.max_positions}")
    if tokenizer_of(source):
        words.append(f"tokenizer.source={to.resolve() / Path(tokenizer_of(source)).name}")
    return resolve(None, "", words)


def _print_progress(done: int, total: int) -> None:
    """Bytes done, in one line that is overwritten."""
    print(
        f"\r{show_bytes(done)} of {show_bytes(total)} ", end="\n" if done >= total else "", file=sys.stderr, flush=True
    )


def _no_progress(done: int, total: int) -> None:
    """Standard error is not a terminal: print nothing."""


def _finish(made: Any, to: Path, json: bool) -> None:
    if json:
        print(json_module.dumps({"folder": str(to), **asdict(made)}))
        return
    files = "file" if made.files == 1 else "files"
    print(
        f"{to}: {made.kind}, {show_count(made.parameters)} parameters in {made.tensors} tensors, "
        f"{show_bytes(made.bytes)} of {made.dtype} in {made.files} {files}"
    )
    if made.kind == "penteract":
        print(f"Next: penteract train --init {to}")
