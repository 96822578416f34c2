"""Measured links as tables of a hardware file, in the fields that plans read."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator

from penteract.config.files.hardware_schema import DIRECT
from penteract.config.hardware import reference
from penteract.measure.calibrate.links.link_workloads import COLLECTIVES, COPIES, PRODUCT, RINGS, SEND, SHIFT
from penteract.measure.calibrate.measured_rows import MeasuredRows
from penteract.readings.costs.curve import Curve
from penteract.readings.costs.interconnect import RING_PASSES

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
    for kind in (*COLLECTIVES, *DIRECT):
        if not (found := dict(rows.under("link", kind))):
            continue  # ranks of this host do not read each other's memory
        yield f"\n[collectives.{kind}]"
        for n in sorted({n for n, _ in found}):
            yield f"{n} = {_points({size: us for (ranks, size), us in found.items() if ranks == n})}"
    yield "\n# Neighbours in pairs, all at once: [bytes, microseconds] one way; in a ring of all, as much coming in."
    ring = dict(rows.under("link", SHIFT))
    widest = max(n for n, _ in ring)
    yield f"[p2p]\none_way = {_points({size: us for (_, size), us in rows.under('link', SEND)})}"
    yield f"both_ways = {_points({size: us for (n, size), us in ring.items() if n == widest})}"
    yield "\n# Products within one long collective of all devices, over products alone.\n[contention]"
    yield from (f"{kind} = {factor:.4f}" for kind, factor in contention(rows).items())
    if slower := slowed(rows):
        yield "\n# Ten collectives of 1 MiB and more while products run, over ten alone: medians.\n[slowed]"
        yield from (f"{kind} = {factor:.4f}" for kind, factor in slower.items())


def contention(rows: MeasuredRows) -> dict[str, float]:
    """How many times as long a product takes while an operation of a kind runs among all devices."""
    alone = dict(rows.under("contended", PRODUCT))
    found = dict[str, float]()
    for kind in (*COLLECTIVES, SEND, SHIFT):
        during = {n: us for (n, _), us in rows.under("contended", kind)}
        if during and (n := max(during), 0) in alone:
            found[kind] = during[n] / alone[n, 0]
    return found


def slowed(rows: MeasuredRows) -> dict[str, float]:
    """How many times as long an operation of a kind takes while products run: the median over sizes and groups."""
    found = dict[str, float]()
    for kind in (*COLLECTIVES, *DIRECT, SEND, SHIFT):
        alone = dict(rows.under("link", kind))
        ratios = [us / alone[key] for key, us in rows.under("under", kind) if key in alone
                  and key[1] >= _RATE]  # fmt: skip
        if ratios:
            found[kind] = statistics.median(ratios)
    return found


def hosts_and_each(rows: MeasuredRows) -> tuple[int, int]:
    """(hosts that ranks were on, ranks of each) when links were measured."""
    hosts = max((n for kind in RINGS for (n, _), _ in rows.under("between", kind)), default=1)
    return hosts, max((n for (n, _), _ in rows.under("contended", PRODUCT)), default=1)


def between_table(rows: MeasuredRows, date: str) -> Iterator[str]:
    """The fabric between hosts, as an entry of the catalogue; nothing of one host, or without a large and a small
    message. Latency + bytes / rate gives the time of both."""
    sends = {size: us for (_, size), us in rows.under("between", SEND)}
    if len(sends) < 2:
        return
    (small, brief), (large, long) = min(sends.items()), max(sends.items())
    hosts, each = hosts_and_each(rows)
    inside = [(size, us) for (_, size), us in rows.under("link", SEND)] or reference().p2p[0]
    rate = (large - small) / max(long - brief, 1e-3 * long)  # bytes in a microsecond
    hops = brief - small / rate - Curve.of(inside).floor  # two, as a send between nodes is priced
    yield "\n# Between hosts: messages of all devices at once; bus bandwidth of collectives as nccl-tests define it."
    yield f"[between]\ngb_per_second = {rate / 1e3:.5g}\nlatency_us = {max(0.0, hops / 2):.4g}"
    source = f"measured by penteract calibrate on {hosts} hosts, {date}"
    yield f"message = {large}\ndevices = {each}\nsource = {json.dumps(source)}"
    points = {kind: found for kind in RINGS if len(found := _bus(rows, kind, each, large)) > 1}
    if points:
        yield "\n[between.bus]"
        yield from (f"{kind} = {json.dumps(found)}" for kind, found in points.items())


def _bus(rows: MeasuredRows, kind: str, each: int, size: int) -> list[list[float]]:
    """GB/s by hosts, of whole hosts; one host first."""
    took = {n: us for (n, at), us in rows.under("between", kind) if at == size}
    if (us := rows.rows.get(("link", kind, each, size))) is not None:
        took[1] = us
    per_byte = {n: RING_PASSES[kind] * (n * each - 1) / (n * each) for n in took}
    return [[n, float(f"{per_byte[n] * size / us / 1e3:.5g}")] for n, us in sorted(took.items())]


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
