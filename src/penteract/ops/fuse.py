"""Fusion: ops that follow one another become one, by an edit of the tape before any reading.

norm    a fork and the RMSNorm of one of its branches: backward makes the sum of both branches' gradients and the
        weight's partial sums in one pass
add     a sum and the RMSNorm that reads it, in a layer, are one forward call, which writes both (`joint_calls.py`)
mlp     gate and up projections are one product, and SwiGLU reads its result as it lies
qkv     query, key and value projections are one product, whose result attention reads as it lies; rotary positions
        are applied to it in place. With QK-norm, query and key heads are normalised and rotated in one pass
loss    of whole rows of logits, the loss and its gradient in one op, which is said where the head is
glu     what "mlp" makes, gate and up projections and SwiGLU, is one op: its product applies SwiGLU as it stores. Its
        input gradient and that of the linear layer after it are one call (`joint_calls.py`). With quack's products,
        experts' gate and up are one op: the second product adds to the first's input gradient
fp8     linear layers in FP8 with one scale for each tensor of a micro-batch: what they read is cast once, both ways
        round, and kept in FP8 (`casts.py`); with it, what the others merge may be in FP8

A fused op computes what its parts did, but for last bits and this: weights that are merged in FP8 share a scale, and so
do their gradients. Where a pattern does not fit (other projections in FP8, ranks that cut projections differently, keys
that travel), its ops stay apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penteract.config.mesh import Mesh
from penteract.ops.casts import CAST, cast_once
from penteract.ops.declarations import OPS, WITH_ROOM
from penteract.ops.declarations.quantised.fp8_linear import is_cast_once
from penteract.ops.joint_calls import JOINT, join_glus, join_sums
from penteract.ops.overlap.in_parts import mark_parts
from penteract.ops.params import Param
from penteract.ops.spec import Spec
from penteract.ops.tape import OpCall, Site, Tape

# What recomputation and offload call a fused op: the op of the network whose result it makes (`OpCall.again`: one too).
STANDS_FOR: Mapping[str, str] = {
    "fork_norm": "rms_norm", "merged_linear": "linear", "packed_swiglu": "swiglu", "packed_attention": "attention",
    "normed_attention": "attention", "merged_glu": "linear", "expert_pair": "expert_linear", **CAST, **JOINT,
    **WITH_ROOM,
}  # fmt: skip


def fuse(tape: Tape, params: dict[str, Param], mesh: Mesh) -> None:
    """Fuse what the layout asks for, in place. Parameters of one product become joined."""
    for name in mesh.layout.fuse:
        edit = _Edit(tape, params, mesh)
        match name:
            case "norm":
                edit.norms()
            case "mlp":
                edit.mlps()
            case "qkv":
                edit.attentions()
            case "loss" | "glu" | "fp8" | "add":  # parallel/tensor.py says the first; the others edit what these made
                pass
    if "glu" in mesh.layout.fuse:
        _Edit(tape, params, mesh).glus()
        join_glus(tape)
        if mesh.layout.experts == "quack":
            _Edit(tape, params, mesh).expert_pairs()
    if "fp8" in mesh.layout.fuse:  # of linear layers as they are merged
        cast_once(tape, _Edit(tape, params, mesh).readers(), mesh.layout)
    if "add" in mesh.layout.fuse:  # of norms as they are by then
        join_sums(tape)
    if mesh.layout.collectives == "overlapped" and mesh.size("tp") > 1:
        mark_parts(tape, mesh)


@dataclass(slots=True, eq=False)
class _Edit:
    """One kind of fusion over a tape."""

    tape: Tape
    params: dict[str, Param]
    mesh: Mesh

    def norms(self) -> None:
        """fork(x) -> a, b; rms_norm(b) -> h   becomes   fork_norm(x) -> h, with a passed on."""
        readers = self.readers()
        for fork in self._forks(2):
            for branch, other in (fork.outs, fork.outs[::-1]):
                norm = readers.get(branch)
                if norm is None or norm.site.op_name != "rms_norm" or not self._whole_rows(norm.site):
                    continue
                if other not in readers or self._after(readers[other], norm):
                    site = replace(norm.site, op_name="fork_norm")
                    fused = OpCall(
                        site, fork.ins, norm.outs, norm.extras, passed=other, stands_for=STANDS_FOR["fork_norm"]
                    )
                    self._put(fused, (fork, norm))
                    break

    def mlps(self) -> None:
        """fork(h) -> a, b; linear(a), linear(b) -> swiglu   becomes   merged_linear(h) -> packed_swiglu."""
        readers = self.readers()
        for fork in self._forks(2):
            linear_ops = self._linear_ops(fork, readers)
            glu = readers.get(linear_ops[0].outs[0]) if linear_ops else None
            if glu is None or glu.site.op_name != "swiglu" or glu.ins != tuple(one.outs[0] for one in linear_ops):
                continue
            merged = self._merged(fork, linear_ops)
            packed = Site("packed_swiglu", merged.site.outs, glu.site.outs, layer=glu.site.layer, line=glu.site.line)
            self._put(merged, (fork, *linear_ops))
            self._put(OpCall(packed, merged.outs, glu.outs, stands_for=STANDS_FOR["packed_swiglu"]), (glu,))

    def glus(self) -> None:
        """merged_linear(h) -> packed_swiglu   becomes   merged_glu(h), where no product is in FP8."""
        readers = self.readers()
        for merged in [op for op in self.tape.ops if op.site.op_name == "merged_linear"]:
            glu = readers.get(merged.outs[0])
            if glu is None or glu.site.op_name != "packed_swiglu" or merged.site.attrs:
                continue
            site, attrs = merged.site, {"features": _width(merged.site.outs[0])}
            outs, extras = OPS["merged_glu"].declaration.results(site.ins, site.weights, attrs)
            site = replace(site, op_name="merged_glu", outs=(*outs, *extras), attrs=attrs)
            kept = tuple([self.tape.new(spec, flows=False) for spec in extras])
            again = replace(glu, ins=kept)  # from gate and up, which are kept: no product
            fused = OpCall(site, merged.ins, glu.outs, kept, stands_for=STANDS_FOR["merged_glu"], again=again)
            self._put(fused, (merged, glu))

    def expert_pairs(self) -> None:
        """fork(h) -> a, b; expert_linear(a), expert_linear(b)   becomes   expert_pair(h) -> both results."""
        readers = self.readers()
        for fork in self._forks(2):
            both = [readers[v] for v in fork.outs if v in readers and readers[v].site.op_name == "expert_linear"]
            if len(both) < 2 or any(op.site.attrs or op.ins[1] != both[0].ins[1] for op in both):
                continue
            site = both[0].site
            fused = replace(
                site, op_name="expert_pair", outs=(*site.outs, *both[1].site.outs),
                params=(*site.params, *both[1].site.params), weights=(*site.weights, *both[1].site.weights),
            )  # fmt: skip
            outs = (*both[0].outs, *both[1].outs)
            ins = (*fork.ins, *both[0].ins[1:])
            self._put(OpCall(fused, ins, outs, stands_for=STANDS_FOR["expert_pair"]), (fork, *both))

    def attentions(self) -> None:
        """fork(h) -> q, k, v projections, rope of q and k, attention   becomes   merged_linear, packed_attention.

        Where q and k are normalised by head before they turn: merged_linear, normed_attention.
        """
        readers = self.readers()
        for fork in self._forks(3):
            linear_ops = self._linear_ops(fork, readers)
            norms, ropes = _of_heads(linear_ops[:2], readers)
            if not ropes:
                continue
            results = (*(r.outs[0] for r in ropes), linear_ops[2].outs[0])
            attention = readers.get(results[0])
            if attention is None or attention.site.op_name != "attention" or attention.ins[:3] != results:
                continue
            widths = tuple(_width(one.site.outs[0]) for one in linear_ops)
            rotary = {**ropes[0].site.attrs, "rotary_columns": sum(widths[:2])}
            of_product = () if norms else ropes  # what it does to heads; attention does the rest
            merged = self._merged(fork, linear_ops, of_product, {} if norms else rotary)
            packed = self._packed(merged, ropes[0], attention, norms, rotary | {"widths": widths})
            self._put(merged, (fork, *linear_ops, *of_product))
            self._put(packed, (*norms, *ropes, attention) if norms else (attention,))

    # ---- patterns --------------------------------------------------------------------------------------------

    def readers(self) -> dict[int, OpCall]:
        """value -> the op that reads it; of values through which a gradient flows, that is the only one."""
        return {v: op for op in self.tape.ops for v in op.ins if self.tape.flows[v]}

    def _forks(self, branches: int) -> list[OpCall]:
        return [op for op in self.tape.ops if op.site.op_name == "fork" and len(op.outs) == branches]

    def _whole_rows(self, site: Site) -> bool:
        return site.weights[0][0] == site.ins[0].shape[-1]

    def _after(self, op: OpCall, other: OpCall) -> bool:
        return self.tape.ops.index(op) > self.tape.ops.index(other)

    def _linear_ops(self, fork: OpCall, readers: Mapping[int, OpCall]) -> list[OpCall]:
        """The linear layers that read a fork's branches, if one product can take them all."""
        found = [readers[v] for v in fork.outs if v in readers and readers[v].site.op_name == "linear"]
        plain = all(len(one.site.params) == 1 and self._merges(one.site.attrs, found[0].site.attrs) for one in found)
        cuts = {self.params[one.site.params[0]].cut(self.mesh) for one in found}
        return found if len(found) == len(fork.outs) and plain and len(cuts) == 1 else []

    def _merges(self, attrs: Mapping[str, Any], like: Mapping[str, Any]) -> bool:
        """Whether a linear layer is plain, or in FP8 as another is, and cast once."""
        return attrs == like and (not attrs or ("fp8" in self.mesh.layout.fuse and is_cast_once(attrs["fp8"])))

    # ---- edits -----------------------------------------------------------------------------------------------

    def _merged(
        self,
        fork: OpCall,
        linear_ops: Sequence[OpCall],
        ropes: Sequence[OpCall] = (),
        rotary: Mapping[str, Any] | None = None,
    ) -> OpCall:
        """One product for all; `ropes` rotate the first of its columns, as `rotary` says."""
        names = tuple(one.site.params[0] for one in linear_ops)
        for i, name in enumerate(names):
            self.params[name] = replace(self.params[name], joined=len(names) - 1 - i)
        ins, specs = fork.ins, (fork.site.ins[0],)
        if ropes:
            ins, specs = (*ins, ropes[0].ins[1]), (*specs, ropes[0].site.ins[1])
        attrs = {**(rotary or {}), **linear_ops[0].site.attrs}
        weights = tuple(one.site.weights[0] for one in linear_ops)
        outs, _ = OPS["merged_linear"].declaration.results(specs, weights, attrs)
        first = linear_ops[0].site
        site = Site("merged_linear", specs, outs, names, weights, attrs, first.layer, first.line)
        return OpCall(site, ins, (self.tape.new(outs[0], flows=True),), stands_for=STANDS_FOR["merged_linear"])

    def _packed(
        self, merged: OpCall, rope: OpCall, attention: OpCall, norms: Sequence[OpCall], about: Mapping[str, Any]
    ) -> OpCall:
        """Attention of what one product makes; with norms, of heads that are neither normalised nor rotated."""
        name = "normed_attention" if norms else "packed_attention"
        ins = (*merged.outs, rope.ins[1], *attention.ins[3:])
        specs = (*merged.site.outs, rope.site.ins[1], *attention.site.ins[3:])
        weights = tuple(norm.site.weights[0] for norm in norms)
        attrs = {**attention.site.attrs, **about, **(norms[0].site.attrs if norms else {})}
        extras = OPS[name].declaration.results(specs, weights, attrs)[1]
        site = replace(
            attention.site, op_name=name, ins=specs, outs=(*attention.site.outs, *extras[1:]),
            params=tuple(norm.site.params[0] for norm in norms), weights=weights, attrs=attrs,
        )  # fmt: skip
        more = tuple(self.tape.new(spec, flows=False) for spec in extras[1:])
        return OpCall(site, ins, attention.outs, (*attention.extras, *more), stands_for=STANDS_FOR[name])

    def _put(self, fused: OpCall, parts: Iterable[OpCall]) -> None:
        """In the place of the last of its parts."""
        gone = list(parts)
        at = max(self.tape.ops.index(op) for op in gone)
        self.tape.ops[at] = fused
        self.tape.ops = [op for op in self.tape.ops if op not in gone]


def _of_heads(
    linear_ops: Sequence[OpCall], readers: Mapping[int, OpCall]
) -> tuple[tuple[OpCall, ...], tuple[OpCall, ...]]:
    """The norms of query and key heads, if there are any, and the ops that turn them; nothing where they are not all
    there and alike."""
    found = [readers.get(one.outs[0]) for one in linear_ops]
    norms = tuple(op for op in found if op is not None and op.site.op_name == "rms_norm")
    if norms:
        found = [readers.get(one.outs[0]) for one in norms]
    ropes = tuple(op for op in found if op is not None and op.site.op_name == "rope")
    alike = len(ropes) == 2 and len(norms) in (0, 2) and _same(ropes) and ropes[0].ins[1] == ropes[1].ins[1]
    if alike and norms:  # of whole heads
        attrs = ropes[0].site.attrs
        whole = all(norm.site.weights[0] == (attrs["head_size"],) for norm in norms)
        alike = whole and _same(norms) and not attrs["plain_size"]
    return (norms, ropes) if alike else ((), ())


def _same(ops: Sequence[OpCall]) -> bool:
    return all(op.site.attrs == ops[0].site.attrs for op in ops)


def _width(spec: Spec) -> int:
    width = spec.shape[-1]
    assert isinstance(width, int)
    return width
