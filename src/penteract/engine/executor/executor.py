"""The reading that runs a program: registers are tensors, ops are kernels, gradient buckets are reduced during
backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from penteract.engine.comm.comm import Comm, Work, all_reduce_max
from penteract.engine.comm.wire_dtype import narrowed, widened
from penteract.engine.device.device import Device, device_of
from penteract.engine.dtypes import dtype_of
from penteract.engine.executor.allocator import Allocator, Arena
from penteract.engine.executor.counted_rows import CountedRows
from penteract.engine.executor.feed import MicroBatch
from penteract.engine.executor.registers import Registers, call_of_rows, kernel_call, weight_gradient_call
from penteract.engine.executor.state_check import StateCheck
from penteract.engine.executor.totals import Totals
from penteract.engine.kernels.kernel import Env, TorchKernel, in_turn
from penteract.engine.optim.gradient_norm import SumOfSquares, one_pass_squares, squares
from penteract.engine.optim.optimizer import AdamW, Factors
from penteract.engine.optim.step_end import StepEnd, one_kernel_end
from penteract.engine.optim.streamed import StreamedState
from penteract.engine.state.state import TrainingState
from penteract.ops.offload import OFFLOAD_OPS
from penteract.ops.tape import Call
from penteract.schedule.actions import Compute, Overlapped, P2PBatch, Transfer
from penteract.step.all_reduces import Name, StepAllReduce
from penteract.step.arena import plan_arena
from penteract.step.program import BufferKey, Program


@dataclass(slots=True)
class Executor:
    """One rank's executor. A step is `walk(program, run)` once its micro-batches are in place."""

    p: Program
    state: TrainingState
    comm: Comm
    kernels: Mapping[str, TorchKernel]
    memory: Allocator
    optimizer: AdamW | None = None
    on_action: Callable[[str], None] | None = None
    before_update: Callable[[int], None] | None = None  # of a bucket: its state is still being copied
    fake: Device | None = None  # used in place of the memory's device
    shared_with: Executor | None = None  # whose steps this one walks now and then: it has its numbers and its gathers
    device: Device = field(init=False)
    env: Env = field(init=False)
    micro_batches: Sequence[MicroBatch] = field(default_factory=list[MicroBatch])
    counts: torch.Tensor = field(init=False)  # targets of the step, for each loss term that is a mean over them
    registers: Registers = field(init=False)
    works: dict[tuple[BufferKey, int], Work | None] = field(default_factory=dict[tuple[BufferKey, int], Work | None])
    sends: list[Work] = field(default_factory=list[Work])  # to other stages, not yet waited for
    reducing: dict[int, Work | None] = field(default_factory=dict[int, "Work | None"])
    gathering: dict[int, Work] = field(default_factory=dict[int, Work])
    added: set[int] = field(default_factory=set[int])  # buckets whose shard already has gradients of this step
    written: set[str] = field(default_factory=set[str])  # parameters whose gradient buffer has been written
    totals: torch.Tensor = field(init=False)  # squared gradient norm, the loss terms, ranks that were asked to stop
    summed: Totals = field(init=False)  # the whole vector that is all-reduced: `totals`, and the next step's targets
    stop: torch.Tensor = field(init=False)  # nonzero: this rank was asked to stop
    step_all_reduces: dict[Name, torch.Tensor] = field(init=False)  # tensors that ranks all-reduce in place
    host: Arena | None = None  # for offloaded activations
    common: Factors | None = None  # of this step's updates, the same for all buckets
    streamed: StreamedState | None = None  # moves optimizer state to the device and back, where it is on the host
    squares: SumOfSquares | None = None  # of gradients, in one pass
    latch: torch.Tensor = field(init=False)  # 0; NaN after a step that was not finite or that ends the run
    check: StateCheck = field(init=False)
    done: torch.Tensor = field(init=False)  # [], fp64: the last step whose update is in the state
    step_end: StepEnd | None = field(default=None, init=False)  # what `factors` does, in one kernel
    counted: CountedRows = field(init=False)

    def __post_init__(self) -> None:
        device, stat = self.memory.device, dtype_of("stat", self.p.precision)
        self.device, self.registers = self.fake or device_of(device), Registers(self.p)
        if self.squares is None:
            self.squares = one_pass_squares(self.p)
        self.env = Env(self.p.mesh, self.p.rank, stat, biases=self.state.biases,
        tokens_per_expert=self.state.tokens_per_expert, clear_rows=frozenset(self.state.clear_rows),
                       all_reduce_max=partial(all_reduce_max, self.comm, self.p), zeros=self.state.zeros)  # fmt: skip
        if self.state.scaling is not None:
            self.env.loss_scale = self.state.scaling.used
        if (history := self.state.history) is not None:
            self.env.past_amax, self.env.amax = history.by_name(history.past_amax), history.by_name(history.amax)
        if self.state.quantised_weights is not None:
            self.env.scales.update(self.state.quantised_weights.scales)
        if self.state.largest_weights is not None:
            self.env.largest_weights.update(self.state.largest_weights.values)
        self._set_numbers(device, stat)
        self.counted = CountedRows.of(self.p, device)
        self.env.overflow = torch.zeros((), dtype=stat, device=device) if self.p.layout.sends_blocks else None
        self.step_all_reduces = {"target tokens": self.counts, "routed counts": self.state.routed}
        self.step_all_reduces["gradient norm and losses"] = self.summed.vector
        if history is not None:
            self.step_all_reduces["largest values"] = history.amax
        if self.state.quantised_weights is not None:
            self.step_all_reduces["scales of weights"] = self.state.quantised_weights.table
        if self.state.staging:
            self.streamed = StreamedState(self.state.flats[::-1], self.state.staging, self.device, self.comm)
        if any(c.copies for c in self.p.chunks):
            plan = plan_arena(self.p, host=True)
            room = self.shared_with.host.block if self.shared_with and self.shared_with.host else None
            self.host = Arena(plan, self.p.precision, self.device.host, room, pinned=self.device.pinned)
        if self.optimizer is not None and one_kernel_end(self.p, self.optimizer):
            largest = None if self.state.largest_weights is None else self.state.largest_weights.table
            numbers = (self.summed.vector, self.latch, self.done, self.counts, largest)
            self.step_end = StepEnd(self.p, self.optimizer, *numbers)
        for i, name in enumerate(self.p.losses):
            self.env.scale[name] = torch.ones((), dtype=stat, device=device)
            self.env.losses[name] = self.totals[1 + i]

    def _set_numbers(self, device: torch.device, stat: torch.dtype) -> None:
        """The numbers of a step and of the run."""
        if (of := self.shared_with) is not None:
            self.summed, self.totals, self.counts, self.stop = of.summed, of.totals, of.counts, of.stop
            self.latch, self.done, self.check, self.gathering = of.latch, of.done, of.check, of.gathering
            return
        self.summed = Totals(self.p, device)
        self.totals = self.summed.numbers
        self.stop, self.latch = (torch.zeros((), dtype=stat, device=device) for _ in range(2))
        self.check = StateCheck(self.p, self.state, self.comm)
        self.done = torch.zeros((), dtype=torch.float64, device=device)
        self.counts = torch.zeros(len(self.p.means), dtype=torch.int64, device=device)

    # ---- the walk --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self.registers.begin(self.memory, self.host, self.micro_batches)
        self.env.zeros.begin()
        if self.env.overflow is not None:
            self.env.overflow.zero_()
        self.summed.begin(self.stop)
        if self.optimizer is not None:
            self._note_damage(self.optimizer.nonfinite)
        if self.state.scaling is not None:
            self.state.scaling.begin()
        if self.state.history is not None:
            self.state.history.begin()
        if self.state.quantised_weights is not None:
            self.state.quantised_weights.begin()
        if self.state.largest_weights is not None:
            self.state.largest_weights.begin()
        self.written.clear()
        self.added.clear()
        self.state.routed.zero_()

    def all_reduce(self, reduction: StepAllReduce) -> None:
        x = self.step_all_reduces[reduction.name]
        if reduction.name == "gradient norm and losses":
            self.registers.complete()
            if self.squares is not None:
                self.squares.total(self.totals[0])
            self.summed.add_next_targets()
            self._note_damage(self.check.compare())
            if self.env.overflow is not None:
                self.totals[0].add_(self.env.overflow)
        ranks, largest = self._ranks(reduction.axis), reduction.kind == "max"
        self.comm.finish(self.comm.largest(ranks, x) if largest else self.comm.sum(ranks, x))

    def scales(self) -> None:
        """Compute FP8 scales of weights, and the scales of loss terms. These divide by the targets of the step's whole
        batch, which are known before the first forward."""
        if self.state.quantised_weights is not None:
            self.state.quantised_weights.scale()
        means = 1 / self.counts.clamp(min=1).to(self.totals.dtype)
        self.env.scale["cross_entropy"].copy_(means[0])
        if "mtp" in self.env.scale:
            self.env.scale["mtp"].copy_(self.p.model.mtp_loss_coefficient * means[1])
        if "balance" in self.env.scale and self.p.model.moe is not None:
            self.env.scale["balance"].fill_(self.p.model.moe.balance_coefficient / self.p.layout.global_batch_size)

    def call(self, buffer: BufferKey, call: Call) -> None:
        bound = self.registers.bound.get((buffer, call))
        if bound is not None:
            bound()
        elif call.phase == "start":
            self._start(buffer, call)
        elif call.phase == "finish":
            self.comm.finish(self.works.pop((buffer, call.ins[-1])))
        else:
            self._compute(buffer, call)

    def _compute(self, buffer: BufferKey, call: Call) -> None:
        """Run a kernel, and bind the call for later steps."""
        kernel, site = self.kernels[call.site.op_name], call.site
        ins, outs = self.registers.read(buffer, call.ins), self.registers.make(buffer, call.outs)
        weights = [self.state.parameters[n] for n in site.params]
        if call.phase == "weight_gradient":
            run = weight_gradient_call(kernel, self.env, call, ins, self.state.gradients, self.written)
        elif call.rows == "all":
            run = kernel_call(kernel, self.env, call, ins, weights, outs)
        else:
            run = call_of_rows(kernel, self.env, call, ins, weights, outs)
        if site.op_name == "expert_offsets" and self.p.layout.pads_rows:
            run = in_turn(run, partial(self.counted.places[site.layer, buffer[1]].copy_, outs[0][-1]))
        run()
        if site.op_name == "split_sizes" and self.p.layout.ep > 1:
            self.registers.received[site.layer, buffer[1]] = sum(outs[0].received)
        for r, y in zip(call.outs, outs, strict=True):
            self.registers[buffer, r] = y
        self.registers.bind(buffer, call, outs, run)

    def free(self, buffer: BufferKey, registers: tuple[int, ...]) -> None:
        if registers and (self.registers.values or not self.registers.reuses_fixed):
            self.registers.free(buffer, registers)

    def post_p2p(self, transfers: tuple[tuple[Transfer, BufferKey, int], ...]) -> None:
        ranks, own = self._ranks("pp"), dict[tuple[str, int], torch.Tensor]()
        for t, buffer, r in transfers:
            peer = self.p.mesh.neighbour(self.p.rank, t.peer)
            if peer == self.p.rank and t.kind == "Send":
                own[t.what, t.micro] = self.registers[buffer, r]
            elif peer == self.p.rank:
                (self.registers[buffer, r],) = self.registers.make(buffer, (r,))
                self.registers[buffer, r].copy_(own[t.what, t.micro])
                self.works[buffer, r] = None
            elif t.kind == "Send":
                self.sends.append(self.comm.send(self.registers[buffer, r], peer, ranks, t.what))
            else:
                (self.registers[buffer, r],) = self.registers.make(buffer, (r,))
                self.works[buffer, r] = self.comm.receive(self.registers[buffer, r], peer, ranks, t.what)

    def wait_recv(self, buffer: BufferKey, register: int) -> None:
        self.comm.finish(self.works.pop((buffer, register)))

    def wait_sends(self) -> None:
        for work in self.sends:
            self.comm.finish(work)
        self.sends.clear()

    def acquire_gradient_buffer(self, bucket: int) -> None:
        """The buffer holds gradients of another bucket: the next weight gradients overwrite it; padding is cleared."""
        flat = self.state.flats[bucket]
        self.written.difference_update(q.name for q in flat.bucket.params)
        last = flat.bucket.offsets[-1] + flat.bucket.params[-1].numel(self.p.mesh)
        if last < flat.bucket.size:
            flat.gradient[last:].zero_()

    def reduce(self, bucket: int) -> None:
        flat = self.state.flats[bucket]
        if not flat.bucket.summed:
            return
        wire = narrowed(flat.gradient, self.wire)
        if flat.bucket.shards > 1:  # in place: the rest of the buffer is not used afterwards
            own = wire[flat.shard.start : flat.shard.stop]
            self.reducing[bucket] = self.comm.start("reduce_scatter", flat.bucket.shard_ranks, wire, own, {})
        else:
            self.reducing[bucket] = self.comm.sum(flat.bucket.replicate_ranks, wire)

    def wait_reduce_scatter(self, bucket: int) -> None:
        flat = self.state.flats[bucket]
        self.comm.finish(self.reducing.pop(bucket))
        reduced = flat.reduced_shard(self.wire)
        if bucket in self.added:
            flat.own_gradient.add_(reduced)
        else:
            flat.own_gradient.copy_(reduced)
        self.added.add(bucket)

    def replicate(self, bucket: int) -> None:
        flat = self.state.flats[bucket]
        # The all-reduce waits for the reduce-scatter over the shard group; compute must not wait with it.
        with self.device.side_stream():
            self.comm.finish(self.reducing.pop(bucket, None))
            cut = flat.bucket.cut_gradients
            wire = narrowed(flat.own_gradient, self.wire) if cut else flat.reduced_shard(self.wire)
            self.reducing[bucket] = self.comm.sum(flat.bucket.replicate_ranks, wire)

    def after(self, action: Compute | Overlapped | P2PBatch) -> None:
        if self.on_action is not None:
            self.on_action(str(action))

    def widen(self, bucket: int) -> None:
        flat = self.state.flats[bucket]
        self.comm.finish(self.reducing.pop(bucket, None))
        if flat.cut_gradient is None:
            widened(flat.gradient, self.wire, flat.shard)
        else:
            widened(flat.cut_gradient, self.wire, range(len(flat.shard)))

    def measure(self, bucket: int) -> None:
        flat = self.state.flats[bucket]
        if self.squares is None:
            self.totals[0].add_(squares(flat.own_gradient, self.totals.dtype))
        else:
            self.squares.add(flat.own_gradient, flat.clear_rows)

    def factors(self) -> None:
        if self.step_end is not None:
            self.step_end.run[self.summed.next_targets is not None]()
            self.common = self.step_end.factors
            if self.state.history is not None:
                self.state.history.end(self.totals[0])
            return
        # A loss that is not finite skips the update, too.
        self.totals[0].add_(self.totals[1:-1].mul(0).sum()).add_(self.latch)
        hindered = self.totals[0]
        if self.state.scaling is not None:
            self.state.scaling.unscale(self.totals[0])
            hindered = self.state.scaling.hold(self.latch + self.totals[-1] * 0, self.totals[0])
        if self.state.history is not None:
            self.state.history.end(self.totals[0])
        if self.optimizer is not None:
            self.common = self.optimizer.factors(self.totals[0])
            if self.state.largest_weights is not None:
                self.state.largest_weights.begin_update(self.common.good)
            # A step that loss scaling skips is done, one that was hindered is not.
            self.done.copy_(self.optimizer.step.where(hindered.isfinite(), self.done))
        self._latch(hindered)
        self.summed.read_next_targets(self.counts)

    def _note_damage(self, found: torch.Tensor) -> None:
        """Tell all ranks of damaged state: `found` is NaN. Under loss scaling the norm may overflow: `stop` is, too."""
        self.totals[0].add_(found)
        if self.state.scaling is not None:
            self.totals[-1].add_(found)

    def _latch(self, hindered: torch.Tensor) -> None:
        """After a step that was not finite, or the last before a stop, no later step changes anything: the host reads a
        step's outcome when the next is under way, and saves the state that this one left."""
        self.latch.add_(hindered * 0)
        self.latch.masked_fill_(self.totals[-1] > 0, torch.nan)

    def update(self, bucket: int) -> None:
        if self.optimizer is None:
            return
        assert self.common is not None, "an update before the step's factors"
        if self.before_update is not None:
            self.before_update(bucket)
        flat = self.state.flats[bucket]
        for part in (flat,) if self.streamed is None else self.streamed.slices(flat):
            self.optimizer.update(part, self.common)
        if self.state.largest_weights is not None:
            self.state.largest_weights.end_update(bucket, by_kernel=self.optimizer.kernel is not None)

    def gather(self, bucket: int) -> None:
        flat, own = self.state.flats[bucket], self.state.flats[bucket].own_parameter
        if flat.bucket.gathered_as == "fp8" and self.state.quantised_weights is not None:
            own = self.state.quantised_weights.quantise_shard(flat.bucket, flat.shard, flat.parameter)
        self.gathering[bucket] = self.comm.start("all_gather", flat.bucket.shard_ranks, own, flat.parameter, {})

    def wait_all_gather(self, bucket: int) -> None:
        self.comm.finish(self.gathering.pop(bucket, None))

    def settle_parameters(self) -> None:
        """Wait for all parameter all-gathers. Called before anything but a step reads parameters."""
        for work in self.gathering.values():
            self.comm.finish(work)
        self.gathering.clear()

    def end(self) -> None:
        if self.streamed is not None:
            self.streamed.settle()
        if self.optimizer is not None:
            self.optimizer.end(self.p, self.state, self.totals[0])

    @property
    def wire(self) -> torch.dtype:
        """The dtype in which gradients are reduced."""
        return dtype_of("reduce", self.p.precision)

    # ---- registers -------------------------------------------------------------------------------------------

    def _ranks(self, axis: str) -> tuple[int, ...]:
        return self.p.mesh.group(axis, self.p.rank)

    @property
    def received(self) -> dict[tuple[int, int], int]:
        """[(layer, micro)]: the rows that this rank's experts got. Where registers are padded this waits for the
        device."""
        return self.received_later()()

    def received_later(self) -> Callable[[], dict[tuple[int, int], int]]:
        """The same of the step that was asked for last, to be read later: only then anybody waits."""
        if self.p.layout.pads_rows:
            return self.counted.noted().read
        found = dict(self.registers.received)
        return lambda: found

    def _start(self, buffer: BufferKey, call: Call) -> None:
        site = call.site
        x, *others = self.registers.read(buffer, call.ins)
        if site.op_name in OFFLOAD_OPS:
            (y,) = self.registers.make(buffer, call.outs)
            self.registers[buffer, call.outs[0]], self.works[buffer, call.outs[0]] = y, self.device.copy(x, y)
            return
        ranks = self._ranks(str(site.attrs["axis"]))
        (y,) = self.registers.make(buffer, call.outs)
        if site.op_name == "all_to_all_v":
            splits = others[0]
            send, receive = splits.sent, splits.received
            if site.attrs["direction"] == "combine":
                send, receive = receive, send
            work = self.comm.start_uneven(ranks, x, y, send, receive)
        else:
            work = self.comm.start(site.op_name, ranks, x, y, site.attrs)
        self.registers[buffer, call.outs[0]] = y
        self.works[buffer, call.outs[0]] = work
