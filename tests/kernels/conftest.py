"""Triton's interpreter, made to round as a GPU does."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
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
def looks_once() -> Iterator[None]:
    """Each call of a kernel, and of each function in it, looks through all of Triton's language for what is to be
    interpreted: a third of its time. Here it looks once, and a function in a kernel leaves all as the kernel has put
    it. Each look at a dtype makes a table of all of them anew, a tenth: numpy's is kept by the name, as is the type of
    blocks of as many. And a quarter went into looking whether sums of integers overflow, of which it says nothing
    unless it debugs."""
    from triton.runtime import interpreter

    looked: Any = interpreter
    builtins = dict[ModuleType | type, list[str]]()
    numpy_dtypes = dict[str, Any]()
    sees_core = dict[Any, bool]()
    put, numpy_dtype, blocks_of = looked._patch_lang, looked._get_np_dtype, looked.tl.block_type.with_element_ty

    def patch_lang(function: Any) -> Any:
        if function not in sees_core:
            sees_core[function] = any(value is looked.tl.core for value in function.__globals__.values())
        if looked.tl.core.is_builtin(looked.tl.load) or sees_core[function]:
            return put(function)
        return looked._LangPatchScope()  # within a kernel that has put all

    def patch(package: ModuleType | type, builder: Any, scope: Any) -> None:
        if package not in builtins:
            builtins[package] = [n for n, member in inspect.getmembers(package) if looked.tl.core.is_builtin(member)]
        names = builtins[package]
        if names and looked.tl.core.is_builtin(getattr(package, names[0])):  # else the kernel has done so
            for name in names:
                looked._patch_attr(package, name, getattr(package, name), builder, scope)

    def get_np_dtype(dtype: Any) -> Any:
        element = dtype.element_ty if type(dtype) is looked.tl.block_type else dtype
        if type(element) is not looked.tl.dtype:  # a pointer
            return numpy_dtype(dtype)
        if element.name not in numpy_dtypes:
            numpy_dtypes[element.name] = numpy_dtype(element)
        return numpy_dtypes[element.name]

    def with_element_ty(block: Any, element: Any) -> Any:
        if type(element) is not looked.tl.dtype:
            return blocks_of(block, element)
        known: dict[str, Any] = vars(block).setdefault("of_as_many", {})
        if element.name not in known:
            known[element.name] = blocks_of(block, element)
        return known[element.name]

    options = looked.interpreter_builder.options
    assert not options.debug
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(looked.interpreter_builder, "options", replace(options, sanitize_overflow=False))
        patched.setattr(looked.tl.block_type, "with_element_ty", with_element_ty)
        patched.setattr(looked, "_patch_lang", patch_lang)
        patched.setattr(looked, "_patch_builtin", patch)
        patched.setattr(looked, "_get_np_dtype", get_np_dtype)
        yield
