"""Observers of a running step: none of them knows a rule of the price.

Wires    the tensors handed to torch.distributed
Watched  every storage that torch's dispatcher hands out and that is still alive, and the FLOPs of every operator
         by torch's own formulas
dropped_at_once  buffers of a collective die with its wait
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils.flop_counter import flop_registry

from penteract.engine.comm import compat
from penteract.engine.comm.comm import Work
from penteract.engine.comm.distributed import Distributed
from penteract.engine.device.storages import Storages

TURNS = 50  # of at least 0.2 ms, which a thread has fewer of on busy cores


@cache
def _flops_of(func: Any) -> Any:
    """torch's formula for the FLOPs of an operator; None where it counts none."""
    return flop_registry.get(func.overloadpacket)


class Watched(Storages):
    """Storages and FLOPs under one mode: a tiny step is mostly its observers."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if (formula := _flops_of(func)) is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        return out


class Wires:
    """Bytes handed to torch.distributed, by call and ranks of the group."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.bytes: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def _add(self, kind: str, group: Any, t: torch.Tensor) -> None:
        self.bytes[kind, tuple(dist.get_process_group_ranks(group))] += t.numel() * t.element_size()

    @contextmanager
    def watch(self):
        names = ("all_reduce", "all_to_all_single", "batch_isend_irecv", "isend", "irecv", "P2POp")
        real = {n: getattr(dist, n) for n in names}
        gather, scatter = compat.all_gather, compat.reduce_scatter

        def all_gather(out: Any, x: Any, group: Any) -> Any:
            self._add("all_gather", group, out)
            return gather(out, x, group)

        def reduce_scatter(out: Any, x: Any, group: Any) -> Any:
            self._add("reduce_scatter", group, x)
            return scatter(out, x, group)

        def all_reduce(t: Any, *a: Any, group: Any = None, **k: Any) -> Any:
            self._add("all_reduce", group, t)
            return real["all_reduce"](t, *a, group=group, **k)

        def all_to_all_single(out: Any, x: Any, *a: Any, group: Any = None, **k: Any) -> Any:
            self._add("all_to_all_v" if a else "all_to_all", group, x)
            return real["all_to_all_single"](out, x, *a, group=group, **k)

        def message(kind: str, t: torch.Tensor, peer: int) -> None:
            self.bytes[kind, (self.rank, peer)] += t.numel() * t.element_size()

        def isend(t: Any, peer: int, **k: Any) -> Any:
            message("send", t, peer)
            return real["isend"](t, peer, **k)

        def irecv(t: Any, peer: int, **k: Any) -> Any:
            message("recv", t, peer)
            return real["irecv"](t, peer, **k)

        def of_a_batch(op: Any, *a: Any) -> Any:
            return real["P2POp"](real[op.__name__], *a)

        def batch_isend_irecv(ops: Any) -> Any:
            for op in ops:
                message("send" if op.op is real["isend"] else "recv", op.tensor, op.peer)
            return real["batch_isend_irecv"](ops)

        with ExitStack() as stack:
            watching = (all_reduce, all_to_all_single, batch_isend_irecv, isend, irecv, of_a_batch)
            for name, f in zip(names, watching, strict=True):
                stack.enter_context(patch.object(dist, name, f))
            stack.enter_context(patch.object(compat, "all_gather", all_gather))
            stack.enter_context(patch.object(compat, "reduce_scatter", reduce_scatter))
            yield self


@contextmanager
def dropped_at_once() -> Iterator[None]:
    """A transport's threads drop their reference to a buffer a moment after its wait is over, which counts as memory
    that nobody asked for. Here `finish` returns once they have, or after so many turns: some are held elsewhere too."""
    real = Distributed.finish

    def finish(self: Distributed, work: Work | None) -> None:
        real(self, work)
        if work is not None:
            work.waits = ()  # torch's handle holds the buffers as well
            for _ in range(TURNS):
                if all(x._use_count() <= 1 for x in work.pinned):
                    break
                time.sleep(0.0002)

    with patch.object(Distributed, "finish", finish):
        yield
