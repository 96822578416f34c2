"""Parts of torch that a rank is imported without: together they take a quarter of the time that torch does.

`import torch` imports them for others. Whoever asks one for anything has it then. What none asks for, but some need,
is `META_REGISTRATIONS`: torch's functions in Python for tensors on `meta`. It is left out of torch 2.11 alone: 2.13
makes its generators of random numbers with it.
"""

from __future__ import annotations

import re
import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any

META_REGISTRATIONS, UP_TO = "torch._meta_registrations", (2, 11)
LATE = ("torch.export", "torch.distributions")
_ONE = Lock()


class _Late(ModuleType):
    """In place of a module that is not imported yet."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # the path is asked for by what imports a module of it
            raise AttributeError(name)
        return getattr(present(self.__name__), name)


class _Found(Loader):
    """Hands out a module that was imported already."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec


class _Within(MetaPathFinder):
    """Finds modules within one of them: whoever imports such a module has imported all of the one by then, and most of
    the modules within with it, which must not be imported twice."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        module = sys.modules.get(fullname) if fullname.rpartition(".")[0] in LATE else None
        return None if module is None else ModuleSpec(fullname, _Found(module))


def leave_out() -> None:
    """From now on `import torch` leaves them out. Where torch is imported already, or is not found, nothing changes."""
    found = None if "torch" in sys.modules else find_spec("torch")
    if found is not None and found.origin:
        names = LATE if _version(Path(found.origin).parent) > UP_TO else (*LATE, META_REGISTRATIONS)
        sys.modules.update({name: _Late(name) for name in names})
        sys.meta_path.insert(0, _Within())


def present(name: str) -> ModuleType:
    """One of them, from now on in its place."""
    with _ONE:  # the import itself has a lock of its own
        if isinstance(sys.modules.get(name), _Late):
            del sys.modules[name]
    return import_module(name)


def _version(folder: Path) -> tuple[int, int]:
    """Of the installed torch, which is not imported for it; a high one where that cannot be told."""
    try:
        text = (folder / "version.py").read_text()
    except OSError:
        text = ""
    numbers = re.search(r"^__version__ = ['\"](\d+)\.(\d+)", text, re.MULTILINE)
    return (int(numbers[1]), int(numbers[2])) if numbers else (99, 0)
