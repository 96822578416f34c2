"""From the tape to instructions: adds backward, recomputes dropped values, places weight gradients where they overlap
communication or where the schedule wants them, and frees every register after its last use.

This happens once, before any reading: price and run walk the same instructions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from penteract.config.layout import PLAIN, Edit
from penteract.errors import Bug
from penteract.ops.declarations import OPS
from penteract.ops.frees import Instruction, place_frees
from penteract.ops.offload import Offload
from penteract.ops.overlap.early_starts import overlap
from penteract.ops.overlap.in_parts import in_parts, parts_of
from penteract.ops.spec import Spec
from penteract.ops.tape import Call, OpCall, Phase, Site, Tape

# Never recomputed: they count something, exchange counts, or wait for the host.
ONCE = frozenset({"loss", "tokens_per_expert", "counts", "split_sizes"})


@dataclass(frozen=True, slots=True)
class Chunk:
    """A model chunk, ready to walk: instructions by action (`Fwd` and `Bwd`, or `Fwd`, `Inp`, `Wgt`)."""

    tape: Tape
    specs: tuple[Spec, ...]
    actions: Mapping[str, tuple[Instruction, ...]]
    entry: int | None
    exit: int | None
    entry_gradient: int | None
    exit_gradient: int | None
    freed_by_send: frozenset[int]
    inputs: Mapping[int, str]  # registers that are data, by name
    sums: Mapping[Site, Site]  # the site of a fork -> that of its gradients' sum
    turns: Mapping[int, int]  # registers being offloaded or reloaded -> their turn of the ring buffer, in their action
    copies: Mapping[Site, int]  # the site of a copy to or from the host -> the value of the tape that it copies


@dataclass(slots=True)
class _WeightGradient:
    op: OpCall
    sources: tuple[int, ...]  # carry or gradients


@dataclass(slots=True)
class _Lowering:
    tape: Tape
    recompute: Callable[[int], Collection[str]]  # layer -> ops; -1: outside the layers
    split: bool
    training: bool
    specs: list[Spec] = field(init=False)
    out: list[Call] = field(default_factory=list)
    alias: dict[int, int] = field(default_factory=dict)
    producer: dict[int, OpCall] = field(default_factory=dict)
    gradient: dict[int, int] = field(default_factory=dict)
    largest: dict[int, int] = field(default_factory=dict)  # a gradient -> its largest absolute value, where known
    recomputed: dict[int, int] = field(default_factory=dict)
    tails: dict[int, list[Call]] = field(
        default_factory=dict
    )  # a recomputed redistribution in flight -> its calls from the first finish on
    # redistribution -> weight gradients that overlap its collective; op -> those that read what it makes again
    waiting: dict[OpCall, list[_WeightGradient]] = field(default_factory=dict)
    deferred: list[_WeightGradient] = field(default_factory=list)  # for the schedule's Wgt
    layer_inputs: dict[int, int] = field(default_factory=dict[int, int])  # register -> the layer whose input it is
    sums: dict[Site, Site] = field(default_factory=dict[Site, Site])
    passed_on: frozenset[int] = field(init=False)  # values without a gradient: their op takes that of their reader

    def __post_init__(self) -> None:
        self.specs = list(self.tape.specs)
        self.passed_on = frozenset(op.outs[0] for op in self.tape.ops if op.joint_back is not None)

    # ---- helpers ---------------------------------------------------------------------------------------------

    def root(self, v: int) -> int:
        while v in self.alias:
            v = self.alias[v]
        return v

    def new(self, spec: Spec) -> int:
        self.specs.append(spec)
        return len(self.specs) - 1

    def emit(self, site: Site, phase: Phase, ins: Iterable[int], outs: Iterable[int]) -> None:
        self.out.append(Call(site, phase, tuple(ins), tuple(outs)))

    def emit_renamed(self, calls: Iterable[Call], names: Mapping[int, int]) -> None:
        for c in calls:
            self.emit(c.site, c.phase, [names.get(i, i) for i in c.ins], [names.get(o, o) for o in c.outs])

    def beside_collectives(self, lists: Mapping[str, list[Call]]) -> dict[str, list[Call]]:
        """Calls beside collectives, in parts where the tape says so."""
        parts = parts_of(self.tape)
        made = {name: in_parts(calls, parts, self.new) if parts else calls for name, calls in lists.items()}
        return {name: overlap(calls) for name, calls in made.items()}

    # ---- forward ---------------------------------------------------------------------------------------------

    def forward(self) -> list[Call]:
        for op in self.tape.ops:
            if op.site.op_name == "fork":
                self.alias |= dict.fromkeys(op.outs, op.ins[0])
                continue
            for r in (*op.outs, *op.extras):
                self.producer[r] = op
            if op.passed is not None:
                self.alias[op.passed] = op.ins[0]
            if op.joint is not None:
                self._join(op)
            elif not (self.training and op.ends):
                self.out.extend(self._forward_calls(op))
        self.layer_inputs = {self.root(v): layer for v, layer in self.tape.layer_inputs.items()}
        return self._take()

    def _join(self, op: OpCall) -> None:
        """One call in the place of that of the op before, whose result `op` reads, and of its own."""
        assert op.joint is not None
        first, results = self.out.pop(), (*op.outs, *op.extras)
        if first.outs != tuple(map(self.root, op.ins)):
            raise Bug("LOWER", f"{op.joint} is not of two calls that follow each other")
        self.emit(op.joint, "forward", first.ins, (*first.outs, *results))

    def _forward_calls(self, op: OpCall) -> list[Call]:
        if op.program is None:
            return [Call(op.site, "forward", tuple(map(self.root, op.ins)), (*op.outs, *op.extras))]
        return [Call(c.site, c.phase, tuple(map(self.root, c.ins)), c.outs) for c in op.program.forward]

    def _take(self) -> list[Call]:
        calls, self.out = self.out, []
        return calls

    # ---- recomputation ------------------------------------------------------------------------------------------

    def dropped(self, r: int) -> bool:
        """Whether register r is recomputed instead of kept."""
        op = self.producer.get(r)
        if op is None or r in self.layer_inputs or op.site.op_name in ONCE:
            return False
        op_names = self.recompute(op.site.layer)
        return not op.names(r).isdisjoint(op_names) or ("*" in op_names and op.site.layer >= 0)

    def require(self, v: int) -> int:
        """The register that holds v now, recomputing it if it was dropped."""
        r = self.root(v)
        if r in self.tails:
            self.out.extend(self.tails.pop(r))
        if r in self.recomputed:
            return self.recomputed[r]
        if not self.dropped(r):
            return r
        self._recompute(r, whole=True)
        return self.recomputed[r]

    def prefetch(self, v: int) -> None:
        """Start the collective that recomputes v; `require` finishes it."""
        r = self.root(v)
        if r not in self.recomputed and self.dropped(r) and self.producer[r].program is not None:
            self._recompute(r, whole=False)

    def _recompute(self, r: int, *, whole: bool) -> None:
        op = self.producer[r]
        if (again := op.again_for(r)) is not None:
            ins = [self.require(i) for i in again.ins]
            if r not in self.recomputed:  # else the op was called again for these, and has made both
                self.recomputed[r] = self.new(self.specs[r])
                self.emit(again.site, "forward", ins, (self.recomputed[r],))
            return
        names = {self.root(i): self.require(i) for i in op.ins}
        for o in (*op.outs, *op.extras):
            names[o] = self.recomputed[o] = self.new(self.specs[o])
        start = len(self.out)
        self.emit_renamed(self._forward_calls(op), names)
        if not whole:
            finish = next((i for i in range(start, len(self.out)) if self.out[i].phase == "finish"), len(self.out))
            tail, self.out = self.out[finish:], self.out[:finish]
            if tail:
                self.tails[r] = tail

    # ---- backward --------------------------------------------------------------------------------------------

    def backward(self) -> list[Call]:
        for op in reversed(self.tape.ops):
            if op.site.op_name == "fork":
                self._fork(op)
            elif op.program is not None:
                self._redistribution(op)
            else:
                self._declared_op(op)
        return self._take()

    def weights(self) -> list[Call]:
        for job in self.deferred:
            self._weight_gradient(job)
        return self._take()

    def _fork(self, op: OpCall) -> None:
        gradients = [self.gradient.pop(o) for o in op.outs if o in self.gradient]
        if not gradients:
            return
        total, site = gradients[0], sum_of(op.site)
        self.sums[op.site] = site
        for g in gradients[1:]:
            both, total = (total, g), self.new(site.outs[0])
            self.emit(site, "forward", both, (total,))
        self.gradient[op.ins[0]] = total

    def _redistribution(self, op: OpCall) -> None:
        assert op.program is not None
        gradients = [self.gradient.pop(o, None) for o in op.outs]
        if op.outs and all(g is None for g in gradients):
            return
        names = {k: self.require(k) for k in op.program.kept}
        for register, g in zip(op.program.gradients_in, gradients, strict=True):
            if g is None:
                raise Bug("GRADIENT", f"a result of {op.site} has no gradient")
            names[register] = g
        calls = op.program.backward
        first = next((i + 1 for i, c in enumerate(calls) if c.phase == "start"), len(calls))
        self.emit_renamed(calls[:first], names)
        for job in self.waiting.pop(op, []):
            self._weight_gradient(job)
        self.emit_renamed(calls[first:], names)
        through = [i for i in op.ins if self.tape.flows[i]]
        for i, g in zip(through, op.program.gradients_out, strict=True):
            self.gradient[i] = names.get(g, g)

    def _declared_op(self, op: OpCall) -> None:
        declaration, attrs = OPS[op.site.op_name].declaration, op.site.attrs
        gradients = [self.gradient.pop(op.outs[i], None) for i in declaration.gradients(attrs)]
        if op.passed is not None:
            gradients.append(self.gradient.pop(op.passed, None))
        for o in op.outs:
            self.gradient.pop(o, None)
        if all(g is None for g in gradients) and op.site.op_name != "loss":
            return
        incoming = tuple(g for g in gradients if g is not None)
        if len(incoming) < len(gradients):
            raise Bug("GRADIENT", f"a result of {op.site} has no gradient")
        if op.site.params and not self.split:
            self._prefetch_weights(op)
        sources = incoming
        if declaration.passes_gradient or op.ins[0] in self.passed_on:
            self.gradient |= {op.ins[i]: incoming[0] for i in declaration.differentiable}
        elif any(self.tape.flows[op.ins[i]] for i in declaration.differentiable):
            site, again = self._joint_again(op), tuple[int, ...]()
            if self.split and op.again is not None and op.outs[0] in self.passed_on and site is None:
                self.require(op.outs[0])  # now: it is smaller than what it is made from, which is freed after this call
            carry = tuple(self.new(s) for s in declaration.carry(op.site.ins, attrs))
            made = tuple(self.new(op.site.ins[i]) for i in declaration.differentiable)
            kept = tuple(self.require(_named(op, k)) for k in declaration.input_keeps)
            found = [self.largest[g] for g in incoming] if attrs.get("known_gradient") else []
            if site is not None:
                again = (self.new(self.specs[op.outs[0]]),)
                self.recomputed[op.outs[0]] = again[0]
            site = site or op.joint_back or op.site
            self.emit(site, "input_gradient", (*kept, *incoming, *found), (*made, *carry, *again))
            for job in self.waiting.pop(op, []):  # they read what was made again
                self._weight_gradient(job)
            if attrs.get("largest_gradient"):
                self.largest[made[0]], carry = carry[-1], carry[:-1]
            self.gradient |= {op.ins[i]: g for i, g in zip(declaration.differentiable, made, strict=True)}
            sources = carry or incoming
        if op.site.params:
            self._place(_WeightGradient(op, sources))

    def _joint_again(self, op: OpCall) -> Site | None:
        """The call of its and its reader's input gradients that makes its result again, if it does: this was dropped,
        what it is made from was not, and the call is whole."""
        if op.joint_again is None or op.parts_back is not None:
            return None
        made, source = op.outs[0], op.extras[0]
        makes = self.dropped(made) and made not in self.recomputed and not self.dropped(source)
        return op.joint_again if makes else None

    def _prefetch_weights(self, op: OpCall) -> None:
        for k in OPS[op.site.op_name].declaration.weight_keeps:
            self.prefetch(_named(op, k))

    def _place(self, job: _WeightGradient) -> None:
        """Now; or overlapped with the collective of the redistribution that made the input; or after the call that
        makes the input again; or when the schedule says."""
        if not OPS[job.op.site.op_name].declaration.deferrable:
            self._weight_gradient(job)
        elif self.split:
            self.deferred.append(job)
        else:
            maker = self.producer.get(self.root(job.op.ins[0]))
            program = None if maker is None else maker.program
            overlaps = program is not None and any(c.phase == "start" for c in program.backward)
            if maker is not None and (overlaps or self._joint_again(maker) is not None):
                self.waiting.setdefault(maker, []).append(job)
            else:
                self._weight_gradient(job)

    def _weight_gradient(self, job: _WeightGradient) -> None:
        declaration = OPS[job.op.site.op_name].declaration
        kept = tuple(self.require(_named(job.op, k)) for k in declaration.weight_keeps)
        self.emit(job.op.site, "weight_gradient", (*kept, *job.sources), ())


def sum_of(fork: Site) -> Site:
    """The sum of two gradients of a fork."""
    spec = fork.ins[0]
    return Site("add", (spec, spec), (spec,), layer=fork.layer, line=fork.line)


def _named(op: OpCall, name: str) -> int:
    """`in0`, `out1`, `extra0` of an op."""
    kind, index = name[:-1], int(name[-1])
    return {"in": op.ins, "out": op.outs, "extra": op.extras}[kind][index]


def lower(
    tape: Tape, edit: Edit = PLAIN, edits: Mapping[int, Edit] | None = None, *, split: bool = False,
    training: bool = True,
) -> Chunk:  # fmt: skip
    """A tape with its edits applied: `edits` by layer, `edit` for all that it does not name.

    Ops to recompute: their results are dropped and recomputed; "*" is every op of a layer. Ops to offload: what
    backward keeps of them is kept on the host (`offload.py`).
    `split`: deferrable weight gradients get an action of their own (`Wgt`). `training=False`: forward only.
    """
    sets = {layer: frozenset(own.recompute) for layer, own in (edits or {}).items()}
    rest = frozenset(edit.recompute)
    low = _Lowering(tape, lambda layer: sets.get(layer, rest), split, training)
    lists = {"Fwd": low.forward()}
    exit_ = None if tape.exit is None else low.root(tape.exit)
    if not training:
        actions, by_send = place_frees(low.beside_collectives(lists), tape, exit_, None)
        return Chunk(tape, tuple(low.specs), actions, tape.entry, exit_, None, None, by_send, _inputs(tape), {}, {}, {})
    exit_gradient = None
    if tape.exit is not None:
        exit_gradient = low.gradient[tape.exit] = low.new(tape.specs[tape.exit])
    if split:
        lists["Inp"], lists["Wgt"] = low.backward(), low.weights()
    else:
        lists["Bwd"] = low.backward()
    if low.waiting or low.tails:
        raise Bug("LOWER", "a weight gradient or a gather was left behind")
    leaves = {layer: frozenset(own.offload) for layer, own in (edits or {}).items()}
    others = frozenset(edit.offload)
    away = Offload(tape, lambda layer: leaves.get(layer, others), low.producer, low.layer_inputs, low.specs)
    if others or any(leaves.values()):
        lists = away.apply(lists)
    lists = low.beside_collectives(lists)
    entry_gradient = None if tape.entry is None else low.gradient.get(tape.entry)
    actions, by_send = place_frees(lists, tape, exit_, entry_gradient)
    return Chunk(
        tape, tuple(low.specs), actions, tape.entry, exit_, entry_gradient, exit_gradient, by_send, _inputs(tape),
        low.sums, away.turns, away.copies,
    )  # fmt: skip


def _inputs(tape: Tape) -> dict[int, str]:
    return {v: name for name, v in tape.inputs.items()}
