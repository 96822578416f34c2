"""Triton's interpreter, made to round as a GPU does."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

_NARROW = {"bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}


@pytest.fixture(autouse=True)
def rounds_to_the_nearest(small_heap: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU's conversions round to the nearest, ties to even; the interpreter's cut off: here they are torch's."""
    from triton.runtime import interpreter

    before: Any = interpreter._convert_float

    def convert(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if str(source) != "fp32" or str(target) not in _NARROW:
            return before(data, source, target, mode)
        with _disable_current_modes():  # what the interpreter allocates is not the kernel's
            narrow = torch.from_numpy(data.copy()).to(_NARROW[str(target)])
        unsigned = {1: torch.uint8, 2: torch.uint16}[narrow.element_size()]
        return narrow.view(unsigned).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert)
    yield


@pytest.fixture(autouse=True, scope="session")
def looks_for_builtins_once() -> Iterator[None]:
    """Each call of a kernel, and of each function in it, looks through all of Triton's language for what is to be
    interpreted: a third of its time. Here it looks once, and a function in a kernel leaves all as the kernel has put
    it."""
    from triton.runtime import interpreter

    looked: Any = interpreter
    found = dict[ModuleType | type, list[str]]()

    def patch(package: ModuleType | type, builder: Any, scope: Any) -> None:
        if package not in found:
            found[package] = [n for n, member in inspect.getmembers(package) if looked.tl.core.is_builtin(member)]
        names = found[package]
        if names and looked.tl.core.is_builtin(getattr(package, names[0])):  # else the kernel has done so
            for name in names:
                looked._patch_attr(package, name, getattr(package, name), builder, scope)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(looked, "_patch_builtin", patch)
        yield
