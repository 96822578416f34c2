"""A rank imports torch without parts that others need; they are there once something asks for them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import penteract
from penteract.engine.device import late_torch
from penteract.engine.device.late_torch import LATE, META_REGISTRATIONS, UP_TO

SOURCES = str(Path(penteract.__file__).parents[1])
VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
HERE = LATE if VERSION > UP_TO else (*LATE, META_REGISTRATIONS)
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
        print(sorted(name for name, module in sys.modules.items() if type(module).__name__ == "_Late"))
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
COMPILE = """
from penteract.engine.device import lazy_compiler
with lazy_compiler.lazy_compiler():
    f = torch.compile(lambda x: x + 1, backend="eager")
print(f(torch.ones(2)).tolist(), type(sys.modules[late_torch.META_REGISTRATIONS]).__name__)
"""


@pytest.fixture(scope="module")
def told() -> dict[str, list[str]]:
    """What each prints."""
    codes = (COMPUTE, ASK, COMPILE)
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
    expected = ["torch.export", "normal.py", "True True", "0.0 torch.export", "torch.Size([3, 3]) module", "[]"]
    assert told[ASK] == expected


def test_what_compiles_later_has_what_tensors_without_numbers_need(told: dict[str, list[str]]) -> None:
    assert told[COMPILE][0] == "[2.0, 2.0] module"


def test_a_rank_leaves_them_out() -> None:
    code = f"""
import sys
sys.path.insert(0, {SOURCES!r})
sys.orig_argv[:] = ["python", "-m", "penteract.engine.runtime.worker"]
import penteract
print(sorted(name for name, module in sys.modules.items() if type(module).__name__ == "_Late"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == f"{sorted(HERE)}\n", done.stderr
