"""Calls of kernels that packages compile, which go from the process that goes through a step to the one that has
imported the packages meanwhile."""

from __future__ import annotations

import fcntl
import os
import pickle
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import IO, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from penteract.config.mesh import Mesh
from penteract.engine.device.lazy_compiler import lazy_compiler, leave_out_compiler
from penteract.engine.kernels.kernel import Env, LaunchReached, WithoutGpu
from penteract.engine.kernels.registry import kernel
from penteract.ops.declarations import Implementation, implementation
from penteract.ops.tape import Site

_GPU = "cuda:0"
_SHAPES = "torch.fx.experimental.symbolic_shapes"  # what torch imports for tensors without numbers
_ROOM = 2**20  # bytes of calls that wait while packages are imported


@dataclass(frozen=True, slots=True)
class Lying:
    """How a tensor lies in its storage, and which storage that is."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # elements
    storage: int
    bytes: int  # of the storage


@dataclass(frozen=True, slots=True)
class PackageCall:
    """A call of a phase of a site: `about` has its arguments, with `Lying` in place of tensors."""

    site: Site
    phase: str
    about: Any
    mesh: Mesh
    rank: int
    stat: torch.dtype

    @staticmethod
    def of(env: Env, site: Site, phase: str, about: Any) -> PackageCall:
        """Of tensors without numbers."""
        return PackageCall(site, phase, described(about), env.mesh, env.rank, env.stat)

    @property
    def name(self) -> str:
        """Which kernels it compiles."""
        return f"{self._by.name} {self.site.op_name} {self.phase}"

    @property
    def _by(self) -> Implementation:
        return implementation(self.site, self.mesh.layout)[0]

    def compile(self, apart: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> str:
        """Make the call with tensors of a GPU that is not here, as far as it goes without it. Returns the folder where
        its kernels are then. This process can make no other package's call.

        `apart`: of that folder and a function that compiles, makes one that does so in a process of its own."""
        how = without_gpu(self._by)
        assert how is not None
        folder = load([how])[0]
        how.before(partial(apart, folder))
        leave_out_compiler()
        FakeTensor.data_ptr = _address  # type: ignore[method-assign]
        make: Any = getattr(kernel(self.site.op_name, self._by, "cuda"), self.phase)
        with FakeTensorMode(), suppress(LaunchReached):
            make(Env(self.mesh, self.rank, self.stat), self.site, *on_gpu(self.about))
        return folder


def without_gpu(one: Implementation) -> WithoutGpu | None:
    """How the package compiles that has an implementation's kernels; None: it has none."""
    module, _, table = one.kernels["cuda"].partition(":")
    return getattr(import_module(module), "WITHOUT_GPU", {}).get(table)


def load(packages: Iterable[WithoutGpu]) -> list[str]:
    """Import packages so that they compile for GPUs that are not here; -> where each keeps what it compiled."""
    for one in packages:
        for name, value in one.environment.items():
            os.environ.setdefault(name, value)
    with lazy_compiler():
        folders = [one.load() for one in packages]
    import_module(_SHAPES)
    return folders


# ---- between processes -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Sender:
    """What the process that goes through a step has of the one that compiles."""

    pipe: IO[bytes]
    sent: list[str] = field(default_factory=list[str])  # names of calls

    def take(self, call: PackageCall) -> bool:
        """Send a call; False if nobody takes it."""
        try:
            self.pipe.write(pickle.dumps(call))
            self.pipe.flush()
        except (OSError, pickle.PicklingError, AttributeError, TypeError):
            return False
        self.sent.append(call.name)
        return True

    def close(self) -> None:
        """There are no more."""
        with suppress(OSError):
            pickle.dump(None, self.pipe)
            self.pipe.close()


@dataclass(slots=True)
class Receiver:
    """What the process that compiles has of the other."""

    pipe: IO[bytes]

    def each(self, do: Callable[[PackageCall], None]) -> None:
        """With each call, until there are no more."""
        while (call := pickle.load(self.pipe)) is not None:
            do(call)


def pipe() -> tuple[Receiver, Sender]:
    """Both ends."""
    read, write = os.pipe()
    with suppress(OSError, AttributeError):
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, _ROOM)
    return Receiver(os.fdopen(read, "rb")), Sender(os.fdopen(write, "wb"))


# ---- tensors ---------------------------------------------------------------------------------------------------------


def described(x: Any) -> Any:
    """Tensors as they lie."""
    if isinstance(x, list | tuple):
        return [described(each) for each in x]
    if not isinstance(x, torch.Tensor):
        return x
    storage = x.untyped_storage()
    return Lying(
        x.dtype, tuple(x.shape), tuple(x.stride()), int(x.storage_offset()), int(storage._cdata), storage.nbytes()
    )


def on_gpu(about: Any) -> Any:
    """Tensors of a GPU that lie as described, those of one storage in one storage."""
    storages = dict[int, torch.Tensor]()

    def made(x: Any) -> Any:
        if isinstance(x, list):
            return [made(each) for each in x]
        if not isinstance(x, Lying):
            return x
        if x.storage not in storages:
            storages[x.storage] = torch.empty(-(-x.bytes // 16) * 16, dtype=torch.uint8, device=_GPU)
        return storages[x.storage].view(x.dtype).as_strided(x.shape, x.stride, x.offset)

    return made(about)


def _address(x: torch.Tensor) -> int:
    return int(x.storage_offset()) * x.element_size()
