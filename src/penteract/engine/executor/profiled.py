"""A run with named parts for profilers. The names are those of `penteract plan --trace`.

`penteract profile` creates it: `walk(program, ProfiledExecutor(run))` under torch's profiler, or with NVTX on, shows
the step by the names of its program.
"""

from __future__ import annotations

from typing import Any

from torch.profiler import record_function

from penteract.engine.executor.executor import Executor
from penteract.ops.tape import Call
from penteract.schedule.actions import Transfer
from penteract.step import names
from penteract.step.all_reduces import StepAllReduce
from penteract.step.program import BufferKey


class ProfiledExecutor:
    """Wraps each event of an Executor in `torch.profiler.record_function`, under the names of `plan --trace`. Events
    not listed here do no device work and are forwarded."""

    def __init__(self, run: Executor) -> None:
        self.run = run

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self.run, attribute)

    def begin(self) -> None:
        with record_function(names.BEGIN):
            self.run.begin()

    def scales(self) -> None:
        with record_function(names.SCALES):
            self.run.scales()

    def call(self, buffer: BufferKey, call: Call) -> None:
        with record_function(names.of_call(call.phase, call.site)):
            self.run.call(buffer, call)

    def all_reduce(self, reduction: StepAllReduce) -> None:
        with record_function(names.of_all_reduce(reduction)):
            self.run.all_reduce(reduction)

    def post_p2p(self, transfers: tuple[tuple[Transfer, BufferKey, int], ...]) -> None:
        with record_function(names.of_transfers(t for t, _, _ in transfers)):
            self.run.post_p2p(transfers)

    def wait_recv(self, buffer: BufferKey, register: int) -> None:
        with record_function(names.WAIT_STAGE):
            self.run.wait_recv(buffer, register)

    def wait_sends(self) -> None:
        with record_function(names.WAIT_SENT):
            self.run.wait_sends()

    def wait_all_gather(self, bucket: int) -> None:
        with record_function(names.WAIT_PARAMETERS):
            self.run.wait_all_gather(bucket)

    def gather(self, bucket: int) -> None:
        with record_function(names.GATHER):
            self.run.gather(bucket)

    def reduce(self, bucket: int) -> None:
        with record_function(names.of_sum(self.run.p.buckets[bucket])):
            self.run.reduce(bucket)

    def wait_reduce_scatter(self, bucket: int) -> None:
        with record_function(names.ADD):
            self.run.wait_reduce_scatter(bucket)

    def replicate(self, bucket: int) -> None:
        with record_function(names.REPLICATE):
            self.run.replicate(bucket)

    def widen(self, bucket: int) -> None:
        with record_function(names.WIDEN):
            self.run.widen(bucket)

    def measure(self, bucket: int) -> None:
        with record_function(names.MEASURE):
            self.run.measure(bucket)

    def factors(self) -> None:
        with record_function(names.FACTORS):
            self.run.factors()

    def update(self, bucket: int) -> None:
        with record_function(names.UPDATE):
            self.run.update(bucket)

    def end(self) -> None:
        with record_function(names.END):
            self.run.end()
