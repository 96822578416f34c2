"""Import a package of kernels without torch's compiler.

Such packages mark functions for `torch.compile` as they are imported, and that alone imports all of the compiler: three
to five seconds of a start. No run here compiles with it.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

_COMPILER = "torch._dynamo"
_LIMIT = "recompile_limit"
_ONE = threading.RLock()


@contextmanager
def lazy_compiler() -> Iterator[None]:
    """Within: `torch.compile` returns a function that is compiled at its first call, and `torch.compiler.disable`
    returns its function as it is: a function that is compiled later does not leave it out. Where the compiler is
    imported already, nothing changes. One thread at a time."""
    with _ONE:
        if _COMPILER in sys.modules:
            yield
            return
        with patch.object(torch, "compile", _later(torch.compile)), patch.object(torch.compiler, "disable", _disable):
            yield


def _later(now: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile`, but at the first call; `now` is torch's own."""

    def later(model: Callable[..., Any] | None = None, *, recompile_limit: int | None = None, **options: Any) -> Any:
        if recompile_limit is not None:  # named for its sake: packages look for it, and import the compiler without it
            options[_LIMIT] = recompile_limit
        if model is None:
            return functools.partial(later, **options)
        if not inspect.isfunction(model):  # a module, which becomes another
            return _compiled(now, model, options)
        compiled = functools.cache(lambda: _compiled(now, model, options))

        @functools.wraps(model)
        def call(*args: Any, **more: Any) -> Any:
            return compiled()(*args, **more)

        return call

    return later


def _compiled(now: Callable[..., Any], model: Callable[..., Any], options: dict[str, Any]) -> Any:
    """Torch 2.11 has one limit for all functions."""
    if _LIMIT in options and _LIMIT not in inspect.signature(now).parameters:
        options = dict(options)
        limit, config = options.pop(_LIMIT), torch._dynamo.config
        setattr(config, _LIMIT, max(getattr(config, _LIMIT), limit))
    return now(model, **options)


def _disable(fn: Callable[..., Any] | None = None, recursive: bool = True, *, reason: str | None = None) -> Any:
    """`torch.compiler.disable` of a function, or what decorates one."""
    return fn if fn is not None else lambda fn: fn
