"""Measured links as tables of a hardware file, in the fields that plans read."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator

from penteract.measure.calibrate.links.link_workloads import COLLECTIVES, COPIES, PRODUCT, SEND, SHIFT
from penteract.measure.calibrate.measured_rows import MeasuredRows

_RATE = 2**20  # bytes; below, products change the latency of a collective, not its rate


def measured_devices(rows: MeasuredRows) -> int:
    """Between how many devices all links that a file needs were measured; 0: between none."""
    kinds = [dict(rows.under("link", kind)) for kind in (*COLLECTIVES, SEND, SHIFT)]
    if not all(kinds) or not contention(rows):
        return 0
    return max(n for n, _ in kinds[0])


def link_tables(rows: MeasuredRows) -> Iterator[str]:
    """The tables `collectives`, `p2p`, `contention` and `slowed`; none where one of the first three would be empty."""
    if not measured_devices(rows):
        return
    yield "\n# Collectives, hot: [bytes of the whole tensor, microseconds] by ranks; all groups of neighbours at once."
    for kind in COLLECTIVES:
        yield f"\n[collectives.{kind}]"
        found = dict(rows.under("link", kind))
        for n in sorted({n for n, _ in found}):
            yield f"{n} = {_points({size: us for (ranks, size), us in found.items() if ranks == n})}"
    yield "\n# Neighbours in pairs, all at once: [bytes, microseconds] one way; in a ring of all, as much coming in."
    ring = dict(rows.under("link", SHIFT))
    widest = max(n for n, _ in ring)
    yield f"[p2p]\none_way = {_points({size: us for (_, size), us in rows.under('link', SEND)})}"
    yield f"both_ways = {_points({size: us for (n, size), us in ring.items() if n == widest})}"
    yield "\n# Products while collectives run on all devices, over products alone.\n[contention]"
    yield from (f"{kind} = {factor:.4f}" for kind, factor in contention(rows).items())
    if slower := slowed(rows):
        yield "\n# Collectives of 1 MiB and more while products run, over collectives alone: medians.\n[slowed]"
        yield from (f"{kind} = {factor:.4f}" for kind, factor in slower.items())


def contention(rows: MeasuredRows) -> dict[str, float]:
    """How many times as long a product takes while an operation of a kind runs among all devices."""
    alone = dict(rows.under("product_under_link", PRODUCT))
    found = dict[str, float]()
    for kind in (*COLLECTIVES, SEND, SHIFT):
        during = {n: us for (n, _), us in rows.under("product_under_link", kind)}
        if during and (n := max(during), 0) in alone:
            found[kind] = during[n] / alone[n, 0]
    return found


def slowed(rows: MeasuredRows) -> dict[str, float]:
    """How many times as long an operation of a kind takes while products run: the median over sizes and groups."""
    found = dict[str, float]()
    for kind in (*COLLECTIVES, SEND, SHIFT):
        alone = dict(rows.under("link", kind))
        ratios = [us / alone[key] for key, us in rows.under("link_under_product", kind) if key in alone
                  and key[1] >= _RATE]  # fmt: skip
        if ratios:
            found[kind] = statistics.median(ratios)
    return found


def copy_rate(rows: MeasuredRows, way: str) -> float | None:
    """GB/s of each device's copies while all devices of the host copy; None where it was not measured."""
    assert way in COPIES
    rates = {n: size / us / 1e3 for (n, size), us in rows.under(way)}
    return rates[max(rates)] if rates else None


def link_spread(rows: MeasuredRows) -> str:
    """How far rounds of a row lie apart, for the provenance; empty where nothing was measured."""
    spreads = [spread for key, spread in rows.spreads.items() if key[0] == "link"]
    if not spreads:
        return ""
    return f"median {100 * statistics.median(spreads):.1f} %, largest {100 * max(spreads):.1f} %"


def _points(found: dict[int, float]) -> str:
    return json.dumps([[size, float(f"{us:.5g}")] for size, us in sorted(found.items())])
