"""`do`: the recorder with which the network and its parallelism are written. Calling one of its ops records the op.

Legend of dims, for the whole project: B micro-batch, S sequence, D hidden, H heads, K KV heads, C head size, F ffn,
X experts, V vocabulary, R received token copies; sharding as `@axis`, so [S@cp·tp, B, D] is a residual stream whose
tokens are sharded over cp and tp. *axis* is of the mesh, *dim* of a tensor.

A value through which a gradient flows has exactly one consumer; `fork` makes several values of it for several
consumers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import PurePath
from typing import Any

from penteract.config.mesh import Mesh
from penteract.config.precision.fp8 import Fp8
from penteract.config.precision.module_patterns import LinearLayers
from penteract.errors import Bug
from penteract.ops import collectives
from penteract.ops.declarations import OPS, WITH_ROOM
from penteract.ops.params import Param
from penteract.ops.spec import Dim, Role, Spec
from penteract.ops.tape import Call, OpCall, RedistributionProgram, Site, Tape


@dataclass(eq=False, slots=True)
class Value:
    """A logical tensor on the tape."""

    id: int
    spec: Spec
    flows: bool
    consumed_by: str = ""

    @property
    def shape(self) -> tuple[Dim, ...]:
        """The dims of its spec. A dim whose size depends on routing is a `Received`."""
        return self.spec.shape


Values = tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Redistribution:
    """A change of sharding between regions: two conjugate programs.

    forward(steps, *ins) -> (outs, kept); backward(steps, kept, *gradients of outs) -> gradients of the differentiable
    ins. `params`: the parameters that its ops use. `ends`: the network ends here; it has no outs and keeps its ins. In
    training its forward is skipped, and `backward` records everything.
    """

    name: str
    forward: Callable[..., tuple[Values, Values]]
    backward: Callable[..., Values]
    params: tuple[Param, ...] = ()
    ends: bool = False


def single_collective(name: str, axis: str, there: str, back: str = "", **attrs: Any) -> Redistribution:
    """The simplest redistribution: the collective `there` in forward, its conjugate `back` in backward, nothing kept.

    Without `back` no gradient passes. `overlaps`: both run beside what needs neither (`ops/overlap/early_starts.py`).
    """

    def forward(steps: Steps, x: Value) -> tuple[Values, Values]:
        return (steps.collective(there, axis, x, **attrs),), ()

    def backward(steps: Steps, kept: Values, *gradients: Value) -> Values:
        return tuple(steps.collective(back, axis, g, **attrs) for g in gradients) if back else ()

    return Redistribution(name, forward, backward)


def _line() -> str:
    """The nearest line on the call stack outside this folder, as `model/mlp.py:31`."""
    frame = sys._getframe(1)
    while frame is not None:  # pyright: ignore[reportUnnecessaryComparison]
        if outside := _outside(frame.f_code.co_filename):
            return f"{outside}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"


@cache
def _outside(filename: str) -> str:
    """`model/mlp.py`; empty for a file of this folder."""
    path = PurePath(filename)
    return "" if path.parent.name == "ops" else f"{path.parent.name}/{path.name}"


@dataclass(slots=True)
class Ticket:
    """A collective in flight: `finish()` waits for it and returns its result."""

    steps: Steps
    site: Site
    x: Value
    y: Value

    def finish(self) -> Value:
        """Record the wait for the collective. -> its result; over one rank that is its input, without a wait."""
        if self.y is not self.x:
            self.steps.calls.append(Call(self.site, "finish", (self.x.id, self.y.id), ()))
        return self.y


@dataclass(slots=True)
class Steps:
    """The recorder inside a redistribution: collectives and phases of ops. It derives no gradients."""

    tape: Tape
    mesh: Mesh
    layer: int
    calls: list[Call] = field(default_factory=list)

    def value(self, spec: Spec) -> Value:
        """A new register of this spec, through which no gradient flows."""
        return Value(self.tape.new(spec, False), spec, False)

    def start(self, kind: str, axis: str, x: Value, **attrs: Any) -> Ticket:
        """Start a collective. Over one rank its result is its input."""
        n = self.mesh.size(axis)
        if n == 1:
            return Ticket(self, Site(kind, (), ()), x, x)
        y = self.value(collectives.result(kind, x.spec, n, attrs))
        others: Values = attrs.pop("also_reads", ())
        site = Site(kind, (x.spec,), (y.spec,), attrs={"axis": axis, **attrs}, layer=self.layer, line=_line())
        self.calls.append(Call(site, "start", (x.id, *(o.id for o in others)), (y.id,)))
        return Ticket(self, site, x, y)

    def collective(self, kind: str, axis: str, x: Value, **attrs: Any) -> Value:
        """A collective over `axis` that is waited for at once. -> its result"""
        return self.start(kind, axis, x, **attrs).finish()

    def forward(self, op_name: str, *ins: Value, params: tuple[Param, ...] = (), **attrs: Any) -> Values:
        """An op's forward: its results, then its extras. An input that it overwrites must be made in this
        redistribution."""
        for x in (ins[i] for i in OPS[op_name].declaration.overwrites):
            if not any(x.id in call.outs for call in reversed(self.calls)):
                raise Bug("OVERWRITE", f"{op_name} overwrites a value made outside its redistribution ({_line()})")
        site = self._site(op_name, ins, params, attrs)
        made = tuple(self.value(s) for s in site.outs)
        self.calls.append(Call(site, "forward", _ids(ins), _ids(made)))
        return made

    def input_gradient(
        self, op_name: str, ins: Values, kept: Values, gradients: Values, params: tuple[Param, ...] = (), **attrs: Any
    ) -> Values:
        """An op's input gradient, given what it keeps; `ins` only give the shapes of its inputs."""
        made = tuple(self.value(ins[i].spec) for i in OPS[op_name].declaration.differentiable)
        site = self._site(op_name, ins, params, attrs)
        self.calls.append(Call(site, "input_gradient", _ids((*kept, *gradients)), _ids(made)))
        return made

    def weight_gradient(
        self, op_name: str, ins: Values, kept: Values, gradients: Values, params: tuple[Param, ...], **attrs: Any
    ) -> None:
        """An op's weight gradient, added to those of `params`; `ins` only give the shapes of its inputs."""
        site = self._site(op_name, ins, params, attrs)
        self.calls.append(Call(site, "weight_gradient", _ids((*kept, *gradients)), ()))

    def _site(self, op_name: str, ins: Values, params: tuple[Param, ...], attrs: dict[str, Any]) -> Site:
        specs, weights = tuple(v.spec for v in ins), tuple(p.local_shape(self.mesh) for p in params)
        outs, extras = OPS[op_name].declaration.results(specs, weights, attrs)
        names = tuple(p.name for p in params)
        return Site(op_name, specs, (*outs, *extras), names, weights, attrs, self.layer, _line())


def _ids(values: Sequence[Value]) -> tuple[int, ...]:
    return tuple(v.id for v in values)


class Do:
    """Records one model chunk for one layout onto a tape.

    `linear_layers`: which of them are in FP8. `trains`: the program is for training only, so redistributions
    with `ends` need no forward.
    """

    def __init__(self, mesh: Mesh, linear_layers: LinearLayers | None = None, *, trains: bool = False) -> None:
        """Begin an empty tape for the layout of `mesh`."""
        self.mesh = mesh
        self.trains = trains
        self.linear_layers = linear_layers or LinearLayers()
        self.layout = mesh.layout
        self.tape = Tape()
        self.layer = -1
        self.params: dict[str, Param] = {}

    # ---- structure -------------------------------------------------------------------------------------------

    def input(self, name: str, shape: tuple[int, ...], role: Role = "index") -> Value:
        """Data by name: tokens, targets, positions. Resident during the step; no gradient."""
        spec = Spec(shape, role)
        if name not in self.tape.inputs:
            self.tape.inputs[name] = self.tape.new(spec, False)
        return Value(self.tape.inputs[name], spec, False)

    def receive(self, shape: tuple[int, ...]) -> Value:
        """The value that the previous stage sends.   -> [S@cp·tp, B, D]"""
        spec = Spec(shape)
        self.tape.entry = self.tape.new(spec, True)
        return Value(self.tape.entry, spec, True)

    def send(self, x: Value) -> None:
        """Send x to the next stage."""
        self._consume(x, "send", _line())
        self.tape.exit = x.id

    def fork(self, x: Value, n: int = 2) -> Values:
        """x -> x, x, ...   Backward: the gradients' sum."""
        return self._record("fork", (x,), tuple(x.spec for _ in range(n)), (), (), {})

    def layers(self, which: Sequence[int], block: Callable[[int, Value], Value], x: Value) -> Value:
        """Apply the layers `which` to x. Full recomputation keeps each layer's input."""
        for i in which:
            self.layer = i
            self.tape.layer_inputs[x.id] = i
            x = block(i, x)
        self.tape.layer_inputs[x.id] = -1
        self.layer = -1
        return x

    def redistribute(self, redistribution: Redistribution, *ins: Value) -> Any:
        """Change the sharding of `ins`. At degree one it does nothing."""
        tape = self.tape
        steps = Steps(tape, self.mesh, self.layer)
        backward_only = self.trains and redistribution.ends
        outs, kept = ((), ins) if backward_only else redistribution.forward(steps, *ins)
        if not steps.calls and not backward_only:
            return outs[0] if len(outs) == 1 else outs
        gradients = tuple(steps.value(o.spec) for o in outs)
        back = Steps(tape, self.mesh, self.layer)
        results = redistribution.backward(back, kept, *gradients)
        program = RedistributionProgram(
            tuple(steps.calls), tuple(back.calls), _ids(kept), _ids(gradients), _ids(results)
        )
        line = _line()
        for v in ins:
            self._consume(v, redistribution.name, line)
        for p in redistribution.params:
            self.params[p.name] = p
        site = Site(redistribution.name, tuple(v.spec for v in ins), tuple(o.spec for o in outs),
                    tuple(p.name for p in redistribution.params),
                    tuple(p.local_shape(self.mesh) for p in redistribution.params),
                    layer=self.layer, line=line)  # fmt: skip
        flows = any(v.flows for v in ins)
        for o in outs:
            tape.flows[o.id] = o.flows = flows
        inside = [i for c in program.forward for i in c.outs if i not in _ids(outs)]
        tape.ops.append(OpCall(site, _ids(ins), _ids(outs), tuple(inside), program))
        return outs[0] if len(outs) == 1 else outs

    def _consume(self, x: Value, op_name: str, line: str) -> None:
        if x.flows and x.consumed_by:
            raise Bug("FORK", f"a value of {x.consumed_by} is used again by {op_name} ({line})", fix="use do.fork")
        x.consumed_by = f"{op_name} ({line})" if x.flows else ""

    def _record(self, op_name: str, ins: Values, outs: tuple[Spec, ...], extras: tuple[Spec, ...],
                params: tuple[Param, ...], attrs: dict[str, Any]) -> Values:  # fmt: skip
        line = _line()
        for v in ins:
            self._consume(v, op_name, line)
        flows = any(v.flows for v in ins) or bool(params)
        through = [flows and s.role in ("compute", "stat") for s in outs]
        made = tuple(Value(self.tape.new(s, f), s, f) for s, f in zip(outs, through, strict=True))
        extra_registers = tuple(self.tape.new(s, False) for s in extras)
        for p in params:
            self.params[p.name] = p
        site = Site(op_name, tuple(v.spec for v in ins), (*outs, *extras), tuple(p.name for p in params),
                    tuple(p.local_shape(self.mesh) for p in params), attrs, self.layer, line)  # fmt: skip
        stands_for = WITH_ROOM.get(op_name, "")
        self.tape.ops.append(OpCall(site, _ids(ins), _ids(made), extra_registers, stands_for=stands_for))
        return made

    def op(self, op_name: str, *ins: Value, params: tuple[Param, ...] = (), **attrs: Any) -> Values:
        """Record an op of `ops/declarations`."""
        weights = [p.local_shape(self.mesh) for p in params]
        outs, extras = OPS[op_name].declaration.results([v.spec for v in ins], weights, attrs)
        return self._record(op_name, ins, outs, extras, params, attrs)

    # ---- ops -----------------------------------------------------------------------------------------------

    def embedding(self, ids: Value, w: Param) -> Value:
        """ids [s, B], w [V@tp, D] -> [s, B, D], partial over the axis that shards w: ids of other shards give zeros."""
        axis = w.shards[0].axis if w.shards and w.shards[0].num_shards(self.mesh) > 1 else ""
        return self.op("embedding", ids, params=(w,), axis=axis)[0]

    def linear(self, x: Value, w: Param, bias: Param | None = None) -> Value:
        """x [.., D], w [F, D] -> [.., F]. In FP8 if its recipe says so; then `cut` is the dim of w that tp shards."""
        attrs = self._scaled(w, self.linear_layers.of(w.name))
        return self.op("linear", x, params=(w,) if bias is None else (w, bias), **attrs)[0]

    def expert_linear(self, x: Value, rows: Value, w: Param) -> Value:
        """x [R, D], rows of each expert, w [X, F, D] -> [R, F]. `cut` is a dim of one expert's matrix.

        `rows`: their sizes on the host, or their offsets on the device, as the layout's kernel takes them.
        """
        scaled = self._scaled(w, self.linear_layers.of_experts(w.name))
        return self.op("expert_linear", x, rows, params=(w,), **scaled)[0]

    def _scaled(self, w: Param, fp8: Fp8 | None) -> dict[str, Any]:
        if fp8 is None:
            return {}
        before = len(w.shape) - 2
        cut = [s.dim - before for s in w.shards if s.axis == "tp" and s.num_shards(self.mesh) > 1]
        return {"fp8": fp8, "cut": cut[0] if cut else None}

    def add_bias(self, x: Value, b: Param) -> Value:
        """x [.., D] + b [D]: the bias of a linear layer whose output was partial, added once, after the reduction."""
        return self.op("add_bias", x, params=(b,))[0]

    def rms_norm(self, x: Value, w: Param, epsilon: float) -> Value:
        """x [.., n·C], w [C] -> same; each group of C is normalised by itself (C = D: the whole row; QK-norm: a
        head)."""
        return self.op("rms_norm", x, params=(w,), epsilon=epsilon)[0]

    def layer_norm(self, x: Value, w: Param, b: Param, epsilon: float) -> Value:
        """x [.., D], w [D], b [D] -> same"""
        return self.op("layer_norm", x, params=(w, b), epsilon=epsilon)[0]

    def rope(self, x: Value, positions: Value, plain_size: int = 0, **rotation: Any) -> Value:
        """x [s, B, n·C], positions [s, B] -> same; each head's halves are rotated, except its first `plain_size`
        dims."""
        return self.op("rope", x, positions, plain_size=plain_size, **rotation)[0]

    def swiglu(self, gate: Value, up: Value, offsets: Value | None = None) -> Value:
        """silu(gate) · up. `offsets`: of rows that experts have, in registers with room for more."""
        if offsets is not None:
            return self.op("padded_swiglu", gate, up, offsets)[0]
        return self.op("swiglu", gate, up)[0]

    def gelu(self, x: Value) -> Value:
        """GELU, tanh form (GPT-2)."""
        return self.op("gelu", x)[0]

    def add(self, a: Value, b: Value) -> Value:
        """a, b of one shape -> a + b; for example, a block's output is added to the residual stream."""
        return self.op("add", a, b)[0]

    def repeat_heads(self, x: Value, times: int, head_size: int) -> Value:
        """x [s, B, K·C] -> [s, B, K·times·C], each head `times` times in a row."""
        return self.op("repeat_heads", x, times=times, head_size=head_size)[0]

    def loss(self, x: Value, name: str, copies: str = "", scale: str = "") -> None:
        """x [], a sum over tokens or sequences, is added to the loss term `name`, times the step's scale of that term,
        or of the term `scale` if it is given.

        `copies`: the axis whose ranks all hold the same x.
        """
        self.op("loss", x, name=name, scale=scale or name, copies=self.mesh.size(copies) if copies else 1)
