"""Parts of torch that a rank is imported without: together they take a third of the time that torch does.

`import torch` imports them for others. Whoever asks one for anything has it then. What none asks for, but some need,
is `META_REGISTRATIONS`: torch's functions in Python for tensors on `meta`. It is left out of torch 2.11 alone: 2.13
makes its generators of random numbers with it.

The order in which torch imports its parts changes with what is left out, and some need others before them: of versions
that nobody has tried, only `OF_ALL` is left out.

For each operator that Python code defines, torch asks Python for the module of a frame. To tell, Python asks for the
real path of each module's file: 14,000 system calls in a rank. The frame itself knows its module.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any

META_REGISTRATIONS, UP_TO = "torch._meta_registrations", (2, 11)
OF_ALL, TRIED = ("torch.distributions", "torch.export"), ((2, 11), (2, 13))
OF_TRIED = (
    "torch.ao", "torch.masked", "torch.mps", "torch.mtia", "torch.nn.intrinsic", "torch.nn.qat", "torch.nn.quantizable",
    "torch.nn.quantized", "torch.optim", "torch.profiler", "torch.quantization", "torch.sparse", "torch.utils.data",
    "torchgen.model",
)  # fmt: skip
_ONE = Lock()


class _Late(ModuleType):
    """In place of a module that is not imported yet."""

    in_place = False  # while this is imported, which asks for its path too

    def __getattr__(self, name: str) -> Any:
        # The path is asked for by what imports a module within.
        if name.startswith("__") and not (name == "__path__" and self.in_place):
            raise AttributeError(name)
        return getattr(present(self.__name__), name)


class _LateLoader(Loader):
    """Imports what stands in place of a module, so that its package has it by its name."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Late(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        assert isinstance(module, _Late)
        module.in_place = True


class _Found(Loader):
    """Hands out a module that was imported already."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec


class _Finder(MetaPathFinder):
    """Finds what stands in place of modules, and modules within one of them: whoever imports such a module has imported
    all of the one by then, and most of the modules within with it, which must not be imported twice."""

    def __init__(self, names: Iterable[str]) -> None:
        self.all = frozenset(names)
        self.late = set(names)  # that nobody has asked for anything

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname in self.late:
            return ModuleSpec(fullname, _LateLoader())
        module = sys.modules.get(fullname) if fullname.rpartition(".")[0] in self.all else None
        return None if module is None else ModuleSpec(fullname, _Found(module))


def leave_out() -> None:
    """From now on `import torch` leaves them out. Where torch is imported already, or is not found, nothing changes."""
    found = None if "torch" in sys.modules else find_spec("torch")
    if found is not None and found.origin:
        inspect.getmodule = partial(_module, inspect.getmodule)
        sys.meta_path.insert(0, _Finder(parts_of(_version(Path(found.origin).parent))))


def _module(otherwise: Callable[..., Any], of: Any, _filename: str | None = None) -> Any:
    """`inspect.getmodule`: of a frame without a look at any file."""
    if inspect.isframe(of):
        module = sys.modules.get(of.f_globals.get("__name__", ""))
        if getattr(module, "__dict__", None) is of.f_globals:  # what a program puts there need not be a module
            return module
    return otherwise(of, _filename)


def parts_of(version: tuple[int, int]) -> tuple[str, ...]:
    """Those that are left out of a version of torch."""
    meta = (META_REGISTRATIONS,) if version <= UP_TO else ()
    return (*OF_ALL, *meta, *(OF_TRIED if version in TRIED else ()))


def left_out() -> list[str]:
    """Those that nobody has asked for anything, in their order."""
    return sorted(name for one in sys.meta_path if isinstance(one, _Finder) for name in one.late)


def present(name: str) -> ModuleType:
    """One of them, from now on in its place. Whoever holds what stood there has all that is in it."""
    with _ONE:  # the import itself has a lock of its own
        for one in sys.meta_path:
            if isinstance(one, _Finder):
                one.late.discard(name)
        if isinstance(late := sys.modules.get(name), _Late):
            del sys.modules[name]
    real = import_module(name)
    if isinstance(late, _Late):
        vars(late).update(vars(real))
    return real


def _version(folder: Path) -> tuple[int, int]:
    """Of the installed torch, which is not imported for it; a high one where that cannot be told."""
    try:
        text = (folder / "version.py").read_text()
    except OSError:
        text = ""
    numbers = re.search(r"^__version__ = ['\"](\d+)\.(\d+)", text, re.MULTILINE)
    return (int(numbers[1]), int(numbers[2])) if numbers else (99, 0)
