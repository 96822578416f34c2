"""Threads map torch's library and initialise the driver of GPUs while a rank imports modules."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import penteract
from penteract.cli import train
from penteract.config.resolve.resolved_run import resolve
from penteract.engine.device import early_libraries
from penteract.engine.device.early_libraries import BESIDE, FIRST, FLAG, LIBRARIES, initialise_driver, map_torch
from penteract.engine.runtime import prepared


def driver(called: list[Any], version: int, code: int = 0) -> Callable[[str], Any]:
    """What stands in for `ctypes.CDLL`: a driver of this version, whose answer about it is `code`."""

    def version_of(into: Any) -> int:
        ctypes.cast(into, ctypes.POINTER(ctypes.c_int)).contents.value = version
        return code

    def load(name: str) -> Any:
        called.append(name)
        return type("Driver", (), {"cuDriverGetVersion": staticmethod(version_of), "cuInit": called.append})

    return load


@pytest.mark.parametrize(
    ("version", "code", "then"), [(13000, 0, [0]), (12020, 0, [0]), (12010, 0, []), (13000, 999, [])]
)
def test_a_driver_that_loads_kernels_late_by_itself_is_initialised(
    monkeypatch: pytest.MonkeyPatch, version: int, code: int, then: list[int]
) -> None:
    called = list[Any]()
    monkeypatch.setattr(ctypes, "CDLL", driver(called, version, code))
    initialise_driver()
    assert called == [early_libraries._DRIVER, *then]


def test_without_a_driver_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_libraries, "_DRIVER", "libno_such_driver.so.1")
    initialise_driver()


def test_torch_has_the_libraries_that_are_mapped_for_it(tmp_path: Path) -> None:
    folder = Path(torch.__file__).parent / "lib"
    assert map_torch(folder) and all((folder / name).exists() for name in LIBRARIES)
    assert not map_torch(tmp_path)  # of another torch


def test_what_is_imported_beside_needs_no_torch() -> None:
    code = f"""
import sys
from importlib import import_module
for name in {FIRST + BESIDE}:
    import_module(name)
assert not {{"torch", "numpy", "triton"}} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr


def test_every_rank_imports_what_is_imported_beside() -> None:
    code = f"import sys, penteract.engine.runtime.worker; print({{*{FIRST + BESIDE}}} - sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "set()\n", done.stderr


TRAINED = """
import sys
sys.orig_argv[:] = ["python", "-m", "penteract.engine.runtime.worker"]
import penteract
import torch
x = torch.arange(16.0).view(4, 4)
print((x @ x.t()).sum().item(), torch.distributed.is_available(), "libtorch_cpu.so" in open("/proc/self/maps").read())
"""


def test_torch_computes_with_what_a_thread_has_mapped() -> None:
    done = subprocess.run([sys.executable, "-c", TRAINED], capture_output=True, text=True, check=False)
    assert done.stdout == "3680.0 True True\n", done.stderr


@pytest.mark.parametrize(("more", "threads"), [([FLAG], ["torch", "driver"]), ([], ["torch"])])
def test_a_rank_begins_before_it_imports_torch(more: list[str], threads: list[str]) -> None:
    code = f"""
import sys, threading
sys.path.insert(0, {str(Path(penteract.__file__).parents[1])!r})
sys.orig_argv[:] = ["python", "-m", "penteract.engine.runtime.worker", *{more}]
begun = []
threading.Thread.start = lambda thread: begun.append(thread.name)
import penteract
print([name for name in begun if name != "stopping"], "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == f"{threads} False\n", done.stderr


def test_a_rank_begins_without_a_module_that_its_python_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_libraries, "FIRST", ("_no_such_ssl",))
    monkeypatch.setattr(early_libraries, "find_spec", lambda name: None)  # no torch to map
    early_libraries.begin()


@pytest.mark.parametrize(("device", "more"), [("auto", [FLAG]), ("cuda", [FLAG]), ("cpu", [])])
def test_the_command_says_so_unless_the_run_is_on_cpus(
    monkeypatch: pytest.MonkeyPatch, device: str, more: list[str]
) -> None:
    started = list[list[str]]()
    monkeypatch.setattr(prepared, "usable_here", lambda: 4)

    def refuse(words: list[str], *_: object) -> None:
        started.append(words)
        raise OSError

    monkeypatch.setattr(prepared, "start_rank", refuse)
    run = resolve(None, "tiny", [f"precision.device={device}"])
    with train._prepared(run) as ranks:
        assert ranks is None
    assert started[0][3:] == more
