"""The device of a rank: its streams, copies and graphs, and pinned host memory.

A `torch.device` names where tensors are; a `Device` has the operations that differ between GPUs and CPUs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import permutations
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from penteract.engine.comm.comm import Comm, PeerMemory, Waitable, Work
from penteract.engine.comm.direct.gpu_peers import GpuPeers
from penteract.engine.comm.direct.host_peers import HostPeers
from penteract.engine.comm.distributed import Gloo, Nccl
from penteract.engine.comm.groups import ProcessGroups
from penteract.engine.comm.journal import Journal, Marks
from penteract.engine.device.copies import Copied, CopyEvent, CopyOut
from penteract.engine.device.cpu_affinity import threads_of
from penteract.engine.device.storages import Storages, bytes_of
from penteract.errors import BadInput, Bug, OutOfMemory
from penteract.units import show_bytes

_T = TypeVar("_T")
_SAVING_THREADS = 8  # at most: more do not make a disk faster


class Device(Protocol):
    """`pinned`: whether host memory for copies is page-locked. `backend`: of torch.distributed. `behind`: whether it
    computes while the host goes on. `name`: what kind of device it is. `host`: where tensors of its host are.
    `at_once`: elements that short operations take at a time, one after the other: so few that a CPU's caches hold their
    temporaries, so many that what a GPU's operation costs the host is small beside its work."""

    pinned: ClassVar[bool]
    behind: ClassVar[bool]
    at_once: ClassVar[int]
    backend: ClassVar[str]
    host: ClassVar[torch.device]

    @property
    def name(self) -> str: ...

    @property
    def uuid(self) -> str | None:
        """What NVML knows a GPU by; None of what is no GPU."""
        ...

    def share(self, ranks: int) -> None:
        """Limit this process to one rank's part of the host's cores, where `ranks` share the host."""
        ...

    def saving_threads(self, ranks: int) -> int:
        """Threads of one of this host's `ranks` that may hash and write a checkpoint while it trains."""
        ...

    def comm(self, rank: int, journal: Journal | None = None, limit: float = 600.0) -> Comm:
        """The communicator of a rank on this type of device. It notes in `journal` what it does; torch ends a
        collective after `limit` seconds."""
        ...

    @property
    def reads_peers(self) -> bool:
        """Whether ranks of this host can read each other's memory."""
        ...

    @property
    def peer_memory(self) -> PeerMemory:
        """Memory that other ranks of the host read."""
        ...

    def side_stream(self) -> AbstractContextManager[None]:
        """Within the context, waits go to a separate stream, ordered after everything computed so far."""
        ...

    def copy(self, x: torch.Tensor, y: torch.Tensor) -> Work:
        """Start a copy of x to y, of the same shape and dtype, between device and host. The copy is ordered after
        everything computed so far: x is complete, and the old content of y has been read. The Work keeps both alive
        until it is waited for."""
        ...

    def copy_out(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> CopyOut:
        """Start copies of each x to a y on the host, of the same shape and dtype, apart from all other copies. They are
        ordered after everything computed so far; x and y outlive them."""
        ...

    def register(self, x: torch.Tensor) -> None:
        """Page-lock the memory of the host tensor x, so that copies to it overlap compute. It lives as long as this
        process."""
        ...

    def release(self) -> None:
        """Give the device's memory back that no tensor has any more."""
        ...

    def pin(self, x: torch.Tensor) -> torch.Tensor:
        """The host tensor x in page-locked memory, so that a copy to the device does not block the host."""
        ...

    def read(self, x: torch.Tensor) -> Callable[[], list[float]]:
        """The numbers of x [n] as they are once all that was asked for so far is computed. Whoever calls waits."""
        ...

    def settle(self) -> None:
        """Block the host until everything computed so far is done."""
        ...

    def peak(self, work: Callable[[], _T], resident: Callable[[], Iterable[torch.Tensor]]) -> tuple[_T, int]:
        """The result of `work`, and the peak bytes of tensors during it, with the `resident` ones."""
        ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record the device operations of `work` without running them; returns a function that replays them. Raises Bug
        on a device without graphs."""
        ...


@dataclass(slots=True)
class Cpu:
    """The host's cores. Copies are synchronous."""

    pinned: ClassVar[bool] = False
    behind: ClassVar[bool] = False
    at_once: ClassVar[int] = 2**14  # torch does not divide so few among threads
    backend: ClassVar[str] = "gloo"
    host: ClassVar[torch.device] = torch.device("cpu")

    @property
    def name(self) -> str:
        return "cpu"

    @property
    def uuid(self) -> str | None:
        return None

    def share(self, ranks: int) -> None:
        torch.set_num_threads(threads_of(ranks))

    def saving_threads(self, ranks: int) -> int:
        return 1  # cores compute

    def comm(self, rank: int, journal: Journal | None = None, limit: float = 600.0) -> Comm:
        return Gloo(rank, ProcessGroups(timeout=timedelta(seconds=limit)), journal or Journal())

    @property
    def reads_peers(self) -> bool:
        return hasattr(os, "memfd_create")  # Linux

    @property
    def peer_memory(self) -> PeerMemory:
        return HostPeers()

    def side_stream(self) -> AbstractContextManager[None]:
        return nullcontext()

    def copy(self, x: torch.Tensor, y: torch.Tensor) -> Work:
        y.copy_(x)
        return Work((), (x, y))

    def copy_out(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> CopyOut:
        for x, y in pairs:
            y.copy_(x)
        return Copied()

    def register(self, x: torch.Tensor) -> None: ...

    def release(self) -> None: ...

    def pin(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def read(self, x: torch.Tensor) -> Callable[[], list[float]]:
        numbers = x.tolist()
        return lambda: numbers

    def settle(self) -> None: ...

    def peak(self, work: Callable[[], _T], resident: Callable[[], Iterable[torch.Tensor]]) -> tuple[_T, int]:
        """torch's CPU allocator has no counters, so tensors are counted through torch's dispatcher."""
        with Storages() as storages:
            made = work()
        return made, bytes_of(resident()) + storages.peak

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        raise Bug("CAPTURE", "a CPU has no graphs")


@dataclass(slots=True)
class Cuda:
    """A GPU. Each direction of copies has a stream, because GPUs have a copy engine for each."""

    at: torch.device
    streams: dict[str, torch.cuda.Stream] = field(default_factory=dict[str, torch.cuda.Stream])
    pinned: ClassVar[bool] = True
    behind: ClassVar[bool] = True
    at_once: ClassVar[int] = 2**22
    backend: ClassVar[str] = "cpu:gloo,cuda:nccl"
    host: ClassVar[torch.device] = torch.device("cpu")

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.at)

    @property
    def uuid(self) -> str | None:
        return str(torch.cuda.get_device_properties(self.at).uuid)

    def share(self, ranks: int) -> None: ...

    def saving_threads(self, ranks: int) -> int:
        return max(1, min(_SAVING_THREADS, threads_of(ranks) // 2))

    def comm(self, rank: int, journal: Journal | None = None, limit: float = 600.0) -> Comm:
        if journal is not None:
            # Without a context of its own, a thread's first call would open one on the host's first GPU.
            journal.marks = Marks(_recorded, lambda: torch.cuda.set_device(self.at))
        return Nccl(rank, ProcessGroups("nccl", timedelta(seconds=limit)), journal or Journal())

    @property
    def reads_peers(self) -> bool:
        """A process must see all GPUs that it reads, and have access to them."""
        count = torch.cuda.device_count()
        return count > 1 and all(torch.cuda.can_device_access_peer(i, j) for i, j in permutations(range(count), 2))

    @property
    def peer_memory(self) -> PeerMemory:
        return GpuPeers(self.at)

    def side_stream(self) -> AbstractContextManager[None]:
        return torch.cuda.stream(self._after_compute("waits"))

    def copy(self, x: torch.Tensor, y: torch.Tensor) -> Work:
        stream = self._after_compute(f"to {y.device.type}")
        with torch.cuda.stream(stream):
            y.copy_(x, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        return Work((CopyEvent(event),), (x, y))

    def copy_out(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> CopyOut:
        stream = self._after_compute("snapshot")
        with torch.cuda.stream(stream):
            for x, y in pairs:
                y.copy_(x, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        return CopyEvent(event)

    def register(self, x: torch.Tensor) -> None:
        found: Any = torch.cuda.cudart()
        error = found.cudaHostRegister(x.data_ptr(), x.nbytes, 0)
        if int(error):
            raise OutOfMemory("MEMORY", "host memory cannot be page-locked", found=f"CUDA error {int(error)}",
                              allowed=show_bytes(x.nbytes),
                              fix="a larger ulimit -l, or --checkpoint.asynchronous false")  # fmt: skip

    def release(self) -> None:
        torch.cuda.empty_cache()

    def _after_compute(self, name: str) -> torch.cuda.Stream:
        if name not in self.streams:
            self.streams[name] = torch.cuda.Stream(self.at)
        self.streams[name].wait_stream(torch.cuda.current_stream())
        return self.streams[name]

    def pin(self, x: torch.Tensor) -> torch.Tensor:
        return x.pin_memory()

    def read(self, x: torch.Tensor) -> Callable[[], list[float]]:
        there = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        there.copy_(x, non_blocking=True)
        event = torch.cuda.Event()
        event.record()

        def numbers() -> list[float]:
            event.synchronize()
            return there.tolist()

        return numbers

    def settle(self) -> None:
        torch.cuda.current_stream().synchronize()

    def peak(self, work: Callable[[], _T], resident: Callable[[], Iterable[torch.Tensor]]) -> tuple[_T, int]:
        torch.cuda.reset_peak_memory_stats()
        return work(), torch.cuda.max_memory_allocated()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay


def _recorded(earlier: torch.cuda.Event | None) -> torch.cuda.Event:
    """An event in the current stream, after everything that was asked for so far."""
    event = earlier or torch.cuda.Event()
    event.record()
    return event


class DeviceWitness(Protocol):
    """Observes a fake device: `on_copy` is called with the destination of a copy and returns the handle to wait for;
    `side_stream` is entered in place of the device's."""

    def on_copy(self, y: torch.Tensor) -> Waitable: ...

    def side_stream(self) -> AbstractContextManager[None]: ...


@dataclass(slots=True)
class FakeDevice(Cpu):
    """The host in place of a GPU: operations that a GPU would overlap with compute are reported to a witness."""

    witness: DeviceWitness

    def side_stream(self) -> AbstractContextManager[None]:
        return self.witness.side_stream()

    def copy(self, x: torch.Tensor, y: torch.Tensor) -> Work:
        y.copy_(x)
        return Work((self.witness.on_copy(y),), (x, y))


@dataclass(slots=True)
class Meta(Cpu):
    """No device at all: tensors have a shape, a dtype and a size, but no numbers. Its host has none either, and zeros
    are read. What allocates and calls is the same code as on a GPU (`penteract rehearse`)."""

    host: ClassVar[torch.device] = torch.device("meta")

    @property
    def name(self) -> str:
        return "meta"

    def share(self, ranks: int) -> None: ...

    def comm(self, rank: int, journal: Journal | None = None, limit: float = 600.0) -> Comm:
        raise Bug("DEVICE", "a device without numbers has no peers")

    def read(self, x: torch.Tensor) -> Callable[[], list[float]]:
        zeros = [0.0] * len(x)
        return lambda: zeros


def device_of(at: torch.device) -> Device:
    """The Device for tensors at `at`. Only the choice of kernels depends on the device type elsewhere:
    `kernels/registry.py` selects them, and `kernels/checks.py` refuses layouts whose kernels the device lacks."""
    if at.type == "meta":
        return Meta()
    return Cuda(at) if at.type == "cuda" else Cpu()


def pick_device(wanted: str, local: int) -> torch.device:
    """The device that `precision.device` selects for local rank `local`; it becomes the current device."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise BadInput("DEVICE", "torch sees no GPU", where="precision.device", found=wanted,
                       allowed="cpu, auto", fix="--precision.device cpu")  # fmt: skip
    if local >= torch.cuda.device_count():
        raise BadInput("DEVICE", "more ranks than GPUs on this host", where="precision.device",
                       found=f"local rank {local}", allowed=f"0 to {torch.cuda.device_count() - 1}",
                       fix="fewer ranks on this host, or --precision.device cpu")  # fmt: skip
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def picked(at: torch.device) -> str:
    """The value of `precision.device` that selects this device again."""
    return at.type
