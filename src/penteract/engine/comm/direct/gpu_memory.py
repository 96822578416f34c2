"""Memory of GPUs that reach each other: torch's symmetric memory, without multicast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from penteract.engine.comm.comm import Exchange, Ranks
from penteract.engine.comm.direct.stream_signals import StreamSignals

LANES = 2
LEAST = 2**23  # bytes: below, a second lane costs the host more than it brings


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """What a stream has been asked for so far."""

    event: torch.cuda.Event

    def wait(self) -> None:
        """The current stream waits for it."""
        torch.cuda.current_stream().wait_event(self.event)


class Lanes:
    """Streams that copy at once: one copy engine does not fill a GPU's links."""

    def __init__(self, device: torch.device) -> None:
        """`LANES` streams."""
        self.streams = [torch.cuda.Stream(device, priority=-1) for _ in range(LANES)]

    def __call__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy each, in pieces of about equal size; the current stream waits for them."""
        if sum(here.nbytes for _, here in pairs) < LEAST:
            for there, here in pairs:
                there.copy_(here, non_blocking=True)
            return
        each = -(-len(self.streams) // len(pairs))
        pieces = [piece for there, here in pairs for piece in zip(there.chunk(each), here.chunk(each), strict=True)]
        current = torch.cuda.current_stream()
        for i, (there, here) in enumerate(pieces):
            stream = self.streams[i % len(self.streams)]
            if i < len(self.streams):
                stream.wait_stream(current)
            with torch.cuda.stream(stream):
                there.copy_(here, non_blocking=True)
        for stream in self.streams[: len(pieces)]:
            current.wait_stream(stream)


@dataclass(slots=True)
class GpuMemory:
    """Blocks that the GPUs of one host map. Each group has a stream, as its collectives come one after the other."""

    device: torch.device
    streams: dict[Ranks, torch.cuda.Stream] = field(default_factory=dict[Ranks, torch.cuda.Stream])
    pool: Any = field(default=None, init=False)  # kept as long as its blocks are in use

    def block(self, size: int) -> torch.Tensor:
        """From a pool of torch's allocator, which so counts it."""
        import torch.distributed._symmetric_memory as symmetric

        self.pool = self.pool or symmetric.get_mem_pool(self.device)
        with torch.cuda.use_mem_pool(self.pool):
            return torch.empty(max(1, size), dtype=torch.uint8, device=self.device)[:size]

    def open(self, block: torch.Tensor, ranks: Ranks, group: Any, number: int) -> Exchange:
        """Ranks meet by numbers that streams write into each other's memory."""
        import torch.distributed._symmetric_memory as symmetric

        handle: Any = symmetric.rendezvous(block, group.group_name)
        blocks = [handle.get_buffer(i, (block.numel(),), torch.uint8) for i in range(len(ranks))]
        self.streams.setdefault(ranks, torch.cuda.Stream(self.device, priority=-1))

        def beside(work: Callable[[], None]) -> StreamEvent:
            stream = self.streams[ranks]  # so what does work keeps this memory
            stream.wait_stream(torch.cuda.current_stream())
            event = torch.cuda.Event()
            with torch.cuda.stream(stream):
                work()
                event.record(stream)
            return StreamEvent(event)

        signals = StreamSignals(handle.signal_pad_ptrs, handle.rank, number)
        return Exchange(blocks, handle.rank, signals.meet, Lanes(self.device), beside)

    def settle(self) -> None:
        """Nothing was kept for it."""
