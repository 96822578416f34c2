"""Errors of shared checks, reworded for the options of `penteract plan`."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager

from penteract.errors import BadInput
from penteract.planner.ask import AXES

_FLAG = re.compile(r"--(?:parallel|batch|memory|kernels)\.(\w+) ([^\s,]+)")
_KEY = re.compile(r"(?:parallel|batch|memory|kernels)\.(\w+)")


@contextmanager
def errors_for(flag: str) -> Generator[None]:
    """Reword errors raised inside: `--memory.recompute swiglu` becomes `FLAG recompute=swiglu`, and `--precision.dtype`
    becomes `--precision`."""
    try:
        yield
    except BadInput as bad:
        key = _KEY.fullmatch(bad.where)
        if key and key[1] in AXES:
            bad.where = f"{flag} {key[1]}"
        bad.fix = _FLAG.sub(lambda m: f"{flag} {m[1]}={m[2]}" if m[1] in AXES else m[0], bad.fix)
        bad.fix = bad.fix.replace("--precision.dtype", "--precision")
        raise
