"""Packages of kernels are imported while the first step is gone through; its calls go to whoever imports them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penteract.config.resolve.resolved_run import resolve
from penteract.config.resolve.write_run_file import to_toml
from penteract.engine.kernels.fused_attention.fa4 import WITHOUT_GPU as ATTENTION
from penteract.engine.kernels.fused_glu import WITHOUT_GPU as GLU
from penteract.engine.session.ahead import compile_step

WORDS = [
    "--preset=llama-3.2-1b", "--model.layers=1", "--precision.dtype=bf16", "--kernels.elementwise=triton",
    "--kernels.fuse=norm,mlp,qkv,glu", "--kernels.attention=fa4_documents", "--batch.sequence_length=2048",
]  # fmt: skip

# The process, with packages that are imported and compile in no time; kernels in Triton are not asked for.
MAIN = """
import os, sys, time
from pathlib import Path
from torch._subclasses.fake_tensor import FakeTensorMode
from penteract.engine.session.ahead import compile_step, package_calls, without_gpu

def load(packages):
    Path("imported").open("a").write(f"{len(packages)}\\n")
    IMPORTING

def compiled(call, apart):
    with FakeTensorMode():
        tensors = package_calls.on_gpu(call.about)
    assert all(x.is_cuda for x in tensors[0]) and call.mesh.layout.world == 1
    COMPILING
    Path(f"from {os.getppid() == first}").touch()
    return "."

compile_step.WAIT_S = 600  # on a busy host, too, nothing is late
first = os.getpid()
without_gpu.load, package_calls.PackageCall.compile = load, compiled
without_gpu.Compiling._before = lambda *about, **named: True
sys.exit(compile_step.main(["run.toml", "--capability=9.0", "--ranks=0"]))
"""
CALLS = {
    "fa4_documents packed_attention forward", "fa4_documents packed_attention input_gradient",
    "quack merged_glu forward", "quack merged_glu weight_gradient", "quack glu_linear input_gradient",
}  # fmt: skip


def gone_through(importing: str, at: Path, compiling: str = "pass") -> tuple[int, dict[str, str]]:
    """Exit code, and the error of each row."""
    pytest.importorskip("triton")
    (at / "run.toml").write_text(to_toml(resolve(None, None, WORDS)))
    env = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    words = [sys.executable, "-c", MAIN.replace("IMPORTING", importing).replace("COMPILING", compiling)]
    done = subprocess.run(words, cwd=at, env=env, timeout=120, capture_output=True, text=True, check=False)
    rows = [json.loads(line) for line in (at / "run.rows").read_text().splitlines()]
    return done.returncode, {row["name"]: row["error"] for row in rows}


@pytest.mark.parametrize("importing", ["pass", "time.sleep(6)"], ids=["sooner", "later"])
def test_calls_are_made_where_packages_are_imported_once(importing: str, tmp_path: Path) -> None:
    code, errors = gone_through(importing, tmp_path)
    assert code == 0 and errors == dict.fromkeys([*CALLS, "import of packages"], "")
    assert (tmp_path / "imported").read_text() == "2\n"
    assert [path.name for path in tmp_path.glob("from *")] == ["from False"]
    assert json.loads((tmp_path / "run.json").read_text())


def test_where_packages_cannot_be_imported_a_row_says_why(tmp_path: Path) -> None:
    code, errors = gone_through("raise ImportError('gone')", tmp_path)
    assert code == 0 and errors["import of packages"] == "ImportError: gone"
    assert set(errors) <= {*CALLS, "import of packages"}  # calls that find nobody are made here


def test_where_who_imports_dies_a_later_run_tries_again(tmp_path: Path) -> None:
    code, errors = gone_through("os.kill(os.getpid(), 9)", tmp_path)
    assert code == 1 and errors["import of packages"] == "its process ended with status 9"
    assert not (tmp_path / "run.json").exists()


# A package that compiles and keeps three kernels in a call, the second of which cannot be.
APART = """
import json, os
from pathlib import Path
from penteract.engine.session.ahead.without_gpu import Compiling

def made(x):
    Path(f"made {x} {os.getpid()}").touch()
    return 1 / (x - 1)

c = Compiling(Path("rows"), 8)
if c.fork("call"):
    with c.failing():
        make, kept = c.apart("folder", made), {}
        for x in range(3):
            kept[x] = make(x)
            if kept[x] is not None:
                Path(f"kept {x} {os.getpid()}").touch()
        c.end("folder")
c.wait()
rows = [json.loads(line) for line in Path("rows").read_text().splitlines()]
print(sorted((row["name"], row["folder"], row["error"]) for row in rows))
"""


def test_each_kernel_of_a_call_is_compiled_by_a_process_that_keeps_it(tmp_path: Path) -> None:
    words = [sys.executable, "-c", APART]
    done = subprocess.run(words, cwd=tmp_path, timeout=60, capture_output=True, text=True, check=False)
    failed = ("call, kernel 1", "", "ZeroDivisionError: division by zero")
    whole = [(name, "folder", "") for name in ("call", "call, kernel 0", "call, kernel 2")]
    assert done.stdout == f"{sorted([*whole, failed])}\n", done.stderr
    made, kept = (dict(p.name.split()[1:] for p in tmp_path.glob(f"{what} *")) for what in ("made", "kept"))
    assert set(made) == {"0", "1", "2"} and len(set(made.values())) == 3
    assert kept == {x: made[x] for x in ("0", "2")}


def _fails(*about: object, **named: object) -> None:
    raise ValueError


def test_nor_is_it_enough_that_its_child_dies(tmp_path: Path) -> None:
    dies = "'forward' in call.name and os.kill(os.getpid(), 9)"
    code, errors = gone_through("pass", tmp_path, dies)
    assert code == 1 and not (tmp_path / "run.json").exists()
    assert errors["quack merged_glu forward"] == "its process ended with status 9"
    assert errors["quack glu_linear input_gradient"] == ""


def test_packages_are_those_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(*words: str) -> list[Any]:
        return compile_step.packages_of(resolve(None, None, [*WORDS, *words]).run, 0)

    assert sorted(map(id, found())) == sorted(map(id, (ATTENTION["FA4_DOCUMENTS"], GLU["QUACK"])))
    assert found("--kernels.fuse=none") == [ATTENTION["FA4_DOCUMENTS"]]
    assert found("--kernels.fuse=none", "--kernels.attention=flash", "--data.pack_documents=false") == []
    monkeypatch.setattr(compile_step, "compile_step", _fails)
    assert found() == []  # going through the step says why
