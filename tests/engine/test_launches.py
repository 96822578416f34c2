"""Launches that are bound hand the driver what the JIT would, and leave to the JIT what they are not compiled for."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from penteract.engine.device import launches
from penteract.engine.device.launches import BoundLaunch, bind, kind, was_read

triton = pytest.importorskip("triton")
SMALL = st.integers(-(2**28), 2**28)
INTEGERS = st.one_of(st.integers(-(2**63), 2**64 - 1), st.integers(-64, 64), SMALL.map(lambda n: 16 * n))


@dataclass
class Compiled:
    """In place of a CompiledKernel: `run` writes down what it is given."""

    launched: list[tuple[Any, ...]]
    backend: str = "cuda"
    function: str = "function"
    packed_metadata: str = "packed"

    @property
    def metadata(self) -> Any:
        return SimpleNamespace(target=SimpleNamespace(backend=self.backend))

    @property
    def run(self) -> Any:
        launched = self.launched
        return lambda *about: launched.append(about)


@dataclass
class Kernel:
    """In place of a JITFunction f(x, y, n, WIDTH, rate): `asked` has the arguments of launches that it made."""

    arg_names: tuple[str, ...] = ("x", "y", "n", "WIDTH", "rate")
    constexprs: tuple[int, ...] = (3,)
    pre_run_hooks: list[Any] = field(default_factory=list[Any])
    asked: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    launched: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])
    backend: str = "cuda"

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(**named: Any) -> Compiled:
            self.asked.append(named)
            return Compiled(self.launched, self.backend)

        return launch


class Driver:
    """In place of Triton's driver: `at` is the current device."""

    at = 0

    def get_current_device(self) -> int:
        return self.at

    def get_current_stream(self, device: int) -> int:
        return 70 + device


@pytest.fixture(autouse=True)
def own_heap() -> None:
    """All: what Triton has compiled for a driver of a test is not freed when that one has gone."""


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Triton, with a driver of its own and without hooks."""
    hooks = SimpleNamespace(launch_enter_hook=None, launch_exit_hook=SimpleNamespace(calls=[]))
    found = SimpleNamespace(
        runtime=SimpleNamespace(driver=SimpleNamespace(active=Driver())), knobs=SimpleNamespace(runtime=hooks)
    )
    monkeypatch.setattr(launches, "_triton", lambda: found)
    monkeypatch.setattr(launches, "was_read", lambda: True)
    yield found


def memory() -> torch.Tensor:
    """64 numbers whose address is a multiple of 64."""
    whole = torch.zeros(96)
    return whole[-(whole.data_ptr() // 4) % 16 :][:64]


def bound(kernel: Kernel, x: torch.Tensor | None, y: torch.Tensor | None, n: int | None = 7) -> BoundLaunch:
    return bind(kernel, (5, 2), x, y, n, WIDTH=32, rate=0.5, num_warps=4)


def test_the_first_launch_is_the_jits_and_later_ones_take_its_arguments_in_the_kernels_order(here: Any) -> None:
    kernel, x, y = Kernel(), memory(), memory()
    launch = bound(kernel, x, y)
    for _ in range(3):
        launch()
    assert kernel.asked == [{"x": x, "y": y, "n": 7, "WIDTH": 32, "rate": 0.5, "num_warps": 4}]
    expected = (5, 2, 1, 70, "function", "packed", None, None, None, x.data_ptr(), y.data_ptr(), 7, 32, 0.5)
    assert kernel.launched == [expected] * 2


def test_what_is_given_takes_the_place_of_what_was_given_before(here: Any) -> None:
    kernel, x, some = Kernel(), memory(), [memory() for _ in range(3)]
    launch = bound(kernel, x, None, None)
    for y, n in zip(some, (7, 9, 11), strict=True):
        launch(y=y, n=n)
    assert len(kernel.asked) == 1
    assert [about[-5:] for about in kernel.launched] == [
        (x.data_ptr(), y.data_ptr(), n, 32, 0.5) for y, n in zip(some[1:], (9, 11), strict=True)
    ]


def test_what_is_given_is_not_kept(here: Any) -> None:
    kernel, y = Kernel(), memory()
    launch, gone = bound(kernel, memory(), None), weakref.ref(y)
    launch(y=y)
    launch(y=y)
    kernel.asked.clear()
    del y
    gc.collect()
    assert gone() is None


def test_the_compiled_kernel_is_kept_which_would_unload_its_code(here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, made = Kernel(), list[Any]()

    def compiled(self: Kernel, grid: tuple[int, ...]) -> Any:
        one = Compiled(self.launched)
        made.append(weakref.ref(one))
        return lambda **named: one

    monkeypatch.setattr(Kernel, "__getitem__", compiled)
    launch = bound(kernel, memory(), memory())
    launch()
    monkeypatch.undo()
    gc.collect()
    assert made[0]() is not None and launch.direct is not None


@pytest.mark.parametrize("n", [1, 32, 2**40, -(2**31) - 1, 2**63, True, 7.0, None])
def test_a_number_of_another_kind_is_the_jits(here: Any, n: Any) -> None:
    kernel, x, y = Kernel(), memory(), memory()
    launch = bound(kernel, x, y, None)
    for number in (7, n, n):
        launch(n=number)
    assert [about["n"] for about in kernel.asked] == [7, n] and [about[-3] for about in kernel.launched] == [n]


def test_tensors_that_are_moved_are_launched_if_their_addresses_are_alike(here: Any) -> None:
    kernel, x, y, other, odd = Kernel(), memory(), memory(), memory(), memory()[1:33]
    launch = bound(kernel, x, y)
    launch()
    y.set_(other)  # type: ignore[no-untyped-call]
    launch()
    assert kernel.launched[-1][-4] == other.data_ptr() and len(kernel.asked) == 1
    y.set_(odd)  # type: ignore[no-untyped-call]
    launch()
    assert len(kernel.asked) == 2
    launch()
    assert kernel.launched[-1][-4] == odd.data_ptr() and len(kernel.launched) == 2


@pytest.mark.parametrize("other", [memory()[1:33], memory().bfloat16(), None, 7])
def test_a_tensor_of_another_kind_is_the_jits(here: Any, other: Any) -> None:
    kernel, x, y = Kernel(), memory(), memory()
    launch = bound(kernel, x, None)
    for one in (y, y, other):
        launch(y=one)
    assert len(kernel.asked) == 2 and len(kernel.launched) == 1 and kernel.asked[-1]["y"] is other


@pytest.mark.parametrize("first", [{"n": 7}, {}])
def test_other_arguments_than_were_given_before_are_the_jits(here: Any, first: dict[str, Any]) -> None:
    kernel = Kernel()
    launch, y = bound(kernel, memory(), memory()), memory()
    launch(**first)
    launch(**first)
    launch(y=y)
    assert len(kernel.asked) == 2 and len(kernel.launched) == 1
    launch(y=y)
    assert kernel.launched[-1][-4] == y.data_ptr()


def test_another_device_is_the_jits(here: Any) -> None:
    kernel = Kernel()
    launch = bound(kernel, memory(), memory())
    launch()
    here.runtime.driver.active.at = 1
    launch()
    launch()
    assert len(kernel.asked) == 2 and [about[3] for about in kernel.launched] == [71]


@pytest.mark.parametrize("where", ["launch_enter_hook", "launch_exit_hook", "pre_run_hooks"])
def test_launches_that_a_tool_is_told_of_are_the_jits(here: Any, where: str) -> None:
    kernel = Kernel()
    launch = bound(kernel, memory(), memory())
    launch()
    launch()
    if where == "pre_run_hooks":
        kernel.pre_run_hooks.append(print)
    else:
        setattr(here.knobs.runtime, where, SimpleNamespace(calls=[print]))
    launch()
    launch()
    assert len(kernel.asked) == 3 and len(kernel.launched) == 1


@pytest.mark.parametrize("why", ["backend", "version", "constant", "interpreter", "default"])
def test_the_jit_makes_launches_of_which_too_little_is_known(here: Any, why: str, monkeypatch: Any) -> None:
    kernel, also = Kernel(backend="hip" if why == "backend" else "cuda"), dict[str, Any]()
    launch = bound(kernel, memory(), memory())
    if why == "version":
        monkeypatch.setattr(launches, "was_read", lambda: False)
    elif why == "constant":
        also = {"WIDTH": 64}
    elif why == "interpreter":
        monkeypatch.setattr(Kernel, "__getitem__", lambda self, grid: lambda **named: self.asked.append(named))
    elif why == "default":
        kernel.arg_names += ("rest",)
    for _ in range(3):
        launch(**also)
    assert len(kernel.asked) == 3 and not kernel.launched


# ---- the installed Triton --------------------------------------------------------------------------------------------


@dataclass
class Gpu:
    """A driver that compiles for a GPU, and writes down what is launched."""

    launched: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *about: self.launched.append(about)

    @property
    def utils(self) -> Any:
        return SimpleNamespace(
            load_binary=lambda *about: ("module", 0xF00, 32, 0, 1024), unload_module=lambda module: None,
            get_device_properties=lambda device: {"max_shared_mem": 232448, "multiprocessor_count": 132},
        )  # fmt: skip

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 77

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    driver, found = triton.runtime.driver, Gpu()
    before = driver._active
    driver.set_active(found)
    yield found
    driver.set_active(before)


def scaled(x, y, also, n, WIDTH: triton.language.constexpr, rate):  # type: ignore[no-untyped-def]
    at = triton.language.program_id(0) * WIDTH + triton.language.arange(0, WIDTH)
    found = triton.language.load(x + at, at < n, other=0.0) * rate
    if also is not None:
        found += triton.language.load(also + at, at < n, other=0.0)
    triton.language.store(y + at, found, at < n)


def test_the_installed_triton_is_one_that_was_read() -> None:
    assert was_read()


def as_handed(about: tuple[Any, ...]) -> list[Any]:
    """What is launched, but for what is said of it: with addresses of tensors."""
    return [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in (*about[:6], *about[9:])]


def test_a_bound_launch_hands_the_driver_what_the_jit_does(gpu: Gpu) -> None:
    """The order of arguments, constants and None among them; hooks, which are at places 6 to 8, do nothing."""
    kernel, x, y = triton.runtime.JITFunction(scaled), memory(), memory()
    launch = bind(kernel, (3,), x, None, None, 60, WIDTH=32, rate=0.5, num_warps=2)
    kernel[(3,)](x, y, None, 60, WIDTH=32, rate=0.5, num_warps=2)
    for _ in range(3):
        launch(y=y)
    assert launch.direct is not None
    jit, first, *direct = gpu.launched
    assert len(direct) == 2 and as_handed(jit) == as_handed(first)
    for about in direct:
        assert as_handed(about) == as_handed(jit) and about[6:9] == (None, None, None)
        assert all(isinstance(about[i], int) for i in (9, 10)), "tensors are handed as addresses"


def test_the_jit_returns_another_kernel_for_arguments_of_another_kind(gpu: Gpu) -> None:
    kernel, x, y = triton.runtime.JITFunction(scaled), memory(), memory()
    launch = bind(kernel, (3,), x, y, None, None, WIDTH=32, rate=0.5)
    functions = list[Any]()
    for n in (60, 62, 64, 1, 62):
        launch(n=n)
        assert launch.direct is not None
        functions.append(launch.direct.run)
    assert functions[0] is functions[1] and len(set(map(id, functions))) == 3 and functions[-1] is functions[0]
    assert [about[9 + 3] for about in gpu.launched] == [60, 62, 64, 1, 62]


@pytest.fixture(scope="module")
def specialised() -> Iterator[Any]:
    """What Triton compiles a kernel for, of one argument."""
    driver = triton.runtime.driver
    before = driver._active
    driver.set_active(Gpu())
    binder = triton.runtime.JITFunction(scaled).device_caches[0][-1]
    yield lambda n: binder(None, None, None, n, 32, 0.5)[1][3]
    driver.set_active(before)


@example(1, 1)
@example(2**31 - 1, 2**31)
@example(-(2**31), -(2**31) - 1)
@example(2**63 - 1, 2**63)
@example(0, 16)
@given(INTEGERS, INTEGERS)
def test_integers_of_a_kind_are_one_to_triton(specialised: Any, a: int, b: int) -> None:
    if kind(a) == kind(b):
        assert specialised(a) == specialised(b)


@given(st.floats(), st.floats())
def test_all_floats_are_one_to_triton(specialised: Any, a: float, b: float) -> None:
    assert kind(a) == kind(b) and specialised(a) == specialised(b)


def test_tensors_of_a_kind_at_addresses_that_are_alike_are_one_to_triton(specialised: Any) -> None:
    some = [memory(), memory(), memory()[4:], memory()[1:], memory()[2:], memory().bfloat16(), memory().bfloat16()]
    for a in some:
        for b in some:
            if kind(a) == kind(b) and launches.alike(a.data_ptr(), b.data_ptr()):
                assert specialised(a) == specialised(b)
