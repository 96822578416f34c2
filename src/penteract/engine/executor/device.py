"""What a rank computes on: its streams, copies and graphs, and the memory of the host that it reads.

A `torch.device` says where tensors lie; a `Device` does there what torch does differently on GPUs and on CPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, TypeVar

import torch

from penteract.engine.comm.comm import Comm, Waitable, Work
from penteract.engine.comm.distributed import Gloo, Nccl
from penteract.engine.executor.storages import Storages, bytes_of
from penteract.engine.runtime.cpu_affinity import threads_of
from penteract.errors import BadInput, Bug

_T = TypeVar("_T")


class Device(Protocol):
    """`pinned`: host memory is page-locked where it is copied from or to. `backend`: of torch.distributed.
    `behind`: it computes while the host goes on."""

    pinned: ClassVar[bool]
    behind: ClassVar[bool]
    backend: ClassVar[str]

    def share(self, ranks: int) -> None:
        """Take one rank's part of the host, of so many there."""
        ...

    def comm(self, rank: int) -> Comm:
        """Lines between ranks on such devices."""
        ...

    def aside(self) -> AbstractContextManager[None]:
        """Waits that are put on a stream of their own, after all that has been computed so far."""
        ...

    def copy(self, x: torch.Tensor, y: torch.Tensor) -> Work:
        """Begin to copy x to y, of the same shape and dtype, between the device and the host; both are pinned until it
        is waited for. It begins after all that is computed so far, so what it reads is there, and what it writes over
        has been read."""
        ...

    def staged(self, x: torch.Tensor) -> torch.Tensor:
        """x, on the host, as it can be copied to the device without the host waiting."""
        ...

    def read(self, x: torch.Tensor) -> Callable[[], list[float]]:
        """The numbers of x [n] as they are once all that was asked for so far is computed. Whoever calls waits."""
        ...

    def settle(self) -> None:
        """The host waits for all that has been computed."""
        ...

    def peak(self, work: Callable[[], _T], resident: Callable[[], Iterable[torch.Tensor]]) -> tuple[_T, int]:
        """What `work` gives, and the most bytes of tensors that lived at once meanwhile, `resident` ones too."""
        ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record what `work` asks of the device, without running it. -> replays it. Bug where there are no graphs."""
        ...


@dataclass(slots=True)
class Cpu:
    """The host's cores: what is started is done."""

    pinned: ClassVar[bool] = False
    behind: ClassVar[bool] = False
    backend: ClassVar[str] = "gloo"

    def share(self, ranks: int) -> None:
        torch.set_num_threads(threads_of(ranks))

    def comm(self, rank: int) -> Comm:
        return Gloo(rank)

    def aside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def copy(self, x: torch.Tensor, y: torch.Tensor) -> Work:
        y.copy_(x)
        return Work((), (x, y))

    def staged(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def read(self, x: torch.Tensor) -> Callable[[], list[float]]:
        numbers = x.tolist()
        return lambda: numbers

    def settle(self) -> None: ...

    def peak(self, work: Callable[[], _T], resident: Callable[[], Iterable[torch.Tensor]]) -> tuple[_T, int]:
        """No allocator counts here: torch's dispatcher does."""
        with Storages() as storages:
            made = work()
        return made, bytes_of(resident()) + storages.peak

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        raise Bug("CAPTURE", "a CPU has no graphs")


@dataclass(frozen=True, slots=True)
class Landing:
    """A copy under way. `wait` lets the stream that computes wait; the host does not."""

    event: torch.cuda.Event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


@dataclass(slots=True)
class Cuda:
    """A GPU. Copies have a stream a direction, as it has an engine for each."""

    at: torch.device
    streams: dict[str, torch.cuda.Stream] = field(default_factory=dict[str, torch.cuda.Stream])
    pinned: ClassVar[bool] = True
    behind: ClassVar[bool] = True
    backend: ClassVar[str] = "cpu:gloo,cuda:nccl"

    def share(self, ranks: int) -> None: ...

    def comm(self, rank: int) -> Comm:
        return Nccl(rank)

    def aside(self) -> AbstractContextManager[None]:
        return torch.cuda.stream(self._after_compute("waits"))

    def copy(self, x: torch.Tensor, y: torch.Tensor) -> Work:
        stream = self._after_compute(f"to {y.device.type}")
        with torch.cuda.stream(stream):
            y.copy_(x, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        return Work((Landing(event),), (x, y))

    def _after_compute(self, name: str) -> torch.cuda.Stream:
        if name not in self.streams:
            self.streams[name] = torch.cuda.Stream(self.at)
        self.streams[name].wait_stream(torch.cuda.current_stream())
        return self.streams[name]

    def staged(self, x: torch.Tensor) -> torch.Tensor:
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


class DeviceWitness(Protocol):
    """Of a fake device: `on_copy` is told where a copy goes, and hands out what is waited for; `aside` what waits."""

    def on_copy(self, y: torch.Tensor) -> Waitable: ...

    def aside(self) -> AbstractContextManager[None]: ...


@dataclass(slots=True)
class FakeDevice(Cpu):
    """The host in place of a GPU: what a GPU would do beside compute is told to a witness."""

    witness: DeviceWitness

    def aside(self) -> AbstractContextManager[None]:
        return self.witness.aside()

    def copy(self, x: torch.Tensor, y: torch.Tensor) -> Work:
        y.copy_(x)
        return Work((self.witness.on_copy(y),), (x, y))


def device_of(at: torch.device) -> Device:
    """That on which such tensors lie. What else hangs on a device's type is which kernels it has: `kernels/registry.py`
    finds them by it, and `kernels/checks.py` refuses what a layout asks for and it lacks."""
    return Cuda(at) if at.type == "cuda" else Cpu()


def pick_device(wanted: str, local: int) -> torch.device:
    """What `precision.device` means for the rank of this number on its host; it becomes the current device."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise BadInput("DEVICE", "there is no GPU that torch sees", where="precision.device", found=wanted,
                       allowed="cpu, auto", fix="--precision.device cpu")  # fmt: skip
    if local >= torch.cuda.device_count():
        raise BadInput("DEVICE", "more ranks than GPUs on this host", where="precision.device",
                       found=f"local rank {local}", allowed=f"0 to {torch.cuda.device_count() - 1}",
                       fix="fewer ranks on this host, or --precision.device cpu")  # fmt: skip
    torch.cuda.set_device(local)
    return torch.device("cuda", local)
