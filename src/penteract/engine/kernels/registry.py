"""The kernel for each op: the implementation that `ops/declarations/registry.py` chooses, imported by the name in its
entry."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from threading import Thread
from typing import Protocol

import torch

from penteract.config.layout import Layout
from penteract.config.rules.kernel_limits import FA4, HOPPER, QUACK, installed_version
from penteract.engine.device.device import device_of
from penteract.engine.device.lazy_compiler import lazy_compiler
from penteract.engine.kernels.kernel import Bindable, TorchKernel, bound
from penteract.errors import BadInput
from penteract.ops.declarations import OPS, Implementation, implementation
from penteract.ops.tape import Site
from penteract.step.program import Program

Version = tuple[int, int]
_KEYS = "penteract.engine.device.cache_keys"  # which imports Triton
_failed = dict[str, Exception]()  # packages that could not be imported


class Target(Protocol):
    """`type`: "cuda" or "cpu". `capability`: the compute capability of a GPU; (0, 0) for others. `cuda`: the version
    of CUDA that torch was built for."""

    @property
    def type(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def capability(self) -> Version: ...

    @property
    def cuda(self) -> Version: ...

    @property
    def reads_peers(self) -> bool:
        """Whether ranks of a host can read each other's memory."""
        ...

    def installed(self, package: str) -> str:
        """The version of a package on the ranks' hosts, or ""."""
        ...


@dataclass(frozen=True, slots=True)
class TargetHere:
    """A device of this machine."""

    device: torch.device

    @property
    def type(self) -> str:
        """Of the device."""
        return self.device.type

    @property
    def name(self) -> str:
        """As its driver calls it."""
        return torch.cuda.get_device_name(self.device)

    @property
    def capability(self) -> Version:
        """Of a GPU."""
        return torch.cuda.get_device_capability(self.device) if self.type == "cuda" else (0, 0)

    @property
    def cuda(self) -> Version:
        """Of this torch."""
        major, minor = (torch.version.cuda or "0.0").split(".")[:2]
        return int(major), int(minor)

    @property
    def reads_peers(self) -> bool:
        """Of this host."""
        return device_of(self.device).reads_peers

    def installed(self, package: str) -> str:
        """In this Python."""
        return installed_version(package)


@dataclass(frozen=True, slots=True)
class TargetElsewhere:
    """A device that is not here. What it needs of its hosts is taken to be there."""

    type: str
    name: str
    capability: Version = HOPPER
    cuda: Version = (13, 0)
    reads_peers: bool = True

    def installed(self, package: str) -> str:
        """The version that kernels call."""
        return {name: version for name, version in (FA4, QUACK)}.get(package, "")


def kernels(p: Program, device: torch.device) -> dict[str, TorchKernel]:
    """The kernel of each op of a program. It is selected here for each site, so that no step selects. What computes
    with packages has them imported before (`import_packages`); a rehearsal computes nothing, and needs none."""
    chosen = dict[str, dict[Site, TorchKernel]]()
    for site in computed_sites(p):
        one, _ = implementation(site, p.layout)
        chosen.setdefault(site.op_name, {})[site] = kernel(site.op_name, one, device.type)
    made = dict[str, TorchKernel]()
    for op_name, found in chosen.items():
        one, *others = dict.fromkeys(found.values())
        made[op_name] = _selecting(found.__getitem__, one) if others else one
    return made


def import_packages(p: Program, device: torch.device) -> None:
    """Import the packages that the kernels of a program compute with. That takes seconds, and needs nothing of a run,
    so it may go on in a thread while the run is made. Beside that Triton hashes itself, for its cache's keys."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # a thread has a device of its own, and a package may ask for it
    hashing: Thread | None = None
    for site in computed_sites(p):
        one, _ = implementation(site, p.layout)
        if (table := one.kernels.get(device.type)) is not None:
            load_package(table)
        if hashing is None and device.type == "cuda" and "triton" in sys.modules:
            (hashing := Thread(target=import_module(_KEYS).hash_triton, daemon=True)).start()
    if hashing is not None:
        hashing.join()


def kernels_by_call(layout: Layout, device: torch.device) -> dict[str, TorchKernel]:
    """The same without a program, to call single kernels. If an op has several implementations, each call selects one,
    and imports its module when it first needs it."""

    def at(site: Site) -> TorchKernel:
        return kernel(site.op_name, implementation(site, layout)[0], device.type)

    made = dict[str, TorchKernel]()
    for op_name, op in OPS.items():
        *others, reference = op.implementations
        plain = kernel(op_name, reference, device.type)
        made[op_name] = _selecting(at, plain) if others else plain
    return made


def check_devices(p: Program, device: Target) -> None:
    """Refuse a program with an op whose chosen implementation does not run on this device. It is never replaced."""
    for site in computed_sites(p):
        one, _ = implementation(site, p.layout)
        if device.type not in one.kernels:
            raise BadInput("KERNEL", f"'{one.name}' of {site.op_name} does not run here", where=site.line,
                           found=device.type, allowed=", ".join(one.kernels),
                           fix=f"--precision.device {next(iter(one.kernels), 'auto')}, or a layout that does not ask "
                           "for it")  # fmt: skip


def computed_sites(p: Program) -> Iterator[Site]:
    """The sites of a program that kernels compute: all but collectives and copies."""
    calls = (i.call for chunk in p.chunks for some in chunk.actions.values() for i in some)
    yield from dict.fromkeys(call.site for call in calls if call.phase not in ("start", "finish"))


def kernel(op_name: str, one: Implementation, device: str) -> TorchKernel:
    """The kernel of an op's implementation on a type of device."""
    return _found(one.kernels[device])[op_name]


@cache
def load_package(name: str) -> None:
    """Import the package that the kernels of this name compute with, as `PACKAGES` of their module says. Within a call
    the import would leave cycles of frames, which keep the call's tensors until a collection. torch's compiler, which
    packages have for others, is not imported with them."""
    module, _, table = name.partition(":")
    load = getattr(import_module(module), "PACKAGES", {}).get(table)
    if load is not None:
        with lazy_compiler():  # one thread at a time
            if (first := _failed.get(name)) is not None:
                raise first  # what was imported halfway fails for another reason
            try:
                load()
            except Exception as error:
                _failed[name] = error
                raise


@cache
def _found(name: str) -> dict[str, TorchKernel]:
    module, _, table = name.partition(":")
    return getattr(import_module(module), table)


def _selecting(at: Callable[[Site], TorchKernel], like: TorchKernel) -> TorchKernel:
    """One kernel for all sites of an op: it calls the kernel `at` each site. It has the phases of `like`, as all
    implementations of an op have the same ones."""

    def phase(name: str) -> Callable[..., None]:
        return Bindable(lambda env, site, *args: bound(getattr(at(site), name), env, site, *args))

    names = ("forward", "input_gradient", "weight_gradient")
    return TorchKernel(*[phase(name) if getattr(like, name) else None for name in names])  # type: ignore[arg-type]
