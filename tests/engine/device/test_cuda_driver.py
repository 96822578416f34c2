"""The driver of GPUs is initialised while a rank imports torch."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penteract
from penteract.cli import train
from penteract.config.resolve.resolved_run import resolve
from penteract.engine.device import cuda_driver
from penteract.engine.device.cuda_driver import FLAG, begin_driver
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
    begin_driver().join()
    assert called == [cuda_driver._LIBRARY, *then]


def test_without_a_driver_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "_LIBRARY", "libno_such_driver.so.1")
    begin_driver().join()


@pytest.mark.parametrize(("more", "threads"), [([FLAG], 1), ([], 0)])
def test_a_rank_of_a_run_on_gpus_begins_it_before_it_imports_torch(more: list[str], threads: int) -> None:
    code = f"""
import sys, threading
sys.path.insert(0, {str(Path(penteract.__file__).parents[1])!r})
sys.orig_argv[:] = ["python", "-m", "penteract.engine.runtime.worker", *{more}]
begun = []
threading.Thread.start = lambda thread: begun.append(thread.name)
import penteract
print(begun.count("driver"), "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == f"{threads} False\n", done.stderr


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
