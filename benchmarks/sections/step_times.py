"""Sections on the time of steps, planned and recorded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import mean, median
from typing import Any

from sections.page_parts import FAR, QUIET, ms, percent, planned_ms, record, section, table, text


def planned_times() -> str:
    rows = list[Sequence[object]]()
    groups = record("planned_times")["groups"]
    sweep = [row["measured_ms"] / row["planned_ms"] for row in groups["playbook_sweep"]["rows"]]
    for name, group in groups.items():
        ratios = sorted(row["measured_ms"] / row["planned_ms"] for row in group["rows"])
        errors = [abs(row["error"]) for row in group["rows"]]
        before = group.get("median_error_before")
        rows.append((f"`{name}`", len(ratios), percent(group["median_error"]), percent(max(errors)),
                     f"{ratios[0]:.2f}–{ratios[-1]:.2f}", "–" if before is None else percent(before)))  # fmt: skip
    return section(
        "Planned times against recorded times",
        f"""\
Recorded step times against the planned time of the same layout. A group is one record; most groups have a section below.
The error is the difference between planned and recorded time, as a share of the recorded time. The last column is the error
before the last change of the planner or of its rates. Groups of which most rows had other kernels are not planned again: theirs is
of an older model of time, which did not simulate the program of the step.

Steps with `elementwise=triton` were recorded when Triton kernels covered only FP8 quantisation and updates. Their planned
times are those for these kernels; current plans of such layouts are faster.

Falls short: tensor and context parallelism of the 1B model over four GPUs, expert parallelism, optimizer states on the host,
and FP8 with plain torch kernels take clearly longer than planned. On many nodes the planner is too optimistic:
{sum(ratio > FAR for ratio in sweep)} of {len(sweep)} runs of the sweep took more than {FAR} times as long as planned. The
time of the 70B row is not valid, as its section explains. Use the times to rank layouts, not as guarantees.""",
        table("group | layouts | median error | largest error | recorded/planned | median error before", rows),
        records=["planned_times.json"],
    )


def four_gpus() -> str:
    found, planned = record("planned_steps_4xh200"), planned_ms("planned_steps_4xh200")
    rows = [
        (f"`{row['layout']}`", row["attention"], ms(row["step_ms"]), f"{planned[row['layout']]:,.0f}",
         f"{row['measured']['step_ms'] / planned[row['layout']]:.2f}",
         f"{max(row['measured']['allocated_gib']):.2f}", percent(row["allocated_over_predicted"] - 1))
        for row in found["rows"]
    ]  # fmt: skip
    return section(
        f"Layouts of a 1B model on four GPUs ({found['gpus']})",
        f"""\
{found["model"]} with sequences of {found["sequence_length"]} tokens, {found["batch"].removesuffix("seqs")} sequences a step.
Each layout was planned and then trained for {len(found["rows"][0]["losses"])} steps; {len(found["rows"][0]["step_ms"])} of them are timed.

Falls short: steps with tensor or context parallelism vary a lot. `tp=4` and both layouts with context parallelism take
longer than planned.""",
        table("layout | attention | step, ms | planned, ms | recorded/planned | allocated, GiB | over predicted", rows),
        records=["planned_steps_4xh200.json", "planned_times.json"],
    )


def profiles() -> str:
    rows = record("step_profile_2xh200")["rows"]
    times = [(f"{row['case']}: {text(row['layout'])}", ms(row["spread_ms"], row["step_ms"]),
              f"{row['planned']['step_ms']:.0f}", f"{row['step_ms'] / row['planned']['step_ms']:.2f}") for row in rows]  # fmt: skip
    wires = [
        (row["case"], kind, wire["number"], row["planned"]["wires"][kind]["number"], f"{wire['ms']:.1f}",
         f"{row['planned']['wires'][kind]['ms']:.1f}", f"{wire['beside_compute']:.2f}",
         f"{row['planned']['wires'][kind]['beside_compute']:.2f}")
        for row in rows for kind, wire in row["measured"]["wires"].items() if kind != "all_reduce"
    ]  # fmt: skip
    return section(
        "Profiles against planned timelines",
        f"""\
{rows[0]["layers"]} layers of {rows[0]["model"]} with sequences of {rows[0]["sequence_length"]} tokens on {rows[0]["gpus"]}.
Steps are timed without a profiler. One more step is profiled and compared with the planned timeline: the number of
collectives, their time, and the share of this time that overlaps with compute.

Falls short: a profiled message includes the wait for the other stage, so messages seem far longer than planned. The
collectives of ZeRO-2 and ZeRO-3 also take longer than planned.""",
        table("case | step, ms | planned, ms | recorded/planned", times),
        table("case | collective | number | planned | ms | planned, ms | overlapped | planned", wires),
        records=["step_profile_2xh200.json"],
    )


def start_of_a_step() -> str:
    found = record("engine_truths_2xh200")
    rows = [("counted at the beginning" if row["counts_at_begin"] else "sent by the previous step",
             f"{median(rank['median_ms'] for rank in row['ranks']):.1f}",
             f"{mean(rank['mean_begin_ms'] for rank in row['ranks']):.2f}") for row in found["counts"]["rows"]]  # fmt: skip
    freed = found["freed"]["allocated_gib"][0]
    return section(
        "Start of a step, and freed memory",
        f"""\
{found["layers"]} layers of {found["model"]}, `{found["counts"]["layout"]}`. A step needs the number of target tokens of all
ranks. The engine sends it with the totals of the previous step, so that the first kernel does not wait for a collective. The
times of whole steps differ by less than their spread.

Deleting a `Trainer` frees its memory at once: {freed["with the first"]:.2f} GiB allocated before,
{freed["after the first"]:.2f} GiB after.""",
        table("number of targets | step, ms | begin to first kernel, ms", rows),
        records=["engine_truths_2xh200.json"],
    )


SWEPT = ("bench_one_card_h200", "bench_one_card_again_h200", "bench_two_cards_h200", "bench_two_experts_h200",
         "bench_two_experts_again_h200")  # fmt: skip


def drawn_sweeps() -> str:
    tables, short = list[str](), list[str]()
    first = {tuple(row["settings"]): row for row in record(SWEPT[0])["rows"]}
    small = next(row for row in record(SWEPT[0])["rows"] if row.get("commit"))  # measured again
    again = [abs(row["median_ms"] / first[tuple(row["settings"])]["median_ms"] - 1) for row in record(SWEPT[1])["rows"]
             if row["spread_ms"][1] < 1.5 * row["spread_ms"][0]]  # fmt: skip
    before, fast = record(SWEPT[0])["before"][0], first[tuple(small["settings"])]
    experts = {tuple(row["settings"]): row["median_ms"] for row in record("bench_two_experts_h200")["rows"]}
    ratios = sorted(
        row["median_ms"] / experts[tuple(row["settings"])] for row in record("bench_two_experts_again_h200")["rows"]
    )
    host = next(row["host_ms"] for row in record("host_calls_h200")["rows"] if row["case"] == "experts")
    slower = record("host_of_experts_h200")["another_host"]["host_ms"] / host
    quicker, held_up = [r for r in ratios if r < 1], [r for r in ratios if r > 1]
    for name in SWEPT:
        found = record(name)
        errors = [abs(row["planned_ms"] / row["median_ms"] - 1) for row in found["rows"]]
        memory = [abs(row["planned_gib"] / row["allocated_gib"] - 1) for row in found["rows"]]
        short.append(
            f"`{name}`: {len(found['rows'])} cases measured, {len(found['not_measured'])} not; step time is off by"
            f" {percent(mean(errors))} on average, {percent(median(errors))} in the median and {percent(max(errors))} at worst,"
            f" allocated memory by {100 * mean(memory):.2f} %."
        )
        tables.append(table("layout | model, tokens, dtype | step, ms | planned, ms | planned/recorded | allocated, GiB | over predicted", [
            (f"`{row['layout'].replace(',elementwise=triton,fuse=all', '')}`", drawn_model(row["settings"]),
             ms(row["spread_ms"], row["median_ms"]), f"{row['planned_ms']:,.0f}",
             f"{row['planned_ms'] / row['median_ms']:.2f}", f"{row['allocated_gib']:.2f}",
             f"{100 * (row['allocated_gib'] / row['planned_gib'] - 1):.2f} %")
            for row in found["rows"]
        ]))  # fmt: skip
    return section(
        "Drawn cases",
        f"""\
`benchmarks/drawn_sweeps.py` drew twelve cases a sweep, with a seed that was committed before any was measured;
`penteract bench` ran them with cuDNN attention and Triton kernels, in processes of their own. Nothing is fitted to them.

{" ".join(short)} `bench_one_card_again_h200`: six of the first twelve on another day and machine; their steps differ from the
first by {percent(mean(again))} on average, the small model in FP8 apart. Where most of a step is attention over heads of 64, it is planned up to 1.19 times too long. The small model in FP8
that recomputes everything was held up by its host: {before["median_ms"]:,.0f} ms a step when each launch of a Triton kernel went through its
JIT, {fast["median_ms"]:,.0f} ms now that launches are bound. On the other machine it was measured before that only.

`bench_two_experts_again_h200`: the twelve cases with experts again, with routers as one kernel each way. {len(quicker)} take {quicker[0]:.2f} to
{quicker[-1]:.2f} of their time before; {len(held_up)} with small micro-batches take {held_up[0]:.2f} to {held_up[-1]:.2f} times as long, which plans do not
foresee. The host of that sweep was not measured; another of its kind needed {slower:.1f} times as long for a step's calls that day
as the host whose calls plans have (`host_of_experts_h200`, `host_calls_h200`).

Tokens are not spread evenly over experts, as plans take them to be: that is why memory is off in rows with `ep=2`.
[accuracy.md](accuracy.md) plans these rows once more with the imbalance that was counted.""",
        *tables, records=[f"{name}.json" for name in SWEPT],
    )  # fmt: skip


def planned_first() -> str:
    found = [record(name) for name in PLANS_MEASURED]
    again = record("bench_plan_30b_again_4xh200")
    first = {frozenset(row["settings"]): row["median_ms"] for row in found[1]["rows"]}
    repeated = [
        (f"`{re.sub(QUIET, '', row['layout'])}`", _kernels_of(row), ms(row["spread_ms"], row["median_ms"]),
         f"{row['median_ms'] / first[frozenset(row['settings'])]:.2f}", f"{row['planned_ms']:,.0f}",
         f"{row['planned_ms'] / row['median_ms']:.2f}")
        for row in again["rows"]
    ]  # fmt: skip
    return section(
        "The plan's first layouts, measured",
        f"""\
`penteract bench MODEL --top N` on four H200s runs the first layouts of a plan as it writes them. *regret*: by how much the plan's
first is slower than the fastest of those that ran: of two or three layouts it tells little about their order.
Plans without packages (`--packages none`) are those of torch's kernels, measured at commit `f1d59de`. The device memory of pipelines over four GPUs is planned by a
size that was found in these rows.

The last table has five of these layouts of the model with experts, measured again at commit `{again["commit"][:7]}` with routers as one kernel
each way, and weight gradients of torch's grouped products that go into their bucket in one pass.

Falls short: torch's grouped products of experts copy each result, which plans do not count.""",
        table("model | kernels | layouts | the fastest is number | its tokens/s/GPU | regret | steps over planned | allocated, mean (worst)", [
            _plan_measured(one, number) for one in found for number in range(len(one["sweeps"]))
        ]),
        *(_plan_table(one) for one in found),
        table("layout | kernels | step, ms | of its time before | planned, ms | planned ÷ measured", repeated),
        records=[f"{name}.json" for name in (*PLANS_MEASURED, "bench_plan_30b_again_4xh200", "bench_four_cards_h200")],
    )  # fmt: skip


PLANS_MEASURED = ("bench_plan_8b_4xh200", "bench_plan_30b_4xh200")


def _plan_measured(found: Any, number: int) -> Sequence[object]:
    """What one sweep of a record says, as a row."""
    rows = [row for row in found["rows"] if row["sweep"] == number]
    best = min(rows, key=lambda row: row["median_ms"])
    errors = [row["median_ms"] / row["planned_ms"] - 1 for row in rows]
    memory = [abs(row["planned_gib"] / row["allocated_gib"] - 1) for row in rows]
    return (
        found["preset"], _kernels_of(rows[0]), len(rows), best["place"], f"{best['tok_s_gpu']:,.0f}",
        percent(found["sweeps"][number]["regret"]), f"{percent(min(errors))} to {percent(max(errors))}",
        f"{100 * mean(memory):.2f} % ({100 * max(memory):.2f} %)",
    )  # fmt: skip


def _kernels_of(row: Any) -> str:
    with_packages = 'kernels.attention="fa4"' in row["settings"]
    return "`penteract[gpu]`" if with_packages else "torch's"


def _plan_table(found: Any) -> str:
    return table("layout | kernels | plan | step, ms | planned, ms | tokens/s/GPU | allocated, GiB | over predicted", [
        (f"`{re.sub(QUIET, '', row['layout'])}`", _kernels_of(row), row["place"],
         ms(row["spread_ms"], row["median_ms"]), f"{row['planned_ms']:,.0f}", f"{row['tok_s_gpu']:,.0f}",
         f"{row['allocated_gib']:.2f}", f"{100 * (row['allocated_gib'] / row['planned_gib'] - 1):.2f} %")
        for row in found["rows"]
    ])  # fmt: skip


def drawn_model(settings: Sequence[str]) -> str:
    """The model, sequence length and dtype that the settings of a run name."""
    named = dict(one.replace('"', "").split("=", 1) for one in settings)
    size, layers = named.get("model.hidden_size", "2048"), named.get("model.layers", "16")
    length = int(named["batch.sequence_length"])
    return f"{int(size):,} wide, {layers} layers, {length:,}, {named['precision.dtype']}"


def profile_of_a_step() -> str:
    found = record("profile_a1_h100")
    step = found["step"]
    rows = [
        (one["label"] if one["level"] else f"– {one['label']}", f"{one['picoseconds'] / 1e9:,.1f}", percent(one["share"]))
        for one in found["waterfall"]
    ]  # fmt: skip
    ops = sorted(found["ops"], key=lambda op: -op["measured"])[:16]
    measured = [
        (f"`{op['name']}`", op["calls"], f"{op['predicted'] / 1e9:,.1f}", f"{op['measured'] / 1e9:,.1f}", percent(op["share"]),
         f"{100 * op['reached']:.0f} % of {op['ceiling']}" if op["reached"] else "")
        for op in ops
    ]  # fmt: skip
    return section(
        "Where a step goes",
        f"""\
`penteract profile` of 8 layers of Llama-3-8B, two sequences of 8,192 tokens, bf16, on an {found["made"]["device"]} with FA4:
{step["measured"] / 1e9:,.0f} ms a step (median of ten), {step["predicted"] / 1e9:,.0f} ms predicted from the catalogue's
curves of an H100, {step["slowdown"]:.2f} times as long under the profiler. First the step from its ideal to its measured
time; then the ops that take longest, in milliseconds a step. Ops that only one side has: {percent(found["unmatched"]["measured_share"])} of
the measured step. The text has 257 tokens of bytes, so the embedding's gradient is slower than with random tokens.""",
        table("part | ms | share of the step", rows),
        table("op | calls | predicted, ms | measured, ms | share | of its ceiling", measured),
        records=["profile_a1_h100.json"],
    )  # fmt: skip


def newcomers_path() -> str:
    found, weights = record("default_path_h200"), record("initial_weights_h200")
    losses, starts = found["losses"], found["starts"]
    rows = [
        (
            row["host"],
            row["commit"],
            "kept" if row["bytecode"] else "none",
            row["first"] or "-",
            *(", ".join(map(str, row[kind])) or "-" for kind in ("cold", "warm")),
        )
        for row in starts["rows"]
    ]
    speed = found["speed"]
    alone, by_hand = speed["default, 16 sequences"], {k: v for k, v in speed["by_hand"].items() if isinstance(v, int)}
    before = found["starts_compiled_ahead"]["hosts"][0]
    torchs, kernels = (
        min((row for row in weights["rows"] if row["elementwise"] == kind), key=lambda row: min(row["seconds"]))
        for kind in ("reference", "triton")
    )
    return section(
        "The path of a newcomer",
        f"""\
`penteract train` with a preset and no kernel named. Over {losses["steps"]} steps of `{found["model"]}` on text the losses of the kernels that it
chooses are {losses["kernels_apart"]:.3f} nats a token from those of plain torch, on average; another seed's are {losses["seeds_apart"]:.3f} away.

On one {found["device"]} it takes micro-batches of {alone["micro_batch_size"]} and {speed["default"]["sequence_length"]} tokens; with 16 sequences a step it trains {alone["tokens_per_s"]:,} tokens/s, {speed["share"]:.2f} of
the best by hand ({", ".join(f"{rate:,} with micro-batches of {size}" for size, rate in by_hand.items())}; 16 do not fit).

An 8B on two GPUs ends its first step so many seconds after the command as the table says: on a machine that has read none of the
files, then with no compiled kernel kept, and with all. On the third host the commits took turns. On the
first three Python was not let keep bytecode, so each process compiled the modules of kernels' packages. A process of the host compiles
kernels while ranks start: where ranks compiled alone, an earlier commit took {before["ranks alone, cold"][0]} s cold, and {before["ahead, cold"][0]} with it.

20 s cold and 10 s warm were the goal. Most of a warm start is what Python imports: torch, then FlashAttention, quack and what they
are written in. Hosts differ by a fifth.

A GPU draws {torchs["elements"] / 1e9:.1f} billion weights, with their master weights, in {min(torchs["seconds"]):.2f} s by torch and in {min(kernels["seconds"]):.2f} by a kernel in Triton; {sum(weights["equal"].values())} of {len(weights["equal"])}
small models have the bits that a CPU draws.""",
        table("host | commit | bytecode | first, s | cold, s | warm, s", rows),
        records=["default_path_h200.json", "initial_weights_h200.json"],
    )
