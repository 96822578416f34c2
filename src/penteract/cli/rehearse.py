"""`penteract rehearse`: what a rank of a run would allocate, call and send, without a GPU and without its peers."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from penteract.cli.torch_modules import torch_module
from penteract.config.hardware import HEADROOM, cluster
from penteract.config.resolve.resolved_run import resolve
from penteract.errors import BadInput, Bug, OutOfMemory
from penteract.planner.options import check_option
from penteract.planner.settle_budget import settle_budget
from penteract.units import show_bytes

EXAMPLES = (
    "penteract rehearse run.toml",
    "penteract rehearse 405b.toml --rank 2317 --gpus 512x8xH100",
    "penteract rehearse run.toml --corners",
    "penteract rehearse --parallel.tp 2 --parallel.pp 2 --json",
)


def rehearse(  # noqa: PLR0913 (the options of a verb are its parameters)
    run: Annotated[Path | None, Parameter(help="A run file; see `penteract init` and `penteract plan --out`.")] = None,
    /,
    *,
    rank: Annotated[int | None, Parameter(help="The global rank to rehearse; by default 0.")] = None,
    corners: Annotated[
        bool, Parameter(negative="", help="Rehearse a rank of every kind: first and last stage, the ends of each axis.")
    ] = False,
    gpus: Annotated[
        str | None,
        Parameter(help="The GPUs of the run, as in `plan`: 512x8xH100. Without it, no memory limit is checked."),
    ] = None,
    headroom: Annotated[float, Parameter(help="Fraction of a GPU's memory that is kept free of tensors.")] = HEADROOM,
    preset: Annotated[str | None, Parameter(help="Start from a preset or a published model, as `train` does.")] = None,
    json: Annotated[bool, Parameter(negative="", help="Print one JSON object: schema penteract.rehearsal/1.")] = False,
    debug: Annotated[bool, Parameter(negative="", help="Show the traceback of an error.")] = False,
    overrides: Annotated[Sequence[str], Parameter(parse=False)],
) -> int:
    """Run one rank's start, two steps and checkpoint with the engine's own code, without a GPU: tensors have no data.

    It needs torch, but no GPU, and takes a world of any size. Exit code 0: nothing is wrong; 70: a mismatch, each as
    one line; 71: a rank does not fit its GPU. Any value of a run file can be set: `--section.key VALUE`.
    """
    check_option("--headroom", headroom)
    if corners and rank is not None:
        raise BadInput("USAGE", "a rank of every kind, or one rank", where="--corners", found=f"--rank {rank} too",
                       fix="leave one of them out")  # fmt: skip
    on = cluster(gpus) if gpus is not None else None
    resolved, _ = settle_budget(resolve(run, preset, list(overrides), on.gpus if on is not None else None))
    rehearsing = torch_module("measure.rehearse.rehearsing", "a rehearsal needs")
    texts = torch_module("measure.rehearse.text", "a rehearsal needs")
    made: Any = rehearsing.rehearse_run(
        resolved.run, rank or 0, on, every_kind=corners, headroom=headroom, progress=None if json else _progress
    )
    if json:
        print(json_module.dumps(made.as_dict()))
    else:
        print("\n".join(texts.lines(made)))
    if made.mismatches:
        return Bug.exit_code
    if made.fits is False:
        what, fix = texts.too_large(made)
        error = OutOfMemory("FIT", what, found=show_bytes(made.fullest.peak), allowed=show_bytes(made.usable), fix=fix)
        print(error, file=sys.stderr)
        return OutOfMemory.exit_code
    return 0


def _progress(done: int, of: int) -> None:
    """A line on a terminal; nothing where stderr is a file."""
    if sys.stderr.isatty():
        print(
            f"\r\x1b[Krehearsing rank {done + 1} of {of}",
            end="" if done + 1 < of else "\r\x1b[K",
            file=sys.stderr,
            flush=True,
        )
