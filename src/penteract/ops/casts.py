"""The fusion "fp8": linear layers in FP8 read data that are cast once, for all that read the same tensor.

    linear(x)                             becomes   quantise(x) -> data; fp8_linear(x, data)
    merged_linear(x) -> packed_swiglu     becomes   quantise(x) -> data; fp8_glu(x, data)

A cast needs the largest absolute value of x first. Where the op that makes x can find it on its way (an RMSNorm of
whole rows, SwiGLU of `fp8_glu`), it hands it on. An all-gather over tensor ranks between the two changes nothing: the
ranks of a sequence agree on the largest value of all. So does backward of `fork_norm`: the gradient that it makes is
that of the sum before it, and the layer that made a part of this sum casts it. The update does so too, of weights that
a rank updates whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from penteract.config.layout import Layout
from penteract.config.precision.fp8 import Fp8
from penteract.ops.declarations import OPS
from penteract.ops.declarations.quantised.fp8_linear import is_cast_once, largest_by_update
from penteract.ops.tape import OpCall, Site, Tape

# The op of the network that a layer of cast data stands for.
CAST: Mapping[str, str] = {"fp8_linear": "linear", "fp8_glu": "linear"}


def cast_once(tape: Tape, readers: Mapping[int, OpCall], layout: Layout) -> None:
    """Cast what linear layers in FP8 read once. `readers`: value -> the op that reads it."""
    casts = _Casts(tape, readers, layout)
    for op in tape.ops:
        casts.take(op)
    tape.ops = casts.edited
    _hand_gradients_on(tape)


def _hand_gradients_on(tape: Tape) -> None:
    """fp8_linear(..) -> y; add(x, y) -> s; fork_norm(s): the norm's backward finds the largest gradient of s, which is
    that of y. Only within a layer, so that layers stay alike."""
    layers = {op.outs[0]: op for op in tape.ops if op.site.op_name == "fp8_linear"}
    sums = {op.outs[0]: op for op in tape.ops if op.site.op_name == "add"}
    for norm in [op for op in tape.ops if op.site.op_name == "fork_norm" and op.ins[0] in sums]:
        total = sums[norm.ins[0]]
        read = [layers[v] for v in total.ins if v in layers]
        if read and total.site.layer == norm.site.layer:
            _put_attribute(tape, norm, "largest_gradient")
            for layer in read:
                _put_attribute(tape, layer, "known_gradient")


def _put_attribute(tape: Tape, op: OpCall, name: str) -> None:
    site = replace(op.site, attrs={**op.site.attrs, name: True})
    tape.ops[tape.ops.index(op)] = replace(op, site=site)


@dataclass(slots=True, eq=False)
class _Casts:
    """The edit, op by op.

    edited   ops so far
    glus     a SwiGLU -> the product that it reads, which is not in `edited`
    forks    a result of a fork -> what it forks
    gathers  what was gathered from tensor ranks -> this rank's part
    largest  value -> its largest absolute value, where what makes it finds that
    norms    value -> the norm that makes it, which could find it
    made     of what is cast: the data
    """

    tape: Tape
    readers: Mapping[int, OpCall]
    layout: Layout
    edited: list[OpCall] = field(default_factory=list[OpCall])
    glus: dict[OpCall, OpCall] = field(default_factory=dict[OpCall, OpCall])
    forks: dict[int, int] = field(default_factory=dict[int, int])
    gathers: dict[int, int] = field(default_factory=dict[int, int])
    largest: dict[int, int] = field(default_factory=dict[int, int])
    norms: dict[int, OpCall] = field(default_factory=dict[int, OpCall])
    made: dict[tuple[object, ...], tuple[int, ...]] = field(default_factory=dict[tuple[object, ...], tuple[int, ...]])

    def take(self, op: OpCall) -> None:
        """The next op of the tape."""
        linear = self.glus.get(op, op)
        if linear is op and not self._is_cast_once(op):
            self._note(op)
            self.edited.append(op)
            return
        reader = self.readers.get(op.outs[0])
        if reader is not None and reader.site.op_name == "packed_swiglu":
            self.glus[reader] = replace(op, outs=reader.outs)
            return
        x, fp8 = linear.ins[0], linear.site.attrs["fp8"]
        x = self.forks.get(x, x)
        key = (x, fp8.operand, fp8.powers)
        if key not in self.made:
            largest = self._largest(self.gathers.get(x, x))
            self.edited.append(self._quantise(linear, fp8, largest))
            self.made[key] = self.edited[-1].outs
        self.edited.append(self._of_fp8(linear, self.made[key]))
        if linear is not op:
            self.largest[op.outs[0]] = self.edited[-1].outs[1]

    def _note(self, op: OpCall) -> None:
        match op.site.op_name:
            case "fork":
                self.forks |= dict.fromkeys(op.outs, op.ins[0])
            case "tp_all_gather":
                self.gathers[op.outs[0]] = op.ins[0]
            case "rms_norm" | "fork_norm" if op.site.weights[0][0] == op.site.ins[0].shape[-1]:
                self.norms[op.outs[0]] = op
            case _:
                pass

    def _is_cast_once(self, op: OpCall) -> bool:
        """Whether an op is a linear layer, or several merged ones, without bias and in FP8, of which what it reads can
        be cast once."""
        one_matrix = op.site.op_name == "merged_linear" or (op.site.op_name == "linear" and len(op.site.params) == 1)
        return one_matrix and is_cast_once(op.site.attrs.get("fp8")) and self.tape.flows[op.ins[0]]

    def _largest(self, x: int) -> int | None:
        """The largest absolute value of x, if it is known; a norm that makes x then finds it."""
        if x in self.norms:
            norm = self.norms.pop(x)
            attrs = {**norm.site.attrs, "largest": True}
            outs, extras = OPS[norm.site.op_name].declaration.results(norm.site.ins, norm.site.weights, attrs)
            self.largest[x] = self.tape.new(extras[-1], flows=False)
            site = replace(norm.site, outs=(*outs, *extras), attrs=attrs)
            found = replace(norm, site=site, extras=(*norm.extras, self.largest[x]))
            self.edited[self.edited.index(norm)] = found
        return self.largest.get(x)

    def _quantise(self, op: OpCall, fp8: Fp8, largest: int | None) -> OpCall:
        """The cast of what a linear layer reads. `largest`: its largest value, where that is known."""
        ins = op.ins[:1] if largest is None else (op.ins[0], largest)
        specs, attrs = tuple([self.tape.specs[v] for v in ins]), {"fp8": fp8}
        outs, _ = OPS["quantise"].declaration.results(specs, (), attrs)
        site = Site("quantise", specs, outs, attrs=attrs, layer=op.site.layer, line=op.site.line)
        return OpCall(site, ins, tuple([self.tape.new(spec, flows=False) for spec in outs]))

    def _of_fp8(self, op: OpCall, data: tuple[int, ...]) -> OpCall:
        """A linear layer, or several merged ones, of what was cast; with SwiGLU where that is what it makes."""
        site, glu = op.site, self.tape.specs[op.outs[0]] != op.site.outs[0]
        specs = (site.ins[0], *(self.tape.specs[v] for v in data), *site.ins[1:])
        attrs, name = {**site.attrs, "features": site.outs[0].shape[-1]}, "fp8_glu" if glu else "fp8_linear"
        if largest_by_update(self.layout):
            attrs["known_weights"] = True
        outs, extras = OPS[name].declaration.results(specs, site.weights, attrs)
        made = replace(site, op_name=name, ins=specs, outs=(*outs, *extras), attrs=attrs)
        more = [self.tape.new(spec, flows=False) for spec in (*outs[1:], *extras)]
        other_outs = len(outs) - 1
        results, reads = (op.outs[0], *more[:other_outs]), (op.ins[0], *data, *op.ins[1:])
        return OpCall(made, reads, results, tuple(more[other_outs:]), stands_for=CAST[name])
