"""Why a rank's price is what it is: for each amount its formula, the numbers in it, and the line of code it comes from.

The same reading (`price.py`) prices the recorded program with sizes that carry their formula. Rows add up to the price.
A formula also holds at other sizes, as long as the program takes the same branches there. A degree of 1 is in no
formula: more ranks have collectives, so another program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.config.model import ModelSpec
from penteract.config.optimizers import PLAIN, OptimizerKinds
from penteract.config.precision.policy import Policy, grain, policy
from penteract.ops.declarations.quantised.fp8 import (
    ONE_SCALE,
    casts,
    fp8_state_bytes,
    has_delayed_scales,
    reads_quantised_weight,
)
from penteract.ops.expression import Expression
from penteract.ops.fuse import STANDS_FOR
from penteract.ops.lower import Chunk
from penteract.ops.spec import Spec
from penteract.ops.symbols import evaluate, expression_of, values
from penteract.ops.tape import Call, Site
from penteract.readings.explain.symbolic_program import SymbolicProgram, symbolic_program
from penteract.readings.explain.terms import KINDS, Term, TermKind, Why
from penteract.readings.layers.expert_load import Balanced, Load
from penteract.readings.price import Pricing, bucket_bytes, host_optimizer_bytes, input_bytes
from penteract.schedule.actions import Compute, Overlapped, P2PBatch, Transfer
from penteract.schedule.registry import ScheduleName
from penteract.step.all_reduces import StepAllReduce
from penteract.step.program import BufferKey, Program
from penteract.step.ring_buffer import gradient_ring_buffer, parameter_ring_buffer
from penteract.step.update import staging_buffers
from penteract.step.walk import Silent, walk, walk_forward
from penteract.units import Bytes

_ALL_REDUCES = "step/all_reduces.py"
_RING_BUFFER = "step/ring_buffer.py"
_MUON = "step/muon.py"
_UPDATE = "step/update.py"


class _Derived(NamedTuple):
    """A row without its formula. Equal ones with equal formulas are one row.

    line    the line of the model, or the file, that causes it; "" for parameters and their state
    ranks   the group of a collective; () for what is not sent
    flight  how many micro-batches hold it at the same time
    """

    kind: TermKind
    what: str
    detail: str
    line: str = ""
    ranks: tuple[int, ...] = ()
    flight: int = 1


def why(  # noqa: PLR0913 (what a program is made of)
    model: ModelSpec,
    layout: Layout,
    sequence_length: int,
    precision: str | Policy = "fp32",
    rank: int = 0,
    *,
    schedule: ScheduleName | None = None,
    optimizer_kinds: OptimizerKinds = PLAIN,
    imbalance: float = 1.0,
) -> Why:
    """What `rank` holds, computes and sends in a step, by line of code.

    `imbalance`: its experts get so many times the mean of rows.

    "kept": bytes alive after the last forward before the first backward; `Why.whole` adds the other activations.
    """
    small = symbolic_program(
        model, layout, sequence_length, policy(precision), rank=rank, schedule=schedule, optimizer_kinds=optimizer_kinds
    )
    load = Balanced.of(small.program.model, small.layout, small.program.sequence_length, imbalance, (model, layout.ep))
    rows = _Rows(small, load, values(model, layout, sequence_length))
    walk(small.once(), rows)
    rows.data()
    rows.padding()
    rows.updates()
    rows.ring_buffers()
    rows.staging_buffers()
    rows.kept()
    return Why(tuple(rows.terms()), rows.numbers)


@dataclass(slots=True)
class _Alive(Silent):
    """The registers alive after the last action."""

    now: set[tuple[BufferKey, int]] = field(default_factory=set[tuple[BufferKey, int]])
    at_last: frozenset[tuple[BufferKey, int]] = frozenset()

    def call(self, buffer: BufferKey, call: Call) -> None:
        self.now |= {(buffer, r) for r in call.outs}

    def free(self, buffer: BufferKey, registers: tuple[int, ...]) -> None:
        self.now -= {(buffer, r) for r in registers}

    def post_p2p(self, transfers: tuple[tuple[Transfer, BufferKey, int], ...]) -> None:
        self.now |= {(buffer, r) for t, buffer, r in transfers if t.kind == "Recv"}

    def after(self, action: Compute | Overlapped | P2PBatch) -> None:
        self.at_last = frozenset(self.now)


@dataclass(slots=True)
class _Rows(Silent):
    """The reading that prices each event by itself, and records the line of code that it comes from."""

    small: SymbolicProgram
    load: Load
    numbers: Mapping[str, int]
    found: Counter[tuple[_Derived, Expression]] = field(default_factory=Counter[tuple[_Derived, Expression]])
    sizes: dict[tuple[int, int], Bytes] = field(default_factory=dict[tuple[int, int], Bytes])  # of registers, by chunk
    redistributions: dict[Site, str] = field(default_factory=dict[Site, str])
    seen: set[tuple[Site, str]] = field(default_factory=set[tuple[Site, str]])

    @property
    def p(self) -> Program:
        return self.small.program

    @property
    def num_micro_batches(self) -> int:
        return self.small.layout.gradient_accumulation_steps

    def pricing(self) -> Pricing:
        return Pricing(self.p, self.load)

    # ---- the walk --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        for chunk in self.p.chunks:
            programs = ((op.site.op_name, op.program) for op in chunk.tape.ops if op.program is not None)
            self.redistributions |= {
                c.site: name for name, program in programs for c in (*program.forward, *program.backward)
            }

    def all_reduce(self, reduction: StepAllReduce) -> None:
        pricing = self.pricing()
        pricing.all_reduce(reduction)
        for (kind, ranks), amount in pricing.price.wires.items():
            self.add(_Derived("wires", kind, reduction.name, _ALL_REDUCES, ranks), amount)

    def call(self, buffer: BufferKey, call: Call) -> None:
        if call.phase == "finish":
            return
        pricing, site = self.pricing(), call.site
        pricing.call(buffer, call)
        self.sizes |= {(buffer[0], r): n for (_, r), n in pricing.alive.items()}
        again = " (recomputed)" * ((site, call.phase) in self.seen)
        self.seen.add((site, call.phase))
        times = self.small.times(buffer[0], site.layer)
        for phase, amount in pricing.price.flops.items():
            row = _Derived("flops", site.op_name, phase.replace("_", " ") + again, site.line)
            self.add(row, amount * self.num_micro_batches, times)
        for (kind, ranks), amount in pricing.price.wires.items():
            purpose = (
                "scales" if call.phase != "start" else f"{self.redistributions.get(site, '')} over {site.attrs['axis']}"
            )
            row = _Derived("wires", kind, f"{purpose}{again}", site.line, ranks)
            self.add(row, amount * self.num_micro_batches, times)

    def post_p2p(self, transfers: tuple[tuple[Transfer, BufferKey, int], ...]) -> None:
        for t, buffer, r in transfers:
            pricing = self.pricing()
            pricing.post_p2p(((t, buffer, r),))
            self.sizes |= {(buffer[0], r): n for (_, r), n in pricing.alive.items()}
            for (kind, ranks), amount in pricing.price.wires.items():
                row = _Derived("wires", kind, f"{t.what} over pp", self._touched(buffer[0], r), ranks)
                self.add(row, amount * self.num_micro_batches)

    def reduce(self, bucket: int) -> None:
        """A parameter's own bytes, and the reduction of its gradients."""
        owned, b = self.small.owned[bucket], self.p.buckets[bucket]
        shape = _shape(Spec(owned.param.local_shape(Mesh(self.small.layout))))
        for kind, amount in bucket_bytes([b], self.p.precision).items():
            self.add(_Derived(kind, owned.name, shape, owned.line), amount, owned.times)  # type: ignore[arg-type]
        self.add(
            _Derived("host", owned.name, shape, owned.line), host_optimizer_bytes(b, self.p.precision), owned.times
        )
        reduces = self.num_micro_batches if b.cut_gradients else 1
        self._bucket(Pricing.reduce, bucket, "gradients of", owned.times * reduces)
        if b.shards > 1:
            self._bucket(Pricing.replicate, bucket, "gradients of", owned.times)
            of, times = ("used", owned.gathers) if b.cut_parameters else ("updated", owned.times)
            self._bucket(Pricing.gather, bucket, of, times)

    # ---- outside of calls ------------------------------------------------------------------------------------

    def data(self) -> None:
        """Micro-batches, by the line that reads them first."""
        for c, chunk in enumerate(self.p.chunks):
            for r, name in chunk.inputs.items():
                if not any(name in earlier.tape.inputs for earlier in self.p.chunks[:c]):
                    amount = input_bytes({name: chunk.specs[r]}, self.num_micro_batches, self.p.widths)
                    self.add(_Derived("data", name, _shape(chunk.specs[r]), self._touched(c, r)), amount)

        for c, chunk in enumerate(self.p.chunks):
            for site in (op.site for op in chunk.tape.ops):
                times, cast = self.small.times(c, site.layer), ONE_SCALE * casts(site)
                if cast:
                    self.add(_Derived("data", "largest values", "of casts", site.line), times * cast)
                if kept := fp8_state_bytes(site) - cast:
                    self.add(_Derived("data", *_fp8_state(site), site.line), times * kept)

    def padding(self) -> None:
        """What buckets hold and send in addition to their parameters. No formula: it depends on how they are packed."""
        plain = replace(self.p, buckets=self.small.buckets)
        for i, b in enumerate(self.small.buckets):
            if b.shards == grain(b.moments) == 1:
                continue
            alone = [replace(b, params=(q,), offsets=(0,), size=q.numel(self.p.mesh)) for q in b.params]
            extra = self._of_bucket(plain, i)
            for n in range(len(alone)):
                extra.subtract(self._of_bucket(replace(plain, buckets=tuple(alone)), n))
            for (kind, what, ranks), amount in extra.items():
                self.add(_Derived(kind, what, "padding", ranks=ranks), amount)

    def updates(self) -> None:
        """Muon's work on whole matrices. No formula: it depends on how they are packed and dealt to ranks."""
        plain = replace(self.p, buckets=self.small.buckets)
        for i, b in enumerate(plain.buckets):
            if b.optimizer_kind.by_matrix:
                pricing = Pricing(plain, self.load)
                pricing.update(i)
                for phase, amount in pricing.price.flops.items():
                    self.add(_Derived("flops", b.optimizer_kind.name, phase, _MUON), amount)
                for (kind, ranks), amount in pricing.price.wires.items():
                    self.add(_Derived("wires", kind, "update of matrices", _MUON, ranks), amount)

    def ring_buffers(self) -> None:
        """The ring buffers of unsharded units, entry by entry: each is as large as its largest unit."""
        small, widths = self.small, self.p.widths
        for what, ring_buffer in (
            ("gathered parameters", parameter_ring_buffer(small.buckets, small.layout, widths)),
            ("gradients of one action", gradient_ring_buffer(small.buckets, widths)),
        ):
            for n in ring_buffer.sizes:
                self.add(_Derived("ring_buffer", what, "of the largest unit", _RING_BUFFER), n)

    def staging_buffers(self) -> None:
        """The staging buffers of optimizer states on the host."""
        staging = staging_buffers(((b, 1) for b in self.small.buckets), self.p.precision)
        for _ in range(staging.count):
            self.add(_Derived("optimizer", "staging buffer", "of offloaded states", _UPDATE), staging.each)

    def kept(self) -> None:
        """Registers alive after the last forward before the first backward."""
        alive = _Alive()
        walk_forward(replace(self.small.warm_up(), events={}), alive)
        flights = Counter((buffer[0], r) for buffer, r in alive.at_last)
        for (c, r), flight in sorted(flights.items()):
            chunk = self.p.chunks[c]
            made = _maker(chunk, r)
            op_name = "" if made is None else self.redistributions.get(made, made.op_name)
            what = STANDS_FOR.get(op_name, op_name) or "received"  # as `memory.recompute` names it
            row = _Derived("kept", f"{what} {_shape(chunk.specs[r])}", self._kept_for(c, r),
                         made.line if made else self._touched(c, r), flight=flight)  # fmt: skip
            self.add(row, self.sizes[c, r], self.small.times(c, made.layer) if made else 1)

    # ---- rows ------------------------------------------------------------------------------------------------

    def add(self, row: _Derived, amount: int, times: int = 1) -> None:
        if amount:
            self.found[row, expression_of(amount)] += times

    def terms(self) -> Iterator[Term]:
        for (row, expression), count in sorted(self.found.items(), key=lambda item: KINDS.index(item[0][0].kind)):
            yield Term(
                kind=row.kind, what=row.what, detail=row.detail, formula=expression.show(),
                numbers=expression.show(self.numbers), each=evaluate(expression, self.numbers), count=count,
                flight=row.flight, line=row.line, names=frozenset(expression.symbols()), ranks=row.ranks,
            )  # fmt: skip

    def _bucket(self, event: Callable[[Pricing, int], None], bucket: int, of: str, times: int) -> None:
        owned, pricing = self.small.owned[bucket], self.pricing()
        event(pricing, bucket)
        for (kind, ranks), amount in pricing.price.wires.items():
            self.add(_Derived("wires", kind, f"{of} {owned.name}", owned.line, ranks), amount, times)

    def _of_bucket(self, p: Program, bucket: int) -> Counter[tuple[TermKind, str, tuple[int, ...]]]:
        """Memory and collectives of a bucket, in plain numbers."""
        b = p.buckets[bucket]
        events = [(Pricing.reduce, int(self.num_micro_batches) if b.cut_gradients else 1)]
        if b.shards > 1:
            events += [(Pricing.replicate, 1), (Pricing.gather, self.small.gathers[b.unit] if b.cut_parameters else 1)]
        found = Counter[tuple[TermKind, str, tuple[int, ...]]]()
        found.update({(kind, kind, ()): n for kind, n in bucket_bytes([b], p.precision).items()})  # type: ignore[misc]
        found["host", "host", ()] += host_optimizer_bytes(b, p.precision)
        for event, times in events:
            pricing = Pricing(p, self.load)
            event(pricing, bucket)
            found.update({("wires", kind, ranks): n * times for (kind, ranks), n in pricing.price.wires.items()})
        return found

    def _touched(self, chunk: int, register: int) -> str:
        """The line that makes a register, or else first reads it; copies to and from the host have no line."""
        calls = [i.call for some in self.p.chunks[chunk].actions.values() for i in some if i.call.site.line]
        makes = (c.site.line for c in calls if register in c.outs)
        reads = (c.site.line for c in calls if register in c.ins)
        return next(makes, "") or next(reads, "")

    def _kept_for(self, chunk: int, register: int) -> str:
        """What reads a register after the forward."""
        readers = dict[str, None]()
        for name, instructions in self.p.chunks[chunk].actions.items():
            for call in (i.call for i in instructions if name != "Fwd" and register in i.call.ins):
                again = call.phase in ("forward", "start", "finish")
                op_name = self.redistributions.get(call.site, call.site.op_name)
                readers[f"{op_name} (recomputed)" if again else f"{op_name}'s {call.phase.replace('_', ' ')}"] = None
        return "for " + ", ".join(readers) if readers else "to be sent"


def _maker(chunk: Chunk, register: int) -> Site | None:
    """What makes a register: the op of the tape, also where a call is of two; else a call inside a redistribution."""
    of_op = (
        (op.again_for(register) or op).site
        for op in chunk.tape.ops
        if op.program is None and op.site.op_name != "fork" and register in (*op.outs, *op.extras)
    )
    return next(of_op, None) or next((i.call.site for i in chunk.actions["Fwd"] if register in i.call.outs), None)


def _shape(spec: Spec) -> str:
    """A register's shape in symbols: with room for rows that may come."""
    dims = [d if isinstance(d, int) else d.at_most or None for d in spec.shape]
    return f"[{', '.join('received' if d is None else expression_of(d).show() for d in dims)}]"


def _fp8_state(site: Site) -> tuple[str, str]:
    """What FP8 state of a linear layer is, and of what."""
    if has_delayed_scales(site):
        return "largest values", "x, w and g of past steps"
    return ("scales", "of quantised weights") if reads_quantised_weight(site) else ("largest values", "of weights")
