"""Packages of kernels are imported while the first step is gone through; its calls go to whoever imports them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import forks
from penteract.config.resolve.resolved_run import resolve
from penteract.config.resolve.write_run_file import to_toml
from penteract.engine.kernels.fused_attention.fa4 import WITHOUT_GPU as ATTENTION
from penteract.engine.kernels.fused_glu import WITHOUT_GPU as GLU
from penteract.engine.session.ahead import compile_step

WORDS = [
    "--preset=llama-3.2-1b", "--model.layers=1", "--precision.dtype=bf16", "--kernels.elementwise=triton",
    "--kernels.fuse=norm,mlp,qkv,glu", "--kernels.attention=fa4_documents", "--batch.sequence_length=2048",
    "--batch.micro_batch_size=1", "--batch.global_batch_size=2",
]  # fmt: skip

# The process, with packages that are imported and compile in no time; kernels in Triton are not asked for. Each case is
# a fork of one that has imported what all of them need.
MAIN = """
import json, os, sys, time
from pathlib import Path
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from penteract.engine.device.lazy_compiler import leave_out_compiler
from penteract.engine.session.ahead import compile_step, first_step, package_calls, without_gpu

os.nice = lambda _: 0  # beside other tests it would wait for their cores
leave_out_compiler()
with FakeTensorMode():  # what torch imports for it, here once and not in the child of each call
    x = package_calls.on_gpu(package_calls.described([torch.empty(2, 3, device="meta").t()]))[0]
assert x.is_cuda

def case(importing, compiling):
    def load(packages):
        Path("imported").open("a").write(f"{len(packages)}\\n")
        exec(importing)

    def compiled(call, apart):
        with FakeTensorMode():
            tensors = package_calls.on_gpu(call.about)
        assert all(x.is_cuda for x in tensors[0]) and call.mesh.layout.world == 1
        exec(compiling)
        Path(f"from {os.getppid() == first}").touch()
        return "."

    compile_step.WAIT_S = 600  # on a busy host, too, nothing is late
    first = os.getpid()
    without_gpu.load, package_calls.PackageCall.compile = load, compiled
    without_gpu.Compiling._before = lambda *about, **named: True
    return compile_step.main(["run.toml", "--capability=9.0", "--ranks=0"])

for folder, words in json.loads(sys.argv[1]).items():
    if not (number := os.fork()):
        os.chdir(folder)
        sys.exit(case(*words))
    Path(folder, "code").write_text(str(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])))
"""
CALLS = {
    "fa4_documents packed_attention forward", "fa4_documents packed_attention input_gradient",
    "quack merged_glu forward", "quack merged_glu weight_gradient", "quack glu_linear input_gradient",
}  # fmt: skip
# What importing the packages does, and compiling one of their calls.
CASES = {
    "sooner": ("pass", "pass"),
    "later": ("time.sleep(3)", "pass"),
    "cannot be imported": ("raise ImportError('gone')", "pass"),
    "who imports dies": ("os.kill(os.getpid(), 9)", "pass"),
    "its child dies": ("pass", "'forward' in call.name and os.kill(os.getpid(), 9)"),
}


@dataclass(frozen=True)
class Ended:
    """A case: its exit code, the error of each row, and its folder."""

    code: int
    errors: dict[str, str]
    at: Path


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    pytest.importorskip("triton")
    folders = {case: tmp_path_factory.mktemp("case") for case in CASES}
    run = to_toml(resolve(None, None, WORDS))
    for folder in folders.values():
        (folder / "run.toml").write_text(run)
    env = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    words = json.dumps({str(folders[case]): how for case, how in CASES.items()})
    subprocess.run([sys.executable, "-c", MAIN, words], env=env, timeout=240, capture_output=True, check=True)
    return {case: of(folder) for case, folder in folders.items()}


def of(at: Path) -> Ended:
    rows = [json.loads(line) for line in (at / "run.rows").read_text().splitlines()]
    return Ended(int((at / "code").read_text()), {row["name"]: row["error"] for row in rows}, at)


@pytest.mark.parametrize("case", ["sooner", "later"])
def test_calls_are_made_where_packages_are_imported_once(case: str, ended: dict[str, Ended]) -> None:
    found = ended[case]
    assert found.code == 0 and found.errors == dict.fromkeys([*CALLS, "import of packages"], "")
    assert (found.at / "imported").read_text() == "2\n"
    assert [path.name for path in found.at.glob("from *")] == ["from False"]
    assert json.loads((found.at / "run.json").read_text())


def test_where_packages_cannot_be_imported_a_row_says_why(ended: dict[str, Ended]) -> None:
    found = ended["cannot be imported"]
    assert found.code == 0 and found.errors["import of packages"] == "ImportError: gone"
    assert set(found.errors) <= {*CALLS, "import of packages"}  # calls that find nobody are made here


def test_where_who_imports_dies_a_later_run_tries_again(ended: dict[str, Ended]) -> None:
    found = ended["who imports dies"]
    assert found.code == 1 and found.errors["import of packages"] == "its process ended with status 9"
    assert not (found.at / "run.json").exists()


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
    done = forks.code(APART, folder=tmp_path, limit=60)
    failed = ("call, kernel 1", "", "ZeroDivisionError: division by zero")
    whole = [(name, "folder", "") for name in ("call", "call, kernel 0", "call, kernel 2")]
    assert done.stdout == f"{sorted([*whole, failed])}\n", done.stderr
    made, kept = (dict(p.name.split()[1:] for p in tmp_path.glob(f"{what} *")) for what in ("made", "kept"))
    assert set(made) == {"0", "1", "2"} and len(set(made.values())) == 3
    assert kept == {x: made[x] for x in ("0", "2")}


def _fails(*about: object, **named: object) -> None:
    raise ValueError


def test_nor_is_it_enough_that_its_child_dies(ended: dict[str, Ended]) -> None:
    found = ended["its child dies"]
    assert found.code == 1 and not (found.at / "run.json").exists()
    assert found.errors["quack merged_glu forward"] == "its process ended with status 9"
    assert found.errors["quack glu_linear input_gradient"] == ""


def test_packages_are_those_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(*words: str) -> list[Any]:
        return compile_step.packages_of(resolve(None, None, [*WORDS, *words]).run, 0)

    assert sorted(map(id, found())) == sorted(map(id, (ATTENTION["FA4_DOCUMENTS"], GLU["QUACK"])))
    assert found("--kernels.fuse=none") == [ATTENTION["FA4_DOCUMENTS"]]
    assert found("--kernels.fuse=none", "--kernels.attention=flash", "--data.pack_documents=false") == []
    monkeypatch.setattr(compile_step, "compile_run", _fails)
    assert found() == []  # going through the step says why
