"""A rehearsal as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penteract.measure.schemas.rehearsal import CheckpointFile, OwnerBytes, Rehearsal, RehearsedRank, WireCalls
from penteract.units import show_bytes, show_count, show_whole

_KERNELS = 3  # workspaces that are shown
_OF_A_KIND = {"send": "messages sent", "recv": "messages received", "copy": "copies to and from the host"}


def lines(made: Rehearsal) -> Iterator[str]:
    """The whole rehearsal: one rank in full, or a line for each of several."""
    ranks = "1 rank" if made.world == 1 else f"{show_whole(made.world)} ranks"
    yield (
        f"{made.model}, {show_count(made.parameters)} parameters · {made.layout} · {ranks} · {made.precision} · "
        f"{_device(made)}"
    )
    yield ""
    if len(made.ranks) == 1:
        yield from _in_full(made.ranks[0], made)
    else:
        yield from _table([_HEAD, *map(_row, made.ranks)])
    yield ""
    yield from _checked(made)


def _device(made: Rehearsal) -> str:
    if made.usable is None:
        return f"for {'any GPU' if made.device == 'cuda' else 'CPUs'}"
    return f"for {made.device}, {show_bytes(made.usable)} usable"


def _in_full(one: RehearsedRank, made: Rehearsal) -> Iterator[str]:
    at = ", ".join(f"{axis} {i}" for axis, i in one.at.items() if axis != "edp")
    yield f"Rank {one.rank} ({at})"
    busiest = max(one.timeline, key=lambda point: point.most, default=None)
    when = f", in {busiest.action}" if busiest is not None else ""
    room = "" if made.usable is None else f" of {show_bytes(made.usable)}"
    yield f"  start       {show_bytes(one.resident)} on the device; {_groups(one)}"
    yield f"  step        {show_bytes(one.peak)}{room} at its peak{when}; the plan says {show_bytes(one.predicted)}"
    yield from _table([("  owner", "most", "at the peak", "plan", ""), *map(_owner, one.owners)])
    if one.wires:
        yield "  on wires, a step"
        yield from _table([("  what", "over", "calls", "bytes"), *_wires(one.wires)])
    calls = sum(k.calls for k in one.kernels)
    yield f"  kernels     {show_whole(calls)} calls of {len(one.kernels)} kinds in two steps; the largest workspaces:"
    largest = sorted(one.kernels, key=lambda k: -k.workspace)[:_KERNELS]
    yield from _table(
        [(f"  {k.op}", k.phase, k.kernel, show_bytes(k.workspace), " ".join(k.reads)[:60]) for k in largest]
    )
    yield f"  checkpoint  {_checkpoint(one.checkpoint)}"


def _groups(one: RehearsedRank) -> str:
    texts = [f"{g.axis} of {show_whole(g.ranks)}" + (f" for {g.channel}s" if g.channel else "") for g in one.groups]
    return f"{len(texts)} process group{'s' * (len(texts) > 1)}: {', '.join(texts)}" if texts else "no process groups"


def _owner(o: OwnerBytes) -> tuple[str, ...]:
    plan = "-" if o.priced is None else show_bytes(o.priced)
    difference = f"{'+' if o.difference > 0 else '-'}{show_bytes(abs(o.difference))}: {o.why}" if o.difference else ""
    return f"  {o.owner}", show_bytes(o.most), show_bytes(o.at_peak), plan, difference


def _wires(wires: Sequence[WireCalls]) -> Iterator[tuple[str, ...]]:
    """By kind and group."""
    groups = dict[tuple[object, ...], list[WireCalls]]()
    for w in wires:
        groups.setdefault((w.kind, w.axis, w.ranks, w.first, w.step, _carried(w)), []).append(w)
    for some in groups.values():
        kind, axis, ranks, carried = some[0].kind, some[0].axis, some[0].ranks, _carried(some[0])
        over = axis if kind in _OF_A_KIND else f"{axis} of {show_whole(ranks)}"
        calls, size = sum(w.calls for w in some), sum(w.calls * w.bytes for w in some)
        yield f"  {_OF_A_KIND.get(kind, kind)}{carried}", over, show_whole(calls), show_bytes(size)


def _carried(w: WireCalls) -> str:
    """What messages carry: pipeline ranks send values on, and gradients back."""
    what = w.by.rpartition(" ")[2]
    return f", {what}s" if w.kind in ("send", "recv") and what in ("value", "gradient") else ""


def _checkpoint(files: Sequence[CheckpointFile]) -> str:
    if not files:
        return "no file"
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    size, rectangles = sum(file.bytes for file in files), sum(file.rectangles for file in files)
    return f"{files[0].name}{more}, {show_bytes(size)} in {show_whole(rectangles)} rectangles"


_HEAD = ("rank", "kind", "start", "peak", "plan", "wires", "kernels", "checkpoint")


def _row(one: RehearsedRank) -> tuple[str, ...]:
    calls, kernels = sum(w.calls for w in one.wires), sum(k.calls for k in one.kernels)
    return (
        str(one.rank), one.kind, show_bytes(one.resident), show_bytes(one.peak), show_bytes(one.predicted),
        show_whole(calls), show_whole(kernels), show_bytes(sum(file.bytes for file in one.checkpoint)),
    )  # fmt: skip


def _checked(made: Rehearsal) -> Iterator[str]:
    if made.held_against:
        names = ", ".join(f"{rank} ({axis})" for rank, axis in made.held_against.items())
        yield f"Held against the collectives and messages of rank{'s' * (len(made.held_against) > 1)} {names}."
    elif len(made.ranks) > 1:
        yield "Held against each other's collectives and messages."
    if made.assumed:
        yield f"Taken to be on the ranks' hosts: {', '.join(made.assumed)}."
    for mismatch in made.mismatches:
        yield str(mismatch)
    if not made.mismatches:
        found = "No mismatch, but it does not fit" if made.fits is False else "Nothing is wrong"
        yield f"{found}: rehearsed in {made.cpu_seconds:.1f} s of one core."


def too_large(made: Rehearsal) -> tuple[str, str]:
    """(what, fix) of the error where a rank does not fit: who holds what, and what would fit."""
    one = made.fullest
    held = sorted((o for o in one.owners if o.at_peak), key=lambda o: -o.at_peak)
    what = ", ".join(f"{o.owner} {show_bytes(o.at_peak)}" for o in held[:5])
    return f"rank {one.rank} does not fit its {made.device}: {what}", "; or ".join(
        made.smaller
    ) or "more GPUs, or a shorter --batch.sequence_length"


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Columns of even width; the first two to the left, numbers to the right."""
    rows = list(rows)
    widths = [max(len(row[i]) for row in rows) for i in range(max(map(len, rows), default=0))]
    for row in rows:
        cells = [cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
        yield "  ".join(cells).rstrip()
