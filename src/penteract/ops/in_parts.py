"""Products of tensor parallelism in two parts, each beside what the other waits for (`kernels.collectives =
"overlapped"`; Wang et al. 2023, 10.1145/3567955.3567959).

What reads gathered tokens begins with those that this rank has: the others come meanwhile. What makes partial sums
begins with those that other ranks need: they are exchanged while this rank's own are computed, and then added.

    start gather · finish · linear          ->  start gather · linear, own · finish · linear, others
    linear · start reduce-scatter · finish  ->  linear, others · start all-to-all · linear, own · finish · sum
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from penteract.config.mesh import Mesh
from penteract.ops import collectives
from penteract.ops.spec import Spec
from penteract.ops.tape import Call, OpCall, Parts, Site, Tape

AXIS = "tp"
BY_ROWS = frozenset({"linear", "merged_linear", "merged_glu"})  # each row of a result needs one row of an input


def mark_parts(tape: Tape, mesh: Mesh) -> None:
    """Let linear layers beside collectives of tensor parallelism be called in parts."""
    made = {v: op for op in tape.ops for v in op.outs}
    read = {v: op for op in tape.ops for v in op.ins if tape.flows[v]}
    for i, op in enumerate(tape.ops):
        if op.site.op_name not in BY_ROWS or "fp8" in op.site.attrs:
            continue
        before, after = made.get(op.ins[0]), read.get(op.outs[0])
        summed = after is not None and after.site.op_name == "tp_reduce_scatter"
        if summed or (before is not None and before.site.op_name == "tp_all_gather"):
            exchange = _exchange(after, mesh) if after is not None and summed else ()
            tape.ops[i] = replace(op, parts=_parts(op.site, mesh, exchange))
        if op.joint_back is not None:
            tape.ops[i] = replace(tape.ops[i], parts_back=_parts(op.joint_back, mesh, ()))


def _parts(site: Site, mesh: Mesh, exchange: tuple[Site, ...]) -> Parts:
    whole = site.ins[0].shape[0]
    assert isinstance(whole, int)
    own = whole // mesh.size(AXIS)
    return Parts(_of_rows(site, whole, own), _of_rows(site, whole, whole - own), *exchange)


def _of_rows(site: Site, whole: int, rows: int) -> Site:
    """The op over so many rows of all tensors that have `whole` of them."""

    def cut(spec: Spec) -> Spec:
        return Spec((rows, *spec.shape[1:]), spec.role) if spec.shape[0] == whole else spec

    return replace(site, ins=tuple(map(cut, site.ins)), outs=tuple(map(cut, site.outs)))


def _exchange(op: OpCall, mesh: Mesh) -> tuple[Site, Site]:
    """The all-to-all in the place of a reduce-scatter, and the sum after it."""
    assert op.program is not None
    site = op.program.forward[0].site
    (x,), (y,) = site.ins, site.outs
    n = mesh.size(AXIS)
    there = replace(site, op_name="all_to_all", outs=(collectives.result("all_to_all", x, n, {}),))
    return there, Site("sum_shares", (x, x), (y,), attrs={"axis": AXIS, "shares": n}, layer=site.layer, line=site.line)


def parts_of(tape: Tape) -> dict[Site, Parts]:
    """The parts in which sites are called."""
    plain = {op.site: op.parts for op in tape.ops if op.parts is not None}
    return plain | {op.joint_back: op.parts_back for op in tape.ops if op.joint_back and op.parts_back is not None}


def in_parts(calls: Iterable[Call], parts: Mapping[Site, Parts], new: Callable[[Spec], int]) -> list[Call]:
    """The same calls, with those beside collectives in parts. `new`: makes a register."""
    given, found = list(calls), list[Call]()
    while given:
        three = given[:3]
        made = _after_gather(three, parts) or _before_sum(three, parts, new)
        found += made or three[:1]
        del given[: 3 if made else 1]
    return found


def _after_gather(calls: Sequence[Call], parts: Mapping[Site, Parts]) -> list[Call]:
    if len(calls) < 3 or not _waits_at_once(calls[:2], "all_gather"):
        return []
    start, finish, call = calls
    (x,), (y,), cut = start.ins, start.outs, parts.get(call.site)
    if cut is None or y not in call.ins or call.phase == "weight_gradient":
        return []
    own = replace(call, site=cut.own, ins=tuple([x if r == y else r for r in call.ins]), rows="own")
    return [start, own, finish, _rest(call, cut)]


def _before_sum(calls: Sequence[Call], parts: Mapping[Site, Parts], new: Callable[[Spec], int]) -> list[Call]:
    if len(calls) < 3 or not _waits_at_once(calls[1:], "reduce_scatter"):
        return []
    call, start, finish = calls
    cut = parts.get(call.site)
    if cut is None or cut.exchange is None or cut.sum is None or call.outs != start.ins or call.phase != "forward":
        return []
    (x,), (y,), there = start.ins, start.outs, new(cut.exchange.outs[0])
    first = replace(call, site=cut.others, rows="others")
    own = Call(cut.own, call.phase, (*call.ins, *call.outs), (), "own", len(call.outs))
    return [
        first,
        replace(start, site=cut.exchange, outs=(there,)),
        own,
        replace(finish, site=cut.exchange, ins=(x, there)),
        Call(cut.sum, "forward", (x, there), (y,)),
    ]


def _rest(call: Call, cut: Parts) -> Call:
    return Call(cut.others, call.phase, (*call.ins, *call.outs), (), "others", len(call.outs))


def _waits_at_once(calls: Sequence[Call], kind: str) -> bool:
    """Whether these are a collective of tensor parallelism and the wait for it."""
    start, finish = calls
    same = finish.site is start.site and (start.phase, finish.phase) == ("start", "finish")
    return same and start.site.op_name == kind and start.site.attrs["axis"] == AXIS
