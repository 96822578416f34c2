"""Products of tensor parallelism beside its collectives, and no sums in these (`kernels.collectives = "overlapped"`;
Wang et al. 2023, 10.1145/3567955.3567959).

What reads gathered tokens begins with those that this rank has: the others come meanwhile. A reduce-scatter becomes an
exchange, which copies alone do, and a sum. What makes partial sums begins with those that other ranks need: they are
exchanged while this rank's own are computed.

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
    """Let linear layers beside collectives of tensor parallelism be called in parts, and these be exchanges."""
    made = {v: op for op in tape.ops for v in op.outs}
    read = {v: op for op in tape.ops for v in op.ins if tape.flows[v]}
    for i, op in enumerate(tape.ops):
        if op.program is not None:
            tape.ops[i] = replace(
                op,
                parts=_exchange_and_sum(op.program.forward, mesh),
                parts_back=_exchange_and_sum(op.program.backward, mesh),
            )
        elif op.site.op_name in BY_ROWS and "fp8" not in op.site.attrs:
            neighbours = (made.get(op.ins[0]), read.get(op.outs[0]))
            if any(other is not None and other.name in ("tp_all_gather", "tp_reduce_scatter") for other in neighbours):
                tape.ops[i] = replace(op, parts=_parts(op.site, mesh))
            if op.joint_back is not None:
                tape.ops[i] = replace(tape.ops[i], parts_back=_parts(op.joint_back, mesh))


def _parts(site: Site, mesh: Mesh) -> Parts:
    whole = site.ins[0].shape[0]
    assert isinstance(whole, int)
    own = whole // mesh.size(AXIS)
    return Parts(_of_rows(site, whole, own), _of_rows(site, whole, whole - own))


def _of_rows(site: Site, whole: int, rows: int) -> Site:
    """The op over so many rows of all tensors that have `whole` of them."""

    def cut(spec: Spec) -> Spec:
        return Spec((rows, *spec.shape[1:]), spec.role) if spec.shape[0] == whole else spec

    return replace(site, ins=tuple(map(cut, site.ins)), outs=tuple(map(cut, site.outs)))


def _exchange_and_sum(calls: Iterable[Call], mesh: Mesh) -> Parts | None:
    """Of the reduce-scatter among these calls, if there is one."""
    found = [c.site for c in calls if c.phase == "start" and _is(c, "reduce_scatter")]
    if len(found) != 1:
        return None
    (site,), n = found, mesh.size(AXIS)
    (x,), (y,) = site.ins, site.outs
    outs, attrs = (collectives.result("all_to_all", x, n, {}),), {**site.attrs, "only_others": True}
    there = replace(site, op_name="all_to_all", outs=outs, attrs=attrs)
    return Parts(
        there, Site("sum_shares", (x, x), (y,), attrs={"axis": AXIS, "shares": n}, layer=site.layer, line=site.line)
    )


def parts_of(tape: Tape) -> dict[Site, Parts]:
    """The sites that others take the place of."""
    found = dict[Site, Parts]()
    for op in tape.ops:
        for parts, site in ((op.parts, _site(op, back=False)), (op.parts_back, _site(op, back=True))):
            if parts is not None and site is not None:
                found[site] = parts
    return found


def _site(op: OpCall, *, back: bool) -> Site | None:
    if op.program is None:
        return op.joint_back if back else op.site
    calls = op.program.backward if back else op.program.forward
    return next((c.site for c in calls if _is(c, "reduce_scatter")), None)


def in_parts(calls: Iterable[Call], parts: Mapping[Site, Parts], new: Callable[[Spec], int]) -> list[Call]:
    """The same calls, with those beside collectives in parts. `new`: makes a register."""
    given, found, exchanged = list(calls), list[Call](), dict[int, int]()
    while given:
        call, (second, third) = given[0], (*given[1:3], None, None)[:2]
        made, count = [call], 1
        if reader := _reader_of_gathered(given, parts):
            made, count = _after_gather(given[: reader + 1], parts[given[reader].site]), reader + 1
        elif second is not None and third is not None and _is_summed_at_once(call, second, third, parts):
            made, count = _before_exchange(call, second, parts, exchanged, new), 2
        elif _is(call, "reduce_scatter") and call.site in parts:
            made = [_start(call, parts, exchanged, new)] if call.phase == "start" else _sum(call, parts, exchanged)
        found += made
        del given[:count]
    return found


def _reader_of_gathered(calls: Sequence[Call], parts: Mapping[Site, Parts]) -> int:
    """Where the call is that can begin beside the gather which the first call starts; 0: nowhere. Weight gradients of
    what is gathered can wait for it."""
    if (
        len(calls) < 3
        or calls[0].phase != "start"
        or not _is(calls[0], "all_gather")
        or calls[1].site is not calls[0].site
    ):
        return 0
    (y,) = calls[0].outs
    for i, call in enumerate(calls[2:], 2):
        if y not in call.ins:
            return 0
        if call.phase != "weight_gradient":
            return i if call.site in parts else 0
    return 0


def _after_gather(calls: Sequence[Call], cut: Parts) -> list[Call]:
    start, finish, *waiting, call = calls
    (x,), (y,) = start.ins, start.outs
    own = replace(call, site=cut.first, ins=tuple([x if r == y else r for r in call.ins]), rows="own")
    others = Call(cut.second, call.phase, (*call.ins, *call.outs), (), "others", len(call.outs))
    return [start, own, finish, others, *waiting]


def _is_summed_at_once(call: Call, start: Call, finish: Call, parts: Mapping[Site, Parts]) -> bool:
    at_once = _is(start, "reduce_scatter") and start.phase == "start" and finish.site is start.site
    return at_once and start.site in parts and call.site in parts and call.phase == "forward" and call.outs == start.ins


def _before_exchange(
    call: Call, start: Call, parts: Mapping[Site, Parts], exchanged: dict[int, int], new: Callable[[Spec], int]
) -> list[Call]:
    cut = parts[call.site]
    own = Call(cut.first, call.phase, (*call.ins, *call.outs), (), "own", len(call.outs))
    return [replace(call, site=cut.second, rows="others"), _start(start, parts, exchanged, new), own]


def _start(start: Call, parts: Mapping[Site, Parts], exchanged: dict[int, int], new: Callable[[Spec], int]) -> Call:
    """The exchange in the place of a reduce-scatter."""
    site = parts[start.site].first
    exchanged[start.outs[0]] = there = new(site.outs[0])
    return replace(start, site=site, outs=(there,))


def _sum(finish: Call, parts: Mapping[Site, Parts], exchanged: Mapping[int, int]) -> list[Call]:
    """What follows an exchange."""
    (x, y), cut = finish.ins, parts[finish.site]
    there = (x, exchanged[y])
    return [replace(finish, site=cut.first, ins=there), Call(cut.second, "forward", there, (y,))]


def _is(call: Call, kind: str) -> bool:
    return call.site.op_name == kind and call.site.attrs.get("axis") == AXIS
