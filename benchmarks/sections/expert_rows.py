"""Sections on how tokens get to experts of several ranks, and on registers of their rows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from sections.page_parts import QUIET, Record, ms, percent, record, section, table


def gathered_tokens() -> str:
    found = record("bench_gathered_tokens_h200")
    by_method = dict[str, dict[str, dict[str, Any]]]()
    for row in found["rows"]:
        settings = dict(word.split("=", 1) for word in row["settings"])
        if method := settings.pop("parallel.ep_method", "").strip('"'):
            by_method.setdefault(str(sorted(settings.items())), {})[method] = row
    pairs = [both for both in by_method.values() if len(both) > 1]
    saved = sorted(1 - both["all_gather"]["median_ms"] / both["all_to_all"]["median_ms"] for both in pairs)
    whole = min(row["median_ms"] for row in found["rows"] if "ep=2" not in row["layout"])
    best = min(found["rows"], key=lambda row: row["median_ms"])
    least = next(row for row in found["rows"] if row["median_ms"] == whole)
    return section(
        "Experts of two ranks, by gathered tokens and by all-to-all",
        f"""\
8 layers of `qwen3-30b-a3b`, 4,096 tokens, 8 sequences a step on two H200s, by `penteract bench` with
`benchmarks/sweeps/gathered_tokens.toml`. With `ep_method = "all_gather"` each token goes to the other rank once; by all-to-all
four of its eight copies do, and are sorted by expert where they arrive. Gathered, steps take {100 * saved[0]:.0f} to {100 * saved[-1]:.0f} % less. The
fastest takes as long as the fastest without expert parallelism ({best["median_ms"]:.0f} and {whole:.0f} ms) in {least["allocated_gib"] - best["allocated_gib"]:.0f} GiB less.
The fullest rank's experts got {min(row["imbalance"] for row in found["rows"] if row.get("imbalance")):.2f} to {max(row["imbalance"] for row in found["rows"] if row.get("imbalance")):.2f} times the mean of rows, where plans take them to be even.

Falls short: with micro-batches of one sequence the host makes its calls more slowly than plans have it. Where a token chooses
no more experts than there are ranks, tokens go by all-to-all as before.""",
        _swept("layout", found["rows"]),
        records=["bench_gathered_tokens_h200.json"],
    )  # fmt: skip


def padded_rows() -> str:
    found, idle = record("bench_padded_rows_h200"), record("idle_of_experts_h200")["rows"]
    pairs = list(zip(found["rows"][::2], found["rows"][1::2], strict=True))  # each exact, then padded
    gains = [padded["tok_s_gpu"] / exact["tok_s_gpu"] - 1 for exact, padded in pairs]
    share = {row["expert_rows"]: row["profiled"]["idle"] for row in idle}
    waits, counts = pairs[gains.index(max(gains))]
    shut = [case for case in record("empty_rank_2xh200")["cases"] if case["shut"] >= 0]
    worst = [
        max(
            abs(a[i] / b[i] - 1)
            for case in shut
            for a, b in zip(case["exact"]["steps"], case["padded"]["steps"], strict=True)
        )
        for i in (0, 1)
    ]
    earlier = next(row for row in record("bench_gathered_tokens_h200")["rows"] if row["layout"] == waits["layout"])
    blocks, timed = record("empty_rank_blocks_2xh200")["cases"], record("bench_blocks_h200")["rows"]
    by_blocks = [b["tok_s_gpu"] / a["tok_s_gpu"] - 1 for a, b in zip(timed[::2], timed[1::2], strict=True)]
    equal = sum(case["exact"]["steps"] == case["padded"]["steps"] for case in blocks)
    again = max(len(case["padded"]["repeated"]) for case in blocks)
    return section(
        "Rows of experts of two ranks, exact and padded",
        f"""\
8 layers of `qwen3-30b-a3b`, 4,096 tokens, 8 sequences a step on two H200s, tokens gathered, by `penteract bench` with
`benchmarks/sweeps/padded_rows.toml`. With `expert_rows = "exact"` the host waits once a layer and micro-batch for how many rows
come; with `"padded"` it waits for none, and buffers have room for the most that can come, here twice the rows of even routing.
Padded, {", ".join(percent(gain) for gain in gains[:-1])} and {percent(gains[-1])} more tokens a second are trained. The most is gained where micro-batches
have one sequence: there the step waits for its host. The largest micro-batch takes {pairs[0][1]["allocated_gib"] - pairs[0][0]["allocated_gib"]:.1f} GiB more.

In a profile of the first pair's steps, of other batches, the GPU is idle for {percent(share["exact"])} of a step with exact rows and for
{percent(share["padded"])} with padded ones (`idle_of_experts_h200`).

In steps of two layers whose routers send all tokens to one rank's experts, so that the other has no rows, losses are within
{worst[0]:.0e} of those with exact rows, and gradient norms within {worst[1]:.0e} (attention adds in any order).

By all-to-all, such steps in blocks of 150 % have the losses and gradient norms of exact sizes to the bit, with
`determinism = "bitwise"`, in {equal} of {len(blocks)} pairs of runs of a rank (`empty_rank_blocks_2xh200`): also where all tokens go to one rank
and {again} of the {len(blocks[0]["exact"]["steps"])} steps are repeated. `benchmarks/sweeps/blocks.toml` times three layouts with exact sizes and in blocks,
of 150 % and twice of 200 %, in which all copies fit: blocks change tokens a second by {", ".join(percent(gain) for gain in by_blocks)}. They help where the step waits for its
host, with micro-batches of one sequence; else padding costs more than waits.

Falls short: plans know too little of the host's waits. The exact step with micro-batches of one sequence took
{waits["median_ms"] / waits["planned_ms"]:.2f} times as long as planned; padded rows save {percent(1 - counts["median_ms"] / waits["median_ms"])} of it, and {percent(1 - counts["planned_ms"] / waits["planned_ms"])} by the plan. How much it
waits depends on the host: on that of the section on gathered tokens the same step took {earlier["median_ms"]:.0f} ms, of which padded rows
would save {percent(1 - counts["median_ms"] / earlier["median_ms"])}. Padded rows with the kernel `grouped` have not been timed.""",
        _swept("layout", found["rows"]),
        _swept("by all-to-all", timed),
        table("profiled with | step, ms | planned, ms | idle | idle, ms | allocated, GiB", [
            (f"`expert_rows={row['expert_rows']}`", ms(row["spread_ms"], row["median_ms"]), f"{row['planned_ms']:,.0f}",
             percent(row["profiled"]["idle"]), f"{row['profiled']['idle_ms']:.1f}", f"{row['allocated_gib']:.2f}")
            for row in idle
        ]),
        records=["bench_padded_rows_h200.json", "idle_of_experts_h200.json", "empty_rank_2xh200.json", "empty_rank_blocks_2xh200.json",
                 "bench_blocks_h200.json"],
    )  # fmt: skip


def _swept(first: str, rows: Sequence[Record]) -> str:
    """Cases of a sweep: measured beside planned."""
    return table(
        f"{first} | step, ms | planned, ms | planned/recorded | tokens/s/GPU | allocated, GiB | over predicted",
        [
            (f"`{re.sub(QUIET, '', row['layout'])}`", ms(row["spread_ms"], row["median_ms"]), f"{row['planned_ms']:,.0f}",
             f"{row['planned_ms'] / row['median_ms']:.2f}", f"{row['tok_s_gpu']:,.0f}", f"{row['allocated_gib']:.2f}",
             f"{100 * (row['allocated_gib'] / row['planned_gib'] - 1):.2f} %")
            for row in rows
        ],
    )  # fmt: skip
