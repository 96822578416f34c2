"""A rank imports torch without parts that others need; they are there once something asks for them."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import penteract
from penteract.engine.device import late_torch
from penteract.engine.device.late_torch import META_REGISTRATIONS, OF_ALL, OF_TRIED, TRIED, parts_of

SOURCES = str(Path(penteract.__file__).parents[1])
VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
HERE = parts_of(VERSION)
WITHOUT = f"""
import sys
sys.path.insert(0, {SOURCES!r})
from penteract.engine.device import late_torch
late_torch.leave_out()
import torch
import torch.distributed
"""


# Each code in a process of its own, forked from one that has imported torch so.
EACH = """
import json, os
for code in json.loads(sys.argv[1]):
    if not (number := os.fork()):
        exec(code)
        print(late_torch.left_out())
        sys.exit()
    assert not os.waitpid(number, 0)[1]
    print("----", flush=True)
"""
COMPUTE = """
x = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
print(torch.allclose(torch.linalg.inv(x) @ x, torch.eye(8, dtype=torch.float64)), torch.nn.functional.silu(x).shape)
"""
ASK = """
import importlib.util
print(importlib.util.find_spec("torch.export").name)
from torch.export.dynamic_shapes import Dim  # a module within one is imported once
from torch.distributions.normal import Normal
print(sys.modules["torch.distributions.normal"].__spec__.origin[-9:])
print(torch.distributions.Normal is Normal, torch.export.Dim is Dim is torch.export.dynamic_shapes.Dim)
print(torch.distributions.kl_divergence(Normal(0.0, 1.0), Normal(0.0, 1.0)).item(), torch.export.export.__module__)
late_torch.leave_out()  # which changes nothing now
y = torch.empty(3, 4, device="meta")
late_torch.present(late_torch.META_REGISTRATIONS)
print((y @ y.t()).shape, type(sys.modules[late_torch.META_REGISTRATIONS]).__name__)
"""
EVERY = """
from importlib import import_module
from operator import attrgetter

def held(name):  # by its package, under its name
    first, _, rest = name.partition(".")
    return attrgetter(rest)(import_module(first))

names = late_torch.left_out()
for name in names:
    assert import_module(name) is held(name) and type(held(name)).__name__ == "_Late", name
for name in names:
    assert not hasattr(held(name), "no such name") and type(held(name)).__name__ == "module", name
    assert held(name) is import_module(name) is sys.modules[name] and held(name).__file__, name
from torch.utils.data.dataset import TensorDataset
late = late_torch._Late("torch.masked")
sys.modules["torch.masked"], late.in_place = late, True
from torch.masked import *
assert late.__all__ and as_masked_tensor is torch.masked.as_masked_tensor  # all that it has, by a star
print(torch.utils.data.TensorDataset is TensorDataset, torch.profiler.profile, torch.nn.quantized.Linear.__name__)
"""
COMPILE = """
from penteract.engine.device import lazy_compiler
with lazy_compiler.lazy_compiler():
    f = torch.compile(lambda x: x + 1, backend="eager")
print(f(torch.ones(2)).tolist(), type(sys.modules[late_torch.META_REGISTRATIONS]).__name__)
"""


DEFINE = """
import os
looks, look = [], os.lstat
os.lstat = lambda *about, **named: looks.append(about) or look(*about, **named)
@torch.library.custom_op("penteract_test::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x
print(len(looks) < 100, len(sys.modules) > 500)
"""


@pytest.fixture(scope="module")
def told() -> dict[str, list[str]]:
    """What each prints."""
    codes = (COMPUTE, ASK, EVERY, COMPILE, DEFINE)
    words = [sys.executable, "-c", WITHOUT + EACH, json.dumps(codes)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    parts = done.stdout.split("----\n")[:-1]
    return {code: part.split("\n")[:-1] for code, part in zip(codes, parts, strict=True)}


def test_the_version_is_told_without_importing_torch() -> None:
    assert late_torch._version(Path(torch.__file__).parent) == VERSION


def test_torch_computes_without_them(told: dict[str, list[str]]) -> None:
    assert told[COMPUTE] == ["True torch.Size([8, 8])", f"{sorted(HERE)}"]


def test_each_is_there_once_it_is_asked_for(told: dict[str, list[str]]) -> None:
    expected = ["torch.export", "normal.py", "True True", "0.0 torch.export", "torch.Size([3, 3]) module"]
    assert told[ASK][:-1] == expected


def test_each_is_where_its_package_has_it_before_and_after(told: dict[str, list[str]]) -> None:
    assert told[EVERY] == ["True <class 'torch.profiler.profiler.profile'> Linear", "[]"]


def test_an_operator_is_defined_without_a_look_at_the_files_of_all_modules(told: dict[str, list[str]]) -> None:
    assert told[DEFINE][0] == "True True"


def test_of_a_version_that_nobody_has_tried_little_is_left_out() -> None:
    assert parts_of((2, 10)) == (*OF_ALL, META_REGISTRATIONS) and parts_of((2, 99)) == OF_ALL
    assert parts_of(TRIED[-1]) == (*OF_ALL, *OF_TRIED)


def test_a_frame_has_the_module_that_python_tells() -> None:
    own, known = sys._getframe(), inspect.getmodule
    assert late_torch._module(known, own) is known(own) is sys.modules[__name__]
    assert late_torch._module(known, pytest.fixture) is known(pytest.fixture)
    found = dict[str, Any]()
    exec("import sys; frame = sys._getframe()", found)  # a frame of no module
    assert late_torch._module(lambda of, _: "otherwise", found["frame"]) == "otherwise"
    with patch.dict(sys.modules, {"stand-in": type("Slots", (), {"__slots__": ()})()}):  # type: ignore[dict-item]
        exec("import sys; frame = sys._getframe()", found := {"__name__": "stand-in"})
        assert late_torch._module(lambda of, _: "otherwise", found["frame"]) == "otherwise"


def test_what_compiles_later_has_what_tensors_without_numbers_need(told: dict[str, list[str]]) -> None:
    assert told[COMPILE][0] == "[2.0, 2.0] module"


def test_a_rank_leaves_them_out() -> None:
    code = f"""
import sys
sys.path.insert(0, {SOURCES!r})
sys.orig_argv[:] = ["python", "-m", "penteract.engine.runtime.worker"]
import penteract
from penteract.engine.device import late_torch
print(late_torch.left_out())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == f"{sorted(HERE)}\n", done.stderr
