"""What takes the place of a GPU where a step runs without numbers: kernels in Triton end at their launch."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch

from penteract.engine.kernels import rotary
from penteract.engine.state import moments

FP8_MULTIPLE = 16  # elements: what FP8 products are made of


def _launch(*about: Any, **named: Any) -> None:
    """Nothing is launched."""


def _scaled_mm(a: torch.Tensor, b: torch.Tensor, *scales: torch.Tensor, out: torch.Tensor, **named: Any) -> None:
    """torch's product of FP8, which has no numbers-free form that writes into a given tensor: its limits alone."""
    (m, k), n = a.shape, b.shape[1]
    if b.shape[0] != k or out.shape != (m, n):
        raise ValueError(f"a product of {tuple(a.shape)} and {tuple(b.shape)} into {tuple(out.shape)}")
    if k % FP8_MULTIPLE or n % FP8_MULTIPLE:
        raise ValueError(f"sizes {k} and {n} are not multiples of {FP8_MULTIPLE}")
    if a.stride(1) != 1 or b.stride(0) != 1:
        raise ValueError("the first operand is not in rows, or the second not in columns")


@contextmanager
def stand_ins(*, launches: bool = True) -> Generator[None]:
    """Inside, launches of Triton do nothing, if `launches`, and tables that kernels make once are made anew."""
    caches = (rotary._turns, moments.codebook)
    with ExitStack() as stack:
        if find_spec("triton") is not None:
            if launches:
                stack.enter_context(patch.object(import_module("triton.runtime.jit").JITFunction, "run", _launch))
            interpreter = import_module("triton.runtime.interpreter")
            stack.enter_context(patch.object(interpreter.InterpretedFunction, "run", _launch))
        stack.enter_context(patch.object(torch, "_scaled_mm", _scaled_mm))
        for cached in caches:
            cached.cache_clear()
        try:
            yield
        finally:
            for cached in caches:
                cached.cache_clear()
