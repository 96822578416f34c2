"""Memory of GPUs that reach each other: torch's symmetric memory, without multicast."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from penteract.engine.comm.comm import PeerBlocks, Ranks
from penteract.engine.comm.direct.stream_signals import StreamSignals


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """What a stream has been asked for so far."""

    event: torch.cuda.Event

    def wait(self) -> None:
        """The current stream waits for it."""
        torch.cuda.current_stream().wait_event(self.event)


@dataclass(slots=True)
class GpuPeers:
    """Blocks that the GPUs of one host map. Each group has a stream, as its collectives come one after the other."""

    device: torch.device
    streams: dict[Ranks, torch.cuda.Stream] = field(default_factory=dict[Ranks, torch.cuda.Stream])
    pool: Any = field(default=None, init=False)  # kept as long as its blocks are in use

    def block(self, size: int) -> torch.Tensor:
        """From a pool of torch's allocator, which so counts it."""
        import torch.distributed._symmetric_memory as symmetric

        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # which some GPUs refuse, and nothing here needs
        self.pool = self.pool or symmetric.get_mem_pool(self.device)
        with torch.cuda.use_mem_pool(self.pool):
            return torch.empty(max(1, size), dtype=torch.uint8, device=self.device)[:size]

    def open(self, block: torch.Tensor, ranks: Ranks, group: Any, number: int) -> PeerBlocks:
        """Ranks meet by numbers that streams write into each other's memory."""
        import torch.distributed._symmetric_memory as symmetric

        handle: Any = symmetric.rendezvous(block, group.group_name)
        blocks = [handle.get_buffer(i, (block.numel(),), torch.uint8) for i in range(len(ranks))]
        self.streams.setdefault(ranks, torch.cuda.Stream(self.device, priority=-1))

        def start_work(work: Callable[[], None]) -> StreamEvent:
            stream = self.streams[ranks]  # so what does work keeps this memory
            stream.wait_stream(torch.cuda.current_stream())
            event = torch.cuda.Event()
            with torch.cuda.stream(stream):
                work()
                event.record(stream)
            return StreamEvent(event)

        signals = StreamSignals(handle.signal_pad_ptrs, handle.rank, number)
        return PeerBlocks(blocks, handle.rank, signals.meet, start_work)

    def settle(self) -> None:
        """No rank meets others before all have cleared their numbers."""
        torch.cuda.synchronize()
        dist.all_reduce(torch.zeros(1))  # on the host
