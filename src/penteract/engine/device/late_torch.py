"""Parts of torch that a rank is imported without: together they take a quarter of the time that torch does.

`import torch` imports them for others. Whoever asks one for anything has it then. What none asks for, but some need,
is `FOR_NO_NUMBERS`: how torch's functions treat tensors without numbers. It is left out of torch 2.11 alone: 2.13 makes
its generators of random numbers with it.
"""

from __future__ import annotations

import re
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

FOR_NO_NUMBERS, UP_TO = "torch._meta_registrations", (2, 11)
LATE = ("torch.export", "torch.distributions")


class _Late(ModuleType):
    """In place of a module that is not imported yet."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # the path is asked for by what imports one of its modules
            raise AttributeError(name)
        return getattr(present(self.__name__), name)


def leave_out() -> None:
    """From now on `import torch` leaves them out. Where torch is imported already, nothing changes."""
    if "torch" not in sys.modules:
        names = LATE if _version() > UP_TO else (*LATE, FOR_NO_NUMBERS)
        sys.modules.update({name: _Late(name) for name in names})


def present(name: str) -> ModuleType:
    """One of them, from now on in its place."""
    if isinstance(sys.modules.get(name), _Late):
        del sys.modules[name]
    return import_module(name)


def _version() -> tuple[int, int]:
    """Of the installed torch, which is not imported for it; a high one where that cannot be told."""
    found = find_spec("torch")
    try:
        text = Path(found.origin).with_name("version.py").read_text() if found and found.origin else ""
    except OSError:
        text = ""
    found_version = re.search(r"^__version__ = ['\"](\d+)\.(\d+)", text, re.MULTILINE)
    return (int(found_version[1]), int(found_version[2])) if found_version else (99, 0)
