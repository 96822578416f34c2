"""Kernels compiled on a host's cores, in processes that see no GPU, into the caches in which ranks look for them.

The calls of a step are made with tensors without numbers (`stand_ins.py`). Where one would compile, this process forks,
and the child compiles: kernels are compiled beside each other. Packages that need seconds to be imported are imported
once, in a child of their own that is forked before all, and it forks for each of their calls (`package_calls.py`). What
a package needs to compile without a GPU says `WITHOUT_GPU` of the module that calls it: table of kernels -> how.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any, NoReturn

import torch

from penteract.engine.device.children import bound_to_parent
from penteract.engine.kernels.kernel import Env, TorchKernel, WithoutGpu
from penteract.engine.kernels.moe.routing import Routing
from penteract.engine.session.ahead.package_calls import PackageCall, Sender, load, pipe, without_gpu
from penteract.ops.declarations import implementation
from penteract.ops.tape import Site
from penteract.step.program import Program

_PHASES = ("forward", "input_gradient", "weight_gradient")


@dataclass(slots=True)
class Compiling:
    """Forks where a kernel has to be compiled. `rows`: the file into which each child writes a line of what it did;
    `most`: children at once."""

    rows: Path
    most: int
    seen: set[Any] = field(default_factory=set[Any])
    children: dict[int, str] = field(default_factory=dict[int, str])  # what each compiles
    made: str = ""  # in a child: what it compiles
    began: float = 0.0
    died: bool = False  # whether a child did, or a child of one
    sender: Sender | None = None  # of calls to the child that imports packages
    one_only: bool = False  # whether this is a child that compiles one kernel of a call
    count: int = 0  # of such children
    routing: Routing = field(init=False)

    def child(self, name: str, key: Any) -> bool:
        """Whether this is now the child that compiles what `key` stands for. It ends with `end`."""
        return self.new(key) and self.fork(name)

    def new(self, key: Any) -> bool:
        """Whether what `key` stands for was not met before."""
        if key in self.seen:
            return False
        self.seen.add(key)
        return True

    def fork(self, name: str) -> bool:
        """Whether this is now a child. It ends with `end`."""
        while len(self.children) >= self.most:
            self._reap()
        began, bind = time.monotonic(), bound_to_parent()
        if number := os.fork():
            self.children[number] = name
            return False
        bind()
        self.children, self.made, self.began, self.died, self.sender = {}, name, began, False, None
        return True

    def end(self, folder: str, error: str = "") -> NoReturn:
        """End a child, once its own children have."""
        with suppress(BaseException):
            self.wait()
            self._note(self.made, round(time.monotonic() - self.began, 2), folder, error)
        os._exit(int(self.died))

    @contextmanager
    def failing(self) -> Generator[None]:
        """What is raised inside ends a child; here it is printed. A product that some version of torch cannot make
        without numbers keeps no kernel from being compiled."""
        try:
            yield
        except Exception as error:
            if self.made:
                self.end("", f"{type(error).__name__}: {error}"[:300])
            traceback.print_exc()

    def pending(self, done: Iterable[str]) -> list[str]:
        """What children are at, and calls of packages that are not among those that are done."""
        calls = Counter([] if self.sender is None else self.sender.sent) - Counter(done)
        return [*self.children.values(), *calls.elements()]

    def wait(self) -> None:
        """Wait for all children."""
        if self.sender is not None:
            self.sender.close()
        while self.children:
            self._reap()

    def _reap(self) -> None:
        number, status = os.wait()
        name = self.children.pop(number, "")
        if status:
            self.died = True
            self._note(name, 0.0, "", f"its process ended with status {status}")

    def _note(self, name: str, seconds: float, folder: str, error: str) -> None:
        with self.rows.open("a") as file:
            file.write(json.dumps({"name": name, "seconds": seconds, "folder": folder, "error": error}) + "\n")

    # ---- Triton ------------------------------------------------------------------------------------------------------

    def triton(self, capability: tuple[int, int]) -> None:
        """From now on kernels in Triton are compiled for GPUs of this compute capability, and not launched. What
        launches them is compiled too: Triton has a C compiler make it of each kernel's arguments, or once for all."""
        triton, own = import_module("triton"), import_module("triton.backends.nvidia.driver")
        target = import_module("triton.backends.compiler").GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
        triton.runtime.driver.set_active(_NoDriver(target, self._launcher))
        triton.knobs.runtime.jit_cache_hook = self._before
        with suppress(Exception):  # without the driver's library ranks say so
            own.library_dirs()  # which a child would have to ask another process for
            if self.child("launches", own):
                self._built(own.CudaUtils)

    def _before(self, *, fn: Any, key: Any, **about: Any) -> bool:
        """Triton's hook before it compiles. True: it shall not, and launches nothing."""
        if self.one_only or not self.child(fn.name, (fn.module, fn.name, str(key))):
            return True
        os.nice(5)  # where cores are few: what ranks wait for longest are packages
        return False

    def _launcher(self, source: Any, metadata: Any) -> NoReturn:
        """What Triton asks for once it has compiled, before it loads the kernel on a GPU."""
        self._built(partial(import_module("triton.backends.nvidia.driver").CudaLauncher, source, metadata))

    def _built(self, build: Callable[[], Any]) -> NoReturn:
        """End a child that has a C compiler make a library: it is kept before it is loaded, which needs a driver."""
        error = ""
        try:
            build()
        except (CalledProcessError, RuntimeError) as failed:  # the compiler's, or there is none
            error = f"{type(failed).__name__}: {failed}"[:300]
        except Exception:  # without a driver
            pass
        self.end(str(import_module("triton").knobs.cache.dir), error)

    # ---- packages ----------------------------------------------------------------------------------------------------

    def import_packages(self, packages: Sequence[WithoutGpu]) -> None:
        """Import these in a child, which forks for each call once it has."""
        if not packages:
            return
        receiver, sender = pipe()
        if self.fork("import of packages"):
            with self.failing():
                sender.pipe.close()
                load(packages)
                receiver.each(self._compile)
                self.end("")
        receiver.pipe.close()
        self.sender = sender

    def _compile(self, call: PackageCall) -> None:
        """In a child."""
        if self.fork(call.name):
            self.end(call.compile(self.apart))

    def apart(self, folder: str, compile_: Callable[..., Any]) -> Callable[..., Any]:
        """The same, but each call has a child, which goes on with what it compiled until it would compile again: a
        package has then kept it in its `folder`. This process goes on with nothing."""

        def compile_apart(*about: Any, **named: Any) -> Any:
            if self.one_only:
                self.end(folder)
            name = f"{self.made}, kernel {self.count}"
            self.count += 1
            if not self.fork(name):
                return None
            self.one_only = True
            return compile_(*about, **named)

        return compile_apart

    def of(self, p: Program, kernels: Mapping[str, TorchKernel]) -> dict[str, TorchKernel]:
        """The kernels of a program: each call is made once, those of packages in a child."""
        self.routing = Routing(p)
        return {name: self._kernel(p, kernel) for name, kernel in kernels.items()}

    def _kernel(self, p: Program, kernel: TorchKernel) -> TorchKernel:
        made = [partial(self._call, p, phase, f) if (f := getattr(kernel, phase)) else None for phase in _PHASES]
        return TorchKernel(*made)  # type: ignore[arg-type]

    def _call(self, p: Program, phase: str, kernel: Callable[..., None], env: Env, site: Site, *about: Any) -> None:
        if site.op_name == "split_sizes":
            about[2][0] = self.routing.splits(site)
        elif self.new(_key(site, phase, about)):
            if without_gpu(implementation(site, p.layout)[0]) is None:
                with self.failing():
                    kernel(env, site, *about)
                return
            call = PackageCall.of(env, site, phase, about)
            if self.sender is None or not self.sender.take(call):
                self._compile(call)


@dataclass(frozen=True, slots=True)
class _NoDriver:
    """What Triton asks of a driver before a kernel is on a GPU."""

    target: Any
    launcher_cls: Callable[[Any, Any], Any]

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target


def _key(site: Site, phase: str, about: Any) -> Any:
    """Calls with an equal one have the same kernels."""
    return site.op_name, phase, repr(sorted(site.attrs.items(), key=str)), repr([_form(x) for x in about])


def _form(x: Any) -> Any:
    if isinstance(x, list | tuple):
        return [_form(each) for each in x]
    if isinstance(x, torch.Tensor):
        return x.dtype, tuple(x.shape), tuple(x.stride()), x.data_ptr() % 16
    return x
