"""The engine's executor, watched: before and after each event of a walk what it uses is looked at.

It wraps it as `engine/executor/profiled.py` does: the run itself does everything.
"""

from __future__ import annotations

from typing import Any

import torch

from penteract.engine.executor.allocator import Arena
from penteract.engine.executor.executor import Executor
from penteract.measure.rehearse.checks.bucket_checks import BucketChecks
from penteract.measure.rehearse.checks.kernel_calls import TABLES
from penteract.measure.rehearse.checks.register_checks import RegisterChecks
from penteract.measure.rehearse.findings import Findings
from penteract.measure.rehearse.ledger import ROUTED, WORKSPACE, Ledger
from penteract.ops.tape import Call
from penteract.schedule.actions import Compute, Overlapped, P2PBatch, Transfer
from penteract.step import names
from penteract.step.all_reduces import StepAllReduce
from penteract.step.program import BufferKey


class CheckedRun:
    """A reading that passes each event to an executor, and notes in `findings` what is wrong with it."""

    def __init__(self, run: Executor, ledger: Ledger, findings: Findings) -> None:
        self.run, self.ledger, self.findings = run, ledger, findings
        self.buckets = BucketChecks(run.state.flats, findings)
        block = run.memory.block if isinstance(run.memory, Arena) else None
        self.registers = RegisterChecks(run.registers, block, findings)
        self.last = ""  # the call before
        self.action = "the opening"

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self.run, attribute)

    # ---- calls -----------------------------------------------------------------------------------------------------

    def call(self, buffer: BufferKey, call: Call) -> None:
        """One call: on live registers, of whole parameters, into a buffer that is there."""
        by = self.last = f"{names.of_call(call.phase, call.site)} of micro-batch {buffer[1]}"
        self.findings.at = by
        first = not self.run.registers.reuses_fixed
        if first:
            self.registers.read(buffer, call, by)
        if call.site.params and call.phase == "weight_gradient":
            self.buckets.write(call.site.params, by)
        elif call.site.params:
            self.buckets.read(call.site.params, by)
        with self.ledger.under(ROUTED):  # kernels have owners of their own
            self.run.call(buffer, call)
        if not first:
            return
        if call.phase == "start":
            self.registers.coming[buffer, call.outs[0]] = by
        elif call.phase == "finish":
            self.registers.coming.pop((buffer, call.ins[-1]), None)
        self.registers.wrote(buffer, call.outs, by)

    def free(self, buffer: BufferKey, registers: tuple[int, ...]) -> None:
        """Registers that are not read again."""
        if registers and not self.run.registers.reuses_fixed:
            self.registers.free(buffer, registers, self.last)
        self.run.free(buffer, registers)

    def post_p2p(self, transfers: tuple[tuple[Transfer, BufferKey, int], ...]) -> None:
        """Messages: what is sent is there."""
        self.findings.at = names.of_transfers(t for t, _, _ in transfers)
        if self.run.registers.reuses_fixed:
            return self.run.post_p2p(transfers)
        for t, buffer, r in transfers:
            if t.kind == "Send" and (buffer, r) not in self.run.registers.values:
                raise self.findings.stop("FREED", f"register {r} is sent after it was freed")
        self.run.post_p2p(transfers)
        for t, buffer, r in transfers:
            if t.kind == "Recv":
                self.registers.coming[buffer, r] = names.of_transfer(t)
                self.registers.wrote(buffer, (r,), names.of_transfer(t))
        return None

    def wait_recv(self, buffer: BufferKey, register: int) -> None:
        """A message has arrived."""
        self.registers.coming.pop((buffer, register), None)
        self.run.wait_recv(buffer, register)

    def after(self, action: Compute | Overlapped | P2PBatch) -> None:
        """A point of the timeline."""
        self.run.after(action)
        self.action = str(action)
        self.ledger.mark(self.action)

    # ---- buckets ---------------------------------------------------------------------------------------------------

    def _bucket(self, what: str, bucket: int) -> None:
        """One event of a bucket: what it allocates and frees is workspace."""
        self.findings.at = f"{what} {self.buckets.name(bucket)}"
        first = self.ledger.made
        with self.ledger.under(WORKSPACE):
            getattr(self.run, what)(bucket)
        if what == "update":
            self.ledger.relabel_new(first, TABLES)

    def wait_all_gather(self, bucket: int) -> None:
        """Its parameters are whole."""
        self._bucket("wait_all_gather", bucket)
        self.buckets.wait_all_gather(bucket)

    def acquire_gradient_buffer(self, bucket: int) -> None:
        """Its gradients have a buffer."""
        self._bucket("acquire_gradient_buffer", bucket)
        self.buckets.acquire(bucket)

    def reduce(self, bucket: int) -> None:
        """Its gradients are on the way."""
        self._bucket("reduce", bucket)
        self.buckets.reduce(bucket)

    def wait_reduce_scatter(self, bucket: int) -> None:
        """Its shard's gradients are summed."""
        self._bucket("wait_reduce_scatter", bucket)
        self.buckets.wait_reduce_scatter(bucket)

    def replicate(self, bucket: int) -> None:
        """Its replicas are on the way."""
        self._bucket("replicate", bucket)
        self.buckets.replicate(bucket)

    def widen(self, bucket: int) -> None:
        """Its last sum has arrived."""
        self._bucket("widen", bucket)
        self.buckets.widen(bucket)

    def measure(self, bucket: int) -> None:
        """Its part of the norm."""
        self.buckets.use(bucket, "the norm")
        self._bucket("measure", bucket)

    def update(self, bucket: int) -> None:
        """Its update."""
        self._bucket("update", bucket)
        self.buckets.update(bucket)

    def gather(self, bucket: int) -> None:
        """Its parameters are on the way."""
        self._bucket("gather", bucket)
        self.buckets.gather(bucket)

    # ---- the step --------------------------------------------------------------------------------------------------

    def all_reduce(self, reduction: StepAllReduce) -> None:
        """Numbers on which ranks agree."""
        self.findings.at = names.of_all_reduce(reduction)
        self.run.all_reduce(reduction)

    def factors(self) -> None:
        """What updates share."""
        self.findings.at = "the factors of the update"
        self.run.factors()

    def end(self) -> None:
        """The step's end: nothing is left."""
        self.run.end()
        self.ledger.mark("update")
        self.registers.end()


def host_tensors(run: Executor) -> list[torch.Tensor]:
    """What a run keeps on its host."""
    return [*run.state.on_host(), *([] if run.host is None else run.host.resident())]
