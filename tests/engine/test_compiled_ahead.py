"""Kernels are compiled once a host, beside each other, before ranks need them; whatever happens to that process, runs
go on."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import forks
from penteract.config.resolve.resolved_run import Resolved, resolve
from penteract.config.resolve.write_run_file import run_values
from penteract.engine.device.compiled_ahead import CompiledAhead
from penteract.engine.kernels import registry
from penteract.engine.runtime import compiling
from penteract.engine.session.ahead import awaited, package_calls
from penteract.engine.session.ahead.compile_step import kinds_of_ranks
from penteract.ops.declarations import OPS

HOPPER, TINY = (9, 0), ["--kernels.elementwise=triton", "--kernels.fuse=all", "--precision.dtype=bf16"]
SOURCES = str(Path(compiling.__file__).parents[3])
ROW = {"name": "one", "seconds": 0.1, "error": ""}


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files, of this process and those that it starts. What all are forked from outlives it."""
    forks.ready()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), SOURCES]))
    monkeypatch.setattr(compiling, "usable_here", lambda: 16)
    return tmp_path


@pytest.fixture
def ahead() -> CompiledAhead:
    return of(run())


def run(*words: str) -> Resolved:
    return resolve(None, None, [*TINY, *words])


def of(resolved: Resolved, capability: tuple[int, int] = HOPPER) -> CompiledAhead:
    found = CompiledAhead.of(run_values(resolved.run), capability)
    assert found is not None
    return found


def is_free(ahead: CompiledAhead) -> bool:
    """Whether whoever asks compiles."""
    if (lock := ahead.hold()) is None:
        return False
    os.close(lock)
    return True


# ---- the files -------------------------------------------------------------------------------------------------------


def test_the_key_is_of_what_decides_kernels(ahead: CompiledAhead) -> None:
    assert of(run("--training.steps=77", "--output.folder=elsewhere", "--checkpoint.every=9")) == ahead
    assert of(run("--batch.micro_batch_size=2")) != ahead
    assert of(run("--kernels.fuse=none")) != ahead
    assert of(run(), (8, 0)) != ahead


def test_one_of_two_callers_compiles(ahead: CompiledAhead) -> None:
    lock = ahead.hold()
    assert lock is not None and ahead.hold() is None
    os.close(lock)
    assert is_free(ahead)


def test_what_was_compiled_need_not_be_again(ahead: CompiledAhead, tmp_path: Path) -> None:
    (cache := tmp_path / "cache").mkdir()
    ahead.note([ROW | {"folder": str(cache)}])
    assert ahead.hold() is None and ahead.wait() == ahead.found == [ROW | {"folder": str(cache)}]
    cache.rmdir()  # emptied by somebody
    assert ahead.found is None
    assert is_free(ahead)


def test_a_wait_has_a_limit(ahead: CompiledAhead) -> None:
    assert ahead.wait() is None  # nobody compiles
    lock = ahead.hold()
    assert lock is not None
    began = time.monotonic()
    assert ahead.wait(0.3) is None and 0.3 <= time.monotonic() - began < 5
    os.close(lock)
    assert ahead.wait(60) is None and time.monotonic() - began < 30


# ---- the process -----------------------------------------------------------------------------------------------------

FAKE = {
    "done": "Path(sys.argv[1]).with_suffix('.json').write_text('[]')",
    "fails": "raise SystemExit(3)",
    "hangs": "time.sleep(600)",
    "dies": "os.kill(os.getpid(), 9)",
}


def faked(kind: str, at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that does this in place of compiling."""
    (at / f"fake_{kind}.py").write_text(f"import os, sys, time\nfrom pathlib import Path\n{FAKE[kind]}\n")
    monkeypatch.setattr(compiling, "COMPILER", f"fake_{kind}")


@pytest.mark.parametrize("kind", FAKE)
def test_a_run_goes_on_whatever_happens(
    kind: str, ahead: CompiledAhead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faked(kind, tmp_path, monkeypatch)
    with compiling.compiling(run(), HOPPER, os.environ) as process:
        assert process is not None and ahead.run.exists()
        found = ahead.wait(1.0 if kind == "hangs" else 60.0)
        assert found == ([] if kind == "done" else None)
        if kind == "hangs":
            assert process.poll() is None and ahead.hold() is None  # one compiles: nobody else begins
    assert process.poll() is not None
    assert is_free(ahead) == (kind != "done")


def test_a_warm_run_starts_nothing(ahead: CompiledAhead, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead.note([])
    monkeypatch.setattr(subprocess, "Popen", pytest.fail)
    with compiling.compiling(run(), HOPPER, os.environ) as process:
        assert process is None


def test_nor_do_other_ranks_small_hosts_and_runs_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", pytest.fail)
    with compiling.compiling(run(), None, os.environ) as none:
        assert none is None
    with compiling.compiling(run(), HOPPER, {**os.environ, "LOCAL_RANK": "1"}) as none:
        assert none is None
    monkeypatch.setattr(compiling, "usable_here", lambda: 1 + compiling.SPARE - 1)
    with compiling.compiling(run(), HOPPER, os.environ) as none:
        assert none is None


def test_a_process_that_cannot_start_is_none(ahead: CompiledAhead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling.sys, "executable", "/nowhere/python")
    with compiling.compiling(run(), HOPPER, os.environ) as process:
        assert process is None
    assert is_free(ahead)


def test_ranks_under_a_launcher_name_those_of_their_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faked("hangs", tmp_path, monkeypatch)
    place = {"LOCAL_RANK": "0", "RANK": "2", "LOCAL_WORLD_SIZE": "2"}
    with compiling.compiling(run("--parallel.dp=4"), HOPPER, {**os.environ, **place}) as process:
        assert process is not None and "--ranks=2,3" in list(process.args)  # type: ignore[call-overload]


def test_a_rank_says_where_to_look(
    ahead: CompiledAhead, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "penteract")
    monkeypatch.setattr(registry.torch.cuda, "get_device_capability", lambda _: HOPPER)  # pyright: ignore
    rank: Any = SimpleNamespace(device=SimpleNamespace(type="cuda"), number=0, progress=SimpleNamespace(limit=60.0))
    awaited.await_kernels(run().run, rank)
    assert not caplog.messages  # nobody tried
    ahead.log.touch()
    awaited.await_kernels(run().run, rank)
    assert caplog.messages == [f"not all kernels were compiled ahead: see {ahead.log}"]
    awaited.await_kernels(run().run, SimpleNamespace(device=SimpleNamespace(type="cpu")))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("step", "code", "noted"),
    [
        ("lambda *_: 1 / 0", 1, None),  # a later run tries again
        ("lambda *_: None", 0, []),
        ("lambda *_: time.sleep(60)", 1, []),  # nor does a later run wait for it
    ],
)
def test_what_is_noted_of_a_step(step: str, code: int, noted: list[Any] | None, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    (tmp_path / "a.toml").write_text('preset = "tiny"\n')
    source = f"""
import sys, time
from penteract.engine.session.ahead import compile_step as c, first_step
c.WAIT_S, first_step.compile_first_step = 1, {step}
sys.exit(c.main(["a.toml", "--capability=9.0", "--ranks=0"]))
"""
    done = forks.code(source, folder=tmp_path, limit=120)
    assert done.returncode == code and CompiledAhead(tmp_path / "a").found == noted


def test_each_pipeline_rank_is_gone_through_once() -> None:
    spec = run("--parallel.dp=2", "--parallel.pp=2").run
    assert [spec.layout.world, kinds_of_ranks(spec, range(4))] == [4, [0, 2]]
    assert kinds_of_ranks(spec, range(2, 4)) == [2]


# ---- kernels of packages ---------------------------------------------------------------------------------------------


def test_each_package_says_how_it_compiles_without_a_gpu() -> None:
    tables = {one.kernels["cuda"] for op in OPS.values() for one in op.implementations if "cuda" in one.kernels}
    for table in tables:
        module, _, name = table.partition(":")
        found = import_module(module)
        assert (name in getattr(found, "PACKAGES", {})) == (name in getattr(found, "WITHOUT_GPU", {})), table


def test_tensors_of_a_call_lie_as_those_without_numbers() -> None:
    block = torch.empty(4096, dtype=torch.uint8, device="meta")
    two = block.view(torch.bfloat16)[8:].as_strided((3, 4), (8, 1), 12)
    other, third = block.view(torch.float32)[5], torch.empty(3, 5, device="meta").t()
    given: Any = [[two, other], [third, None], True]
    given = pickle.loads(pickle.dumps(package_calls.described(given)))  # to another process
    with FakeTensorMode():
        made = package_calls.on_gpu(given)
    assert made[1][1] is None and made[2] is True
    (a, b), c = made[0], made[1][0]
    for x, like in ((a, two), (b, other), (c, third)):
        assert x.is_cuda and (x.dtype, x.shape, x.stride()) == (like.dtype, like.shape, like.stride())
        assert x.storage_offset() == like.storage_offset()
    assert a.untyped_storage()._cdata == b.untyped_storage()._cdata != c.untyped_storage()._cdata


# ---- Triton's kernels ------------------------------------------------------------------------------------------------

ASKED = """
import json, sys
from pathlib import Path
import torch
from penteract.config.resolve.resolved_run import resolve
from penteract.engine.comm.fake import FakeComm
from penteract.engine.device.device import Cpu
from penteract.engine.kernels.triton.fused_loss import shared_rows
from penteract.engine.session.ahead import first_step, without_gpu

torch.set_grad_enabled(False)
spec, found = resolve(sys.argv[1], "").run, {}

class Asked(without_gpu.Compiling):
    def child(self, name, key):
        found[where].add(str(key))
        return False

class Alone(Cpu):  # with tensors that have numbers and addresses
    def comm(self, rank, *about):
        return FakeComm(rank, without())

own = shared_rows.one_by_one
shared_rows.one_by_one = lambda logits: logits.is_meta and own(logits)  # others stand for a GPU's
without, device, rank_of = first_step._Alone, torch.device, first_step.Rank
for where in ("meta", "cpu"):
    found[where], asked = set(), Asked(Path("rows"), 1)
    asked.triton((9, 0))
    if where == "cpu":
        first_step._Alone = Alone
        first_step.Rank = lambda number, world, at, *about: rank_of(number, world, device("cpu"), *about)
    for rank in range(spec.layout.world):
        first_step.compile_first_step(spec, rank, (9, 0), asked)
print(json.dumps([sorted(found[where]) for where in found]))
"""


# Forks a process for each line that it reads, in which Triton compiles. It has imported what all of them need.
LOADED = """
import json, os, sys
import torch, triton
from torch._subclasses.fake_tensor import FakeTensorMode
from penteract.engine.device.lazy_compiler import leave_out_compiler
from penteract.engine.kernels.triton.fused_loss import shared_rows
from penteract.engine.session.ahead import compile_step, first_step, package_calls, without_gpu

os.nice = lambda _: 0  # beside other tests it would wait for their cores
leave_out_compiler()
with FakeTensorMode():  # what torch imports for it
    package_calls.on_gpu(package_calls.described([torch.empty(2, 3, device="meta").t()]))

for line in sys.stdin:
    if number := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]), flush=True)
        continue
    folder, environment, source, words = json.loads(line)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.argv = ["-c", *words]
    exec(source, {"__name__": "__main__"})
    sys.exit()
"""
Compiler = Callable[[str, Path, Sequence[str]], str]


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    """What Python prints that is given a source, a folder and words, where Triton compiles."""
    pytest.importorskip("triton")
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    env = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    process = subprocess.Popen([sys.executable, "-c", LOADED], env=env | {"PYTHONPATH": SOURCES}, **pipes)
    assert process.stdin and process.stdout

    def printed(source: str, at: Path, words: Sequence[str]) -> str:
        assert process.stdin and process.stdout
        own = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
        own |= {"TRITON_CACHE_DIR": str(at / "triton"), "CUDA_VISIBLE_DEVICES": ""}
        print(json.dumps([str(at), own, source, list(words)]), file=process.stdin, flush=True)
        assert process.stdout.readline() == "0\n", (at / "err").read_text()[-2000:]
        return (at / "out").read_text()

    with process:
        yield printed
        process.stdin.close()


@pytest.mark.parametrize(
    "words",
    [(), ("--parallel.pp=2", "--kernels.fuse=none"), ("--optimizer.kind=muon", "--model.layers=1")],
    ids=["fused", "pipeline", "muon"],
)
def test_tensors_with_addresses_ask_for_the_same_kernels(
    words: tuple[str, ...], compiler: Compiler, tmp_path: Path
) -> None:
    """What decides which kernel Triton compiles: dtypes, whether addresses and integers are multiples of 16."""
    file = tmp_path / "run.toml"
    file.write_text(compiling.to_toml(run(*words)))
    compiled, asked = json.loads(compiler(ASKED, tmp_path, [str(file)]))
    assert len(compiled) > 10 and compiled == asked
    kernels = {name.split("'")[3] for name in compiled}
    assert {"_update_momentum", "_apply"} <= kernels or "--optimizer.kind=muon" not in words


# As the module does when it is run, but for three kernels alone: each takes half a second.
THREE = """
import sys
from penteract.engine.session.ahead.without_gpu import Compiling
from penteract.engine.session.ahead.compile_step import main

first, child = [], Compiling.child
def few(self, name, key):
    if name == "launches":
        return child(self, name, key)
    first.extend([key] * (key not in first))
    return key in first[:3] and child(self, name, key)
Compiling.child = few
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("driver", ["", "with a driver's library", "with a compiler that fails"])
def test_they_are_compiled_without_a_gpu(
    driver: str, ahead: CompiledAhead, compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So is what launches them, where there are the driver's library, here an empty one, and a C compiler."""
    triton = pytest.importorskip("triton")
    if driver:
        if (cc := shutil.which("cc")) is None:
            pytest.skip("no C compiler")
        subprocess.run([cc, "-shared", "-o", tmp_path / "libcuda.so.1", "-x", "c", "/dev/null"], check=True)
        monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(tmp_path))
    fails = "fails" in driver
    if fails:
        monkeypatch.setenv("CC", shutil.which("false") or "false")
    one_each = hasattr(import_module("triton.backends.nvidia.driver"), "make_launcher")
    ahead.run.write_text(compiling.to_toml(run("--model.layers=1")))
    for _ in range(1 if fails else 2):  # the second finds all that the first has compiled
        compiler(THREE, tmp_path, [str(ahead.run), "--capability=9.0", "--ranks=0"])
        assert ahead.found is not None
        failed = [row["name"] for row in ahead.found if row["error"]]
        assert ("launches" in failed) == fails and (fails or not failed)
        made = Counter(path.name.partition(".")[0] for path in tmp_path.glob("triton/*/*.so"))
        assert len(list(tmp_path.glob("triton/*/*.cubin"))) == 3
        if driver and not fails:
            assert made == Counter(cuda_utils=1, __triton_launcher=3 * one_each), triton.__version__
        ahead.base.with_suffix(".json").unlink()
