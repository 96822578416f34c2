"""Packages of kernels are imported without torch's compiler, and what they have for it works all the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PACKAGE = """
import torch

@torch.compile(backend="eager")
def twice(x):
    return 2 * x

def _half(x):
    return x / 2

half = torch.compile(_half, backend="eager", fullgraph=True, recompile_limit=64)

@torch.compiler.disable
def same(x):
    return x

@torch.compiler.disable(recursive=False)
def other(x):
    return -x
"""

CHECK = """
import sys
import torch
from penteract.engine.device.lazy_compiler import lazy_compiler

compile, disable = torch.compile, torch.compiler.disable
with lazy_compiler():
    import of_kernels as found
assert "torch._dynamo" not in sys.modules
assert (torch.compile, torch.compiler.disable) == (compile, disable)
assert found.same(3) == 3 and found.other(3) == -3 and found.twice.__name__ == "twice"
assert "torch._dynamo" not in sys.modules
assert found.twice(torch.ones(2)).tolist() == [2, 2] and found.half(torch.ones(2)).tolist() == [0.5, 0.5]
assert "torch._dynamo" in sys.modules  # they were compiled
with lazy_compiler():  # it is there already
    assert torch.compile is compile
"""

# Torch's functions for tensors without numbers import the compiler to be left out of it.
LEFT_OUT = """
import sys
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from penteract.engine.device.lazy_compiler import lazy_compiler, leave_out_compiler

heavy = {"torch._dynamo.eval_frame", "torch._inductor", "torch.distributed.fsdp"}
leave_out_compiler()
x = torch.empty(4, device="meta")
x[0].add_(1 / x[1].clamp(min=1).to(torch.float64))
with FakeTensorMode():
    y = torch.empty(4, 4, device="cuda:0")
    assert (y @ y).clamp(min=1).shape == (4, 4)
with lazy_compiler():  # it is as before
    import of_kernels as found
assert not heavy & sys.modules.keys()
assert found.twice(torch.ones(2)).tolist() == [2, 2] and found.half(torch.ones(2)).tolist() == [0.5, 0.5]
assert "torch._dynamo.eval_frame" in sys.modules  # who asks for it has it
import torch._dynamo.config
assert torch._dynamo.config.cache_size_limit > 0 and torch._dynamo.disable(len)("ab") == 2
"""


def test_a_package_is_imported_without_the_compiler_and_compiles_at_the_first_call(tmp_path: Path) -> None:
    (tmp_path / "of_kernels.py").write_text(PACKAGE)
    words = [sys.executable, "-c", CHECK]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_tensors_without_numbers_do_not_import_it(tmp_path: Path) -> None:
    (tmp_path / "of_kernels.py").write_text(PACKAGE)
    words = [sys.executable, "-c", LEFT_OUT]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
