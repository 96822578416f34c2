"""The bounds of the numeric options of `penteract plan`, and errors in the words of the command line.

Plans and run files share their checks, whose errors name keys of a run file (`memory.zero`). `errors_for` rewords them
with the option that the user typed (`--layout zero`).
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from penteract.config.files.keys import keys
from penteract.config.files.schema import Number
from penteract.config.hardware import HEADROOM
from penteract.errors import BadInput
from penteract.planner.ask import LAYOUT_SETTINGS

# A key of a run file: in an error's `fix` ("--memory.zero 3"), and in its `where` ("memory.zero").
_FLAG = re.compile(r"--(?:parallel|batch|memory|kernels)\.(\w+) ([^\s,]+)")
_KEY = re.compile(r"(?:parallel|batch|memory|kernels)\.(\w+)")


class Option(NamedTuple):
    """An option with a number: its bounds, what the error for a value outside of them says, and the `fix` that it
    proposes."""

    number: Number
    what: str
    fix: str


OPTIONS: Mapping[str, Option] = {
    "--top": Option(Number(int, 1, 1000), "layouts count from 1", "--top 10"),
    "--why": Option(Number(int, 1, 1000), "layouts count from 1", "--why 1"),
    "--headroom": Option(Number(float, 0, 0.99), "not a share", f"--headroom {HEADROOM}"),
    "--imbalance": Option(Number(float, 1, 1000), "the fullest GPU gets no less than the mean", "--imbalance 1.2"),
    "--tokens": Option(Number(int, 1, 2**63), "not a number of tokens", "--tokens 15T"),
    "--usd-per-gpu-hour": Option(Number(float, 0, 1e6), "not a price", "--usd-per-gpu-hour 2.5"),
    "--trace-pp-rank": Option(Number(int, 0, 2**20), "pipeline ranks count from 0", "--trace-pp-rank 0"),
}
# Options that are keys of a run file too have the bounds of the key: (key, what the error says, its fix).
_RUN_FILE_OPTIONS: Mapping[str, tuple[str, str, str]] = {
    "--seq": ("batch.sequence_length", "no length of a sequence", "--seq 8192"),
    "--batch": ("batch.global_batch_size", "no number of sequences of a step", "--batch 1Mi"),
}


def check_option(flag: str, value: object) -> None:
    """Raise BadInput if the value of an option, such as `--top`, is no number of its kind or outside of its bounds."""
    if flag in _RUN_FILE_OPTIONS:
        key, what, fix = _RUN_FILE_OPTIONS[flag]
        number = Number(int, keys()[key].least, keys()[key].most)
    else:
        number, what, fix = OPTIONS[flag]
    try:
        number.check(value, flag)
    except BadInput as error:
        error.what, error.fix = what, fix
        raise


def check_options(**given: float | None) -> None:
    """Check options by their Python names, such as `usd_per_gpu_hour`. None: the option was not given. Raises
    BadInput."""
    for name, value in given.items():
        if value is not None:
            check_option(f"--{name.replace('_', '-')}", value)


@contextmanager
def errors_for(flag: str) -> Generator[None]:
    """Reword each BadInput raised inside for the option `flag`, and raise it again: `--memory.recompute swiglu` becomes
    `FLAG recompute=swiglu`, and `--precision.dtype` becomes `--precision`."""
    try:
        yield
    except BadInput as bad:
        key = _KEY.fullmatch(bad.where)
        if key and key[1] in LAYOUT_SETTINGS:
            bad.where = f"{flag} {key[1]}"
        bad.fix = _FLAG.sub(lambda m: f"{flag} {m[1]}={m[2]}" if m[1] in LAYOUT_SETTINGS else m[0], bad.fix)
        bad.fix = bad.fix.replace("--precision.dtype", "--precision")
        raise
