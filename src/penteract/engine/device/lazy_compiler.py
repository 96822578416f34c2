"""Import a package of kernels without torch's compiler, and torch's own functions too.

Such packages mark functions for `torch.compile` as they are imported, and that alone imports all of the compiler: three
to five seconds of a start. Functions of torch for tensors without numbers import it to be left out of what it compiles.
No run here compiles with it. Nor is garbage collected meanwhile: a collection walks all that was imported.
"""

from __future__ import annotations

import functools
import gc
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from penteract.engine.device import late_torch

_COMPILER = "torch._dynamo"
_LIMIT = "recompile_limit"
_ONE = threading.RLock()


@contextmanager
def lazy_compiler() -> Iterator[None]:
    """Within: `torch.compile` returns a function that is compiled at its first call, and `torch.compiler.disable`
    returns its function as it is: a function that is compiled later does not leave it out. Where the compiler is
    imported already, both stay as they are. Nothing is collected. One thread at a time."""
    with _ONE, _uncollected():
        if _COMPILER in sys.modules and not isinstance(sys.modules[_COMPILER], _Absent):
            yield
            return
        with patch.object(torch, "compile", _later(torch.compile)), patch.object(torch.compiler, "disable", _disable):
            yield


@contextmanager
def _uncollected() -> Iterator[None]:
    """No automatic collections within; afterwards all is as before."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


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
    late_torch.present(late_torch.META_REGISTRATIONS)
    if isinstance(absent := sys.modules.get(_COMPILER), _Absent):
        absent.present()
    if _LIMIT in options and _LIMIT not in inspect.signature(now).parameters:
        options = dict(options)
        limit, config = options.pop(_LIMIT), torch._dynamo.config
        setattr(config, _LIMIT, max(getattr(config, _LIMIT), limit))
    return now(model, **options)


def _disable(fn: Callable[..., Any] | None = None, recursive: bool = True, *, reason: str | None = None) -> Any:
    """`torch.compiler.disable` of a function, or what decorates one."""
    return fn if fn is not None else lambda fn: fn


def leave_out_compiler() -> None:
    """From now on torch's functions that ask its compiler to leave them out do not import it, and modules of it that
    they read are imported alone. Who asks for more of it has it."""
    if _COMPILER not in sys.modules:
        sys.modules[_COMPILER] = _Absent(_COMPILER)


class _Absent(ModuleType):
    """In place of the compiler."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = [str(Path(torch.__file__).parent / name.partition(".")[2])]  # of its modules

    def disable(self, fn: Callable[..., Any], *about: Any, **named: Any) -> Callable[..., Any]:
        """Nothing compiles it."""
        return fn

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.present(), name)

    def present(self) -> ModuleType:
        """The compiler, from now on in its place."""
        if sys.modules.get(_COMPILER) is self:
            for found in [key for key in sys.modules if key == _COMPILER or key.startswith(f"{_COMPILER}.")]:
                del sys.modules[found]
        return import_module(_COMPILER)
