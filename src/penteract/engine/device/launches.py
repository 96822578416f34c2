"""Launches of Triton kernels whose arguments are known before they are needed.

Triton's JIT finds out in every launch which compiled kernel its arguments ask for, which costs the host several times
what the launch itself does. `bind` keeps the kernel that the first launch found, and later launches hand it to the
driver, as long as everything holds that Triton compiles for:

    device      the current one, whose current stream takes the launch
    tensors     their dtypes, and whether their addresses are multiples of 16
    integers    whether they are 1, multiples of 16, and how many bits hold them
    all else    the values themselves

Where anything differs, and where a tool has asked Triton to be told of launches, the JIT makes the launch, and its
kernel is the one that is kept. It also makes every launch in the interpreter, on devices that are not NVIDIA's, and in
versions of Triton whose launcher nobody has read.

What is used of Triton beside its interface is what `JITFunction.run` does with a `CompiledKernel`: its `run`,
`function`, `packed_metadata` and `metadata`, and the hooks that it would call. `tests/engine/test_launches.py` holds
the installed version to it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any

import torch

READ = (3, 6), (3, 9)  # first and last version of Triton whose launcher is known to take what it is given here
_ADDRESS = torch.Tensor.data_ptr
ALIGNED = 16  # bytes: addresses that are multiples of it have kernels of their own


@dataclass(slots=True)
class BoundLaunch:
    """A kernel, its grid and its arguments, which calling it launches. `args`: by name, in the kernel's order."""

    kernel: Any
    grid: tuple[int, ...]
    args: dict[str, Any]
    options: Mapping[str, Any]
    direct: DirectLaunch | None = field(default=None, init=False)

    def __call__(self, **given: Any) -> None:
        """Launch; arguments that are `given` take the place of those that are bound. They are not kept."""
        if self.direct is None or not self.direct.launch(given):
            args = {**self.args, **given}
            compiled = self.kernel[self.grid](**args, **self.options)
            self.direct = direct_launch(self.kernel, self.grid, args, given, compiled)


def bind(kernel: Any, grid: tuple[int, ...], *args: Any, **named: Any) -> BoundLaunch:
    """The launch `kernel[grid](*args, **named)`, as often as it is called. Of arguments that only its calls are given,
    None holds the place."""
    names = kernel.arg_names
    every = dict(zip(names, args, strict=False)) | {n: named[n] for n in names[len(args) :] if n in named}
    return BoundLaunch(kernel, grid, every, {n: x for n, x in named.items() if n not in every})


@dataclass(slots=True)
class DirectLaunch:
    """A compiled kernel with its arguments as the driver takes them, and what holds while it is the right one."""

    compiled: Any  # kept: once it is freed, its code is unloaded
    run: Callable[..., None]
    function: Any
    metadata: Any
    grid: tuple[int, ...]  # of three dimensions
    values: list[Any]  # of all arguments, with addresses of tensors
    tensors: list[torch.Tensor]  # those that are bound
    places: list[int]  # of them among `values`
    addresses: list[int]  # of them
    given: Mapping[str, tuple[int, Any]]  # arguments that each launch is given: place, kind
    device: int
    current_device: Callable[[], int]
    current_stream: Callable[[int], int]
    hooks: Any  # Triton's settings, with what a tool wants called around launches
    before: list[Any]  # what is called before the JIT looks for the kernel

    def launch(self, given: Mapping[str, Any]) -> bool:
        """Launch with what is given. False: it is not the right kernel, and nothing was launched."""
        device, hooks, values = self.current_device(), self.hooks, self.values
        first, last = hooks.launch_enter_hook, hooks.launch_exit_hook  # each a chain of Triton's, which may be empty
        if device != self.device or self.before:
            return False
        if (first is not None and getattr(first, "calls", True)) or (last is not None and getattr(last, "calls", True)):
            return False
        found = list(map(_ADDRESS, self.tensors))
        if found != self.addresses:
            if not all(map(alike, found, self.addresses)):
                return False
            self.addresses = found
            for place, address in zip(self.places, found, strict=True):
                values[place] = address
        if given.keys() != self.given.keys():
            return False
        for name, x in given.items():
            place, expected = self.given[name]
            if isinstance(x, torch.Tensor):
                address = x.data_ptr()
                if (x.dtype, x.get_device()) != expected:
                    return False
                if address != values[place]:
                    if not alike(address, values[place]):
                        return False
                    values[place] = address
            elif x is not values[place]:
                if kind(x) != expected:
                    return False
                values[place] = x
        self.run(*self.grid, self.current_stream(device), self.function, self.metadata, None, None, None, *values)
        return True


def alike(a: int, b: int) -> bool:
    """Whether both addresses have the same kernel."""
    return (a % ALIGNED == 0) == (b % ALIGNED == 0)


def kind(x: Any) -> Any:
    """Arguments of equal kinds have the same kernel, tensors if their addresses are alike. Triton tells fewer apart."""
    if isinstance(x, torch.Tensor):
        return x.dtype, x.get_device()
    if type(x) is int:
        return int, x == 1, x % ALIGNED == 0, -(2**31) <= x < 2**31, x < 2**63
    return float if type(x) is float else (type(x), x)


def direct_launch(
    kernel: Any, grid: tuple[int, ...], args: Mapping[str, Any], given: Collection[str], compiled: Any
) -> DirectLaunch | None:
    """What launches a kernel that the JIT has compiled and launched; None where the JIT has to do it again."""
    metadata = getattr(compiled, "metadata", None)
    if metadata is None or metadata.target.backend != "cuda" or len(args) != len(kernel.arg_names) or not was_read():
        return None
    names, constants = list(args), {kernel.arg_names[i] for i in kernel.constexprs}
    if constants & set(given):  # what is compiled in is never given
        return None
    bound = [n for n in names if n not in given and isinstance(args[n], torch.Tensor)]
    values = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in args.values()]
    driver, places = _triton().runtime.driver.active, [names.index(n) for n in bound]
    return DirectLaunch(
        compiled, compiled.run, compiled.function, compiled.packed_metadata, (*grid, 1, 1)[:3], values,
        [args[n] for n in bound], places, [values[place] for place in places],
        {n: (names.index(n), kind(args[n])) for n in given}, driver.get_current_device(), driver.get_current_device,
        driver.get_current_stream, _triton().knobs.runtime, kernel.pre_run_hooks,
    )  # fmt: skip


@cache
def was_read() -> bool:
    """Whether the installed Triton is one whose launcher is known."""
    major, minor = _triton().__version__.split(".")[:2]
    return READ[0] <= (int(major), int(minor)) <= READ[1]


def _triton() -> Any:
    return import_module("triton")
