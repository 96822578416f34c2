"""What `penteract` exports, and that a process imports only what it asks for."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType

import pytest

import penteract

EXPORTS = sorted({*penteract.__all__} - {"__version__"})


def loaded(code: str) -> set[str]:
    """The modules of penteract that a new process has after `code`."""
    code += "\nimport sys; print(*(name for name in sys.modules if name.startswith('penteract.')))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def for_type_checkers() -> dict[str, str]:
    """Name -> the module that a type checker reads it from."""
    tree = ast.parse(Path(penteract.__file__).read_text())
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def test_type_checkers_read_what_a_process_gets() -> None:
    told = for_type_checkers()
    assert sorted(told) == EXPORTS
    for name, module in told.items():
        assert getattr(penteract, name) is getattr(import_module(module), name)


def test_all_names_are_there_before_they_are_imported() -> None:
    shown = [name for name in dir(penteract) if not name.startswith("__")]
    assert shown == sorted({*EXPORTS, "errors", "units"})  # and nothing that the module imports for itself
    code = f"from penteract import *; import penteract; assert all(globals()[name] for name in {penteract.__all__})"
    assert "penteract.planner.plan" in loaded(code)


def test_no_name_is_a_module() -> None:
    """Importing a module sets it as an attribute of its package, which would hide what is exported."""
    assert [name for name in EXPORTS if find_spec(f"penteract.{name}") is not None] == []


@pytest.mark.parametrize("first", ["penteract.planner.plan", "penteract.cli.plan", "penteract.api"])
def test_importing_a_module_hides_no_name(first: str) -> None:
    code = f"import {first}, penteract; print(type(penteract.plan).__name__, penteract.plan.__module__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [FunctionType.__name__, "penteract.api"]


def test_a_process_imports_only_what_it_asks_for() -> None:
    assert loaded("import penteract") == {"penteract._version"}
    assert not any(
        name.startswith(("penteract.planner", "penteract.ops")) for name in loaded("from penteract import Layout")
    )


def test_errors_need_no_import_of_their_own() -> None:
    assert loaded("import penteract; penteract.errors.BadInput") == {"penteract._version", "penteract.errors"}


def test_what_is_not_there() -> None:
    with pytest.raises(AttributeError, match=r"^module 'penteract' has no attribute 'planned'"):
        _ = penteract.planned  # type: ignore[attr-defined]
