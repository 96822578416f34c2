"""Write docs/benchmarks.md from the records in benchmarks/results.

    python benchmarks/tables.py          # writes the page
    python benchmarks/tables.py --check  # exit code 1 if the page is not what the records give

Each function below writes one section: what was measured and how, what falls short, and a table. All numbers come from
records, which are listed below the tables.
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, cast

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
Record = Mapping[str, Any]
LAST = 10  # the loss of a run is the mean of its last 10 steps
FAR = 2  # from this ratio of recorded to planned time on, a row of the sweep is counted as far off

# The names of some cases in the records -> what the page shows.
CASES = {
    "every second layer recomputed": "full recomputation of every second layer",
    "activations and norms recomputed": "recomputation of SwiGLU and norms",
    "full recomputation, inputs of layers on the host": "full recomputation, layer inputs offloaded to the host",
    "bf16 alone, rounded by chance": "bf16 without master weights, stochastic rounding",
    "moments in 8 bits": "8-bit moments",
    "gradients summed in bf16": "gradients reduced in bf16",
    "ZeRO 3, parameters kept gathered": "ZeRO 3, reshard after the step",
    "ZeRO 3, gradients summed once": "ZeRO 3, one reduce-scatter a step",
    "optimizer on the host": "optimizer states offloaded to the host",
    "bf16, moments in 16 bits": "bf16, 16-bit moments",
    "bf16, moments in 8 bits": "bf16, 8-bit moments",
    "bf16, moments in 8 bits but of the embedding, of others in 16 and 32":
        "bf16, 8-bit moments; embedding and output projections 32-bit, layer 0 16-bit",
    "bf16, no master, moments in 8 bits": "bf16 without master weights, 8-bit moments",
    "bf16, sums in 16 bits": "bf16, gradients reduced in bf16",
    "fp16, moments in 8 bits": "fp16, 8-bit moments",
    "fp8_rowwise, powers of two, last layer and output projections in bf16":
        "fp8_rowwise, scales are powers of two, last layer and output projections in bf16",
    "embedding: few ids": "embedding: 64 ids",
    "swiglu: 768, of experts": "swiglu: 768, experts",
}  # fmt: skip

INTRODUCTION = """\
# Benchmarks

`python benchmarks/tables.py` writes this page from the records in [`benchmarks/results/`](../benchmarks/results/). Do not
edit it by hand: a test compares it with the records. Most records contain the command, the commit and the versions that
they were made with.

How to read the tables:

- A step time is the median over the timed steps. The range in brackets is from the shortest to the longest.
- "Planned" is the time that the planner simulates for the same layout. "Recorded/planned" above 1 means that the step took
  longer than planned.
- "Predicted" memory is counted by the planner. "Allocated" is the largest peak that torch reported on any rank.
- Layouts are written as `penteract plan --layout` takes them."""


def record(name: str) -> Record:
    """The record `benchmarks/results/NAME.json`."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def planned_ms(group: str) -> dict[str, float]:
    """The planned milliseconds of each row of a record, from planned_times.json."""
    return {row["row"]: row["planned_ms"] for row in record("planned_times")["groups"][group]["rows"]}


def section(title: str, prose: str, *tables: str, records: Sequence[str]) -> str:
    """A heading, paragraphs, tables, and a list of the records they come from."""
    filled = [textwrap.fill(one, 120, break_long_words=False, break_on_hyphens=False) for one in prose.split("\n\n")]
    listed = "\n".join(f"- {origin(file)}" for file in records)
    return "\n\n".join([f"## {title}", *filled, *tables, f"Records:\n\n{listed}"])


def origin(file: str) -> str:
    """A link to a record, with the device, versions, commit and date that it contains."""
    link = f"[`{file}`](../benchmarks/results/{file})"
    if not file.endswith(".json"):
        return link
    found = record(file.removesuffix(".json"))
    versions = found.get("versions", found)
    commit = re.sub("^([0-9a-f]{7})[0-9a-f]*", r"\1", found.get("commit", ""))
    details: list[str] = [
        found.get("device") or found.get("gpu") or "",
        *(f"{name} {versions[name]}" for name in ("torch", "nccl", "python") if name in versions),
        f"commit `{commit}`" if commit else "",
        found.get("date", ""),
    ]
    return f"{link}: {', '.join(one for one in details if one)}" if any(details) else link


def parts(of: Record) -> list[tuple[str, dict[str, Any]]]:
    """The entries of a record that are objects."""
    return [(name, cast("dict[str, Any]", one)) for name, one in of.items() if isinstance(one, dict)]


def table(head: str, rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table. `head`: the names of its columns, separated by `|`; those after the first are right-aligned."""
    names = [name.strip() for name in head.split("|")]
    rule = ["---", *["---:"] * (len(names) - 1)]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (names, rule, *rows))


def ms(steps: Sequence[float], middle: float | None = None) -> str:
    """Median milliseconds of timed steps, with their range."""
    return f"{median(steps) if middle is None else middle:,.0f} ({min(steps):,.0f}–{max(steps):,.0f})"


def percent(share: float) -> str:
    """A share as a percentage with one digit."""
    return f"{round(100 * share, 1) + 0.0:.1f} %"  # + 0.0: no minus before a zero


def text(layout: Mapping[str, Any]) -> str:
    """A layout of a record, as --layout takes it."""
    settings: dict[str, Any] = {
        k: "+".join(cast("list[str]", v)) if isinstance(v, list) else v for k, v in layout.items()
    }
    return "`" + ",".join(f"{k}={v}" for k, v in settings.items() if k != "gradient_accumulation_steps") + "`"


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
of an older model of time, which did not simulate the program of the step.

Steps with `elementwise=triton` were recorded when Triton kernels covered only FP8 quantisation and updates. Their planned
times are those for these kernels; current plans of such layouts are faster.

Falls short: tensor and context parallelism of the 1B model over four GPUs, expert parallelism, optimizer states on the host,
and FP8 with plain torch kernels take clearly longer than planned. On many nodes the planner is too optimistic:
{sum(ratio > FAR for ratio in sweep)} of {len(sweep)} runs of the sweep took more than {FAR} times as long as planned. The
time of the 70B row is not valid, as its section explains. Use the times to rank layouts, not as guarantees.""",
        table(
            "group | layouts | median error | largest error | recorded/planned | median error of the older model", rows
        ),
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


def _options(name: str) -> str:
    """The table of a record of memory options."""
    planned = planned_ms(name)
    return table(
        "option | step, ms | planned, ms | recorded/planned | predicted, GiB | allocated, GiB | loss: first, last",
        [
            (CASES.get(row["case"], row["case"]), ms(row["step_ms"]), f"{planned[row['case']]:,.0f}",
             f"{row['median_ms'] / planned[row['case']]:.2f}", f"{max(row['predicted']['allocated_gib']):.2f}",
             f"{max(row['measured']['allocated_gib']):.2f}", f"{row['losses'][0]:.2f}, {row['losses'][-1]:.2f}")
            for row in record(name)["rows"]
        ],
    )  # fmt: skip


def _setting(found: Record) -> str:
    """What the rows of a record of memory options have in common."""
    return (f"{found['model']} with sequences of {found['sequence_length']} tokens on {found['gpus']}, "
            f"{found['sequences_a_step']} sequences a step")  # fmt: skip


def memory_options() -> str:
    two, four = "memory_options_8b_2xh200", "memory_options_8b_4xh200"
    return section(
        "Ways to fit an 8B model",
        f"""\
{_setting(record(two))}. The first row is the base: ZeRO-1, bf16 with fp32 master weights, chunked loss. Each other row
changes one option. Quantisation to FP8 and updates use our Triton kernels; the last two rows use plain torch instead.

Falls short: {len(record(two)["rows"][0]["losses"])} steps at a high learning rate do not show convergence. The loss rises
before it falls. Muon and optimizer states on the host are slow with so few GPUs.""",
        _options(two),
        f"{_setting(record(four))}, with plain torch instead of Triton kernels:",
        _options(four),
        records=[f"{two}.json", f"{four}.json", "planned_times.json"],
    )


def large_model() -> str:
    found = record("memory_options_70b_4xh200")
    rows = [(row["case"], f"{max(row['predicted']['allocated_gib']):.2f}",
             f"{max(row['measured']['allocated_gib']):.2f}") for row in found["rows"]]  # fmt: skip
    return section(
        "Memory of a 70B model",
        f"""\
{_setting(found)}.

Falls short: the loss did not fall at the chosen learning rate, so the recorded times are not valid and not shown.""",
        table("option | predicted, GiB | allocated, GiB", rows),
        records=["memory_options_70b_4xh200.json"],
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


BESIDE = {
    "A1": "8 layers of Llama-3-8B, 8,192 tokens, 2 sequences", "B1": "1B, 4,096 tokens, 4 sequences",
    "E1": "1B, 32,768 tokens, 1 sequence", "F1": "4 layers of Qwen3-30B-A3B, 4,096 tokens, 4 sequences",
    "A1_fp8": "8 layers of Llama-3-8B, 8,192 tokens, 2 sequences, FP8 tensorwise",
    "A2": "8B, data parallel 2, 8,192 tokens, 1 sequence a GPU", "tp2": "8B, tensor parallel 2, 8,192 tokens, 2 sequences",
    "pp2": "8B, pipeline parallel 2, 8,192 tokens, 16 micro-batches",
}  # fmt: skip


def beside_table(found: Record) -> str:
    """Both sides of each row of a record of `beside_torchtitan.py`."""
    rows = [
        (
            BESIDE[row["case"]], f"{row['peer_tok_s_gpu'][row['peer_mode']]:,.0f}", f"{row['tok_s_gpu']:,.0f}",
            f"{row['ratio']:.2f}", f"{len(row['our_runs'])} and {len(row['peer_runs'])}",
            f"{row['planned_over_measured']:.2f}",
            f"{row['our_runs'][-1]['allocated_gib']:.1f} ({row['planned_gib']:.1f} predicted)",
            f"{row['peer_runs'][-1]['allocated_gib']:.1f}",
        )
        for row in found["rows"]
    ]  # fmt: skip
    return table(
        "case | torchtitan, tokens/s/GPU | ours, tokens/s/GPU | ours/torchtitan | runs, ours and theirs"
        " | planned/measured | ours, GiB | torchtitan, GiB",
        rows,
    )


def more_memory(found: Record) -> str:
    """In how many rows we allocate more than the peer."""
    rows = found["rows"]
    larger = sum(row["our_runs"][-1]["allocated_gib"] > row["peer_runs"][-1]["allocated_gib"] for row in rows)
    return f"we allocate more memory than torchtitan in {larger} of {len(rows)} rows"


def against_torchtitan() -> str:
    found = record("beside_torchtitan")
    clocks = [run["clock_mhz"] for row in found["rows"] for run in row["our_runs"]]
    repeated = [[run["tok_s_gpu"] for run in row["our_runs"]] for row in found["rows"] if len(row["our_runs"]) > 1]
    most = max((max(speeds) / min(speeds) - 1 for speeds in repeated), default=0.0)
    spread = f"Our repeated runs of a row differ by up to {percent(most)}." if repeated else "Each side ran once a row."
    worst = max(found["rows"], key=lambda row: abs(row["planned_over_measured"] - 1))
    others = [
        f'"{BESIDE[row["case"]]}"' for row in found["rows"] if row.get("commit", found["commit"]) != found["commit"]
    ]
    of_another = f"{' and '.join(others)} {'is' if len(others) == 1 else 'are'}" if others else "none is"
    return section(
        "Against torchtitan, on one GPU",
        f"""\
torchtitan 0.2.2 with `torch.compile`, in its own mode for one GPU (autocast over fp32 parameters), and this program with its
fastest kernels. Both run as separate processes on an H200, one after the other, with the same four batches of random tokens
and fp32 gradients. A time is the median of the last 10 of 18 steps, by CUDA events. A run counts only if its loss is finite
and falls. Runs of a row alternate, in one call on one GPU; {of_another} of another commit.

Power limits the clock of the GPU: it was {min(clocks):,.0f} to {max(clocks):,.0f} MHz in our runs. {spread}

Falls short: {more_memory(found)}. The planned time of "{BESIDE[worst["case"]]}" is
{worst["planned_over_measured"]:.2f} times the measured time.""",
        beside_table(found),
        records=["beside_torchtitan.json"],
    )


def against_torchtitan_elsewhere() -> str:
    two, h100 = record("beside_torchtitan_two"), record("beside_torchtitan_h100")
    off = [row["planned_over_measured"] for row in h100["rows"]]
    return section(
        "Against torchtitan, on two H200s and on an H100",
        f"""\
As above, each side once a row. On two GPUs torchtitan uses FSDP2 for data parallelism; under tensor and pipeline parallelism
(1F1B) it runs FSDP2 over one rank, without which it computes in fp32. Ours: ZeRO 1; sequence parallelism; an interleaved
schedule of 16 stages, of which the last has a layer less. Memory is that of the fullest rank.

Falls short: on two GPUs {more_memory(two)}. On the H100, for which fewer rates were measured, steps are planned
{min(off):.2f} to {max(off):.2f} times as long as they take.""",
        beside_table(two),
        beside_table(h100),
        records=["beside_torchtitan_two.json", "beside_torchtitan_h100.json"],
    )


def drawn_sweeps() -> str:
    tables, short = list[str](), list[str]()
    for name in ("bench_one_card_h200", "bench_two_cards_h200"):
        found = record(name)
        errors = [abs(row["planned_ms"] / row["median_ms"] - 1) for row in found["rows"]]
        memory = [abs(row["planned_gib"] / row["allocated_gib"] - 1) for row in found["rows"]]
        short.append(
            f"`{name}`: {len(found['rows'])} cases measured, {len(found['not_measured'])} not; step time is off by"
            f" {percent(mean(errors))} on average, {percent(median(errors))} in the median and {percent(max(errors))} at worst,"
            f" allocated memory by {100 * mean(memory):.2f} %."
        )
        tables.append(table("layout | model, tokens, dtype | step, ms | planned, ms | planned/recorded | allocated, GiB | over predicted", [
            (f"`{row['layout'].removesuffix(',elementwise=triton,fuse=all')}`", drawn_model(row["settings"]),
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

{" ".join(short)} Where most of a step is attention over heads of 64, it is planned up to 1.19 times too long. The small model in FP8
that recomputes everything is held up by its host, which the plan does not see: its steps differ by more than a factor of two.

Falls short: the sweep on two GPUs was stopped by its time limit, and the one with experts was not run.""",
        *tables, records=["bench_one_card_h200.json", "bench_two_cards_h200.json"],
    )  # fmt: skip


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


def without_memory() -> str:
    found = record("out_of_memory")
    rows = [
        (row["try"].replace("_", " "), row["device"], row["as_it_is"]["exit_code"],
         f"`{' '.join(row['with_the_first_change']['words'][-2:])}`",
         re.search(r"memory (.*?)(?:  |$)", row["with_the_first_change"]["last"])[1])
        for row in found["rows"]
    ]  # fmt: skip
    return section(
        "Runs without memory",
        """\
`penteract train` of models that a GPU has no memory for: it must end with exit code 71 after one line that names owners
and changes; then the same run with the first of these changes, of which two steps are taken.

Falls short: of five ways to run out of memory three were tried. A sequence of 262,144 tokens was refused because the text's
validation part was shorter, and an 8B without ZeRO fits two H200s.""",
        table("try | device | exit code | first change | memory then", rows),
        records=["out_of_memory.json"],
    )


FIGURES = {"zero_memoryusage_8b": "ZeRO, 8B", "tp_memoryusage_70b": "tensor parallelism, 70B",
           "tp_sp_memoryusage_70b": "with sequence parallelism, 70B", "cp_memoryusage_8b": "context parallelism, 8B",
           "pp_memoryusage_8b": "pipeline parallelism, 8B"}  # fmt: skip


def playbook_figures() -> str:
    found = record("playbook_figures")
    rows = list[Sequence[object]]()
    for name, cells in found["memory"].items():
        layouts = dict.fromkeys(cell.rpartition(": ")[0] for cell in cells)
        for layout in layouts:
            kinds = [cells[f"{layout}: {kind}"] for kind in ("parameters", "gradients", "optimizer", "activations")]
            rows.append((f"{FIGURES[name]}: {layout}", *(f"{middle:.2f}" for _, _, middle, _ in kinds),
                         f"{kinds[-1][1]:.2f}–{kinds[-1][3]:.2f}"))  # fmt: skip
    bubbles = found["bubbles"]
    return section(
        "The Playbook's figures",
        f"""\
Memory that the Ultra-Scale Playbook draws for Llama-3 models, and ours for the same layouts with one sequence: ours over
theirs, in the median of a figure's sequence lengths; for activations the range too. Its figures lie beside a checkout, not in
it. Why they differ: the book draws 2 bytes of gradients a parameter where ours are summed in fp32, 4 bytes; and 8 bytes of
optimizer states, without master weights, where ours are 10 with the master's other half. Its activations leave out the head.
Its tensor parallelism without sequence parallelism keeps norms and residuals on every rank, which ours never does; the same in
its figure of context parallelism. With 16 ranks of tensor parallelism, key-value heads of 70B are on two ranks each.

Bubbles of pipelines of 8 ranks, as idle over busy time: {bubbles["compared"]} of its {bubbles["compared"] + bubbles["no schedule of ours"]}
figures are equal. The others are interleaved with fewer micro-batches than ranks, which no schedule of ours runs.""",
        table("figure: layout | parameters | gradients | optimizer | activations | activations, range", rows),
        records=["playbook_figures.json"],
    )


def triton_kernels() -> str:
    found, copy = record("one_pass_h200"), record("ceilings_8xh200")["hbm"]["d2d_copy_2GiB"]["gbps"]
    ours = [row for row in found["rows"] if row["kernel"] == "triton"]
    rows = [
        (CASES.get(row["case"], row["case"]), row["phase"].replace("_", " "), f"{row['ms of reference']:.3f}",
         f"{row['ms']:.3f}", f"{row['GB/s'] / 1e3:.2f}" if row.get("GB/s", 0) > 300 else "")
        for row in ours
    ]  # fmt: skip
    slower = [f"{CASES.get(row['case'], row['case'])}, {row['phase'].replace('_', ' ')}"
              for row in ours if round(row["ms"], 3) > round(row["ms of reference"], 3)]  # fmt: skip
    experts = [
        (row["op"], row["phase"].replace("_", " "), row["kernel"], f"{row['ms']:.3f}",
         f"{row['TFLOP/s']:.0f} TFLOP/s" if "TFLOP/s" in row else f"{row['GB/s'] / 1e3:.2f} TB/s")
        for row in record("expert_kernels_h200")["rows"] if "phase" in row and row.get("GB/s", 1e3) > 300
    ]  # fmt: skip
    return section(
        "Triton kernels against plain torch",
        f"""\
Triton kernels that read and write each tensor once, and the reference kernels in plain torch, on one H200 with 16,384 tokens
(4,096 for the loss). Each kernel was first compared with the reference in fp32. A copy of device memory reaches
{copy / 1e3:.2f} TB/s.

The second table has routing, and the matrix products of 128 experts with 131,072 rows.

Falls short: slower than plain torch: {"; ".join(slower)}.""",
        table("op | phase | plain torch, ms | Triton, ms | TB/s", rows),
        table("op | phase | kernel | ms | speed", experts),
        records=["one_pass_h200.json", "expert_kernels_h200.json", "ceilings_8xh200.json"],
    )


def attention() -> str:
    found = record("flash_attention")
    rows = [
        (name, found[name]["layers"], case, ms(run["step_ms"]), f"{run['priced_gib']:.2f}", f"{run['peak_allocated_gib']:.2f}")
        for name in ("llama-3.2-1b", "llama-3.1-8b") for case, run in parts(found[name])
        if "step_ms" in run
    ]  # fmt: skip
    kernels = [(row["case"], f"{row['forward']['ms']:.2f}", f"{row['input_gradient']['ms']:.2f}")
               for row in found["speed"]["rows"]]  # fmt: skip
    calls = found["calls"]
    length = found["llama-3.2-1b"]["flash"]["sequence_length"]
    return section(
        "Attention kernels",
        f"""\
One sequence of {length} tokens a step on one GPU. `flash` takes packed documents, `cudnn` takes whole sequences, and
`reference` is plain torch. {sum(row["held"] for row in calls["rows"])} of {len(calls["rows"])} single calls agree with the
reference within the tolerance. Declared and measured workspace differ by at most
{max(abs(one) for one in calls["workspace_measured_less_declared"])} bytes.

Falls short: some losses of whole runs differ by more than the bound: {"; ".join(_not_held(found))}. The most likely reason is
rounding that grows over the steps.""",
        table("model | layers | kernel | step, ms | predicted, GiB | allocated, GiB", rows),
        table("call: tokens x sequences | forward, ms | backward, ms", kernels),
        records=["flash_attention.json"],
    )


def _not_held(found: Record) -> list[str]:
    """Comparisons of losses that exceed their bounds: model, kernels, largest difference."""
    return [f"{name}, {case}, by up to {run['losses_apart_at_most']:.2f}" for name, cases in parts(found)
            for case, run in parts(cases) if run.get("held") is False]  # fmt: skip


def chunked_loss() -> str:
    found = record("chunked_loss_h200")
    rows = [
        (row["loss"], row["chunk"] or ("automatic" if row["loss"] == "chunked" else "–"), f"{1e3 * row['seconds']:.1f}",
         f"{row['arena_gib']:.2f}", f"{row['measured_gib']:.2f}", percent(max(row["off"].values())) if "off" in row else "–")
        for row in found["rows"]
    ]  # fmt: skip
    return section(
        "Loss in chunks of tokens",
        f"""\
The head and the loss of {found["tokens"]} tokens, with a vocabulary of {found["words"]} and a hidden size of {found["width"]}.
`reference` keeps all logits; `chunked` computes the logits of some tokens at a time. Both use plain torch. The last column is the largest relative
difference of a gradient from the reference, in norm.

Falls short: with the automatic chunk size, the chunked loss is slower than the loss of all logits.""",
        table("loss | tokens a chunk | ms | arena, GiB | allocated, GiB | gradient difference", rows),
        records=["chunked_loss_h200.json"],
    )


def fp8() -> str:
    linear, experts = record("fp8_linear_h200"), record("fp8_experts_h200")
    rows = [
        (name, f"{1e3 * sum(one['seconds'] for one in recipe['speed']):.1f}",
         f"{1e3 * sum(one['seconds'] for one in recipe['speed of the reference']):.1f}"
         if "correct" in recipe else "–",
         f"{sum(one['held'] for one in recipe['correct'])} of {len(recipe['correct'])}" if "correct" in recipe else "–")
        for name, recipe in linear["recipes"].items()
    ]  # fmt: skip
    routed = [(name, *(f"{1e3 * recipe['seconds'][phase]:.2f}" for phase in ("forward", "input_gradient")))
              for name, recipe in experts["recipes"].items()]  # fmt: skip
    sizes, (out, width) = experts["speed_of"]
    return section(
        "FP8",
        f"""\
The total time of forward and both gradients of four linear layers of an 8B model, with {linear["tokens"]} tokens. Operands
are quantised by our Triton kernels, or by plain torch. The last column counts comparisons: products with emulated products
of the same quantised data, and quantised data with that of a CPU. These numbers are
without the fusion `fp8`.

The second table has {len(sizes)} experts with {sizes[0]} rows each and matrices of {out} by {width}.

Falls short: FP8 gains little for linear layers of this size, and nothing for the input gradients of experts.""",
        table("recipe | Triton, ms | plain torch, ms | comparisons passed", rows),
        table("experts | forward, ms | input gradient, ms", routed),
        records=["fp8_linear_h200.json", "fp8_experts_h200.json"],
    )


def optimizer_update() -> str:
    found = record("update_kernel_h200")
    rows = list[Sequence[object]]()
    for policy in found["policies"].values():
        speed = {one["kernel"]: one for one in policy["speed"]}
        rows.append((policy["precision"], *(f"{1e3 * speed[kernel]['seconds']:.2f}" for kernel in ("kernel", "torch")),
                     f"{speed['kernel']['bytes_a_second'] / 1e12:.2f}",
                     f"{sum(one['held'] for one in policy['correct'])} of {len(policy['correct'])}"))  # fmt: skip
    return section(
        "Optimizer update",
        f"""\
AdamW's update of {found["elements"]:,} parameters on one GPU, by the Triton kernel and by plain torch. The last column counts
the tensors that agree with plain torch up to rounding, and a check that an overflow changes nothing.""",
        table("precision | Triton, ms | torch, ms | Triton, TB/s | comparisons passed", rows),
        records=["update_kernel_h200.json"],
    )


def update_forms() -> str:
    found = record("update_forms_h200")
    rows = [(form["tile"], form["warps"], "IEEE" if form["exact"] else "fast", "yes" if form["stream"] else "no",
             *(f"{rate:.2f}" for rate in form["tb_a_second"].values()), "yes" if form["held"] else "no")
            for form in found["forms"]]  # fmt: skip
    sums = [(f"{row['elements']:,}", row["dtype"].removeprefix("torch."),
             *(f"{row['tb_a_second'][way]:.2f}" for way in ("kernel", "torch", "copy"))) for row in found["squares"]]  # fmt: skip
    return section(
        "Ways to compile AdamW's kernel",
        """\
The kernel without 8-bit moments, compiled in several ways, with whole fp32 master weights: TB/s by the number of elements.
"Streams" means that operands are marked to leave the L2 cache first. The second table has the sum of squares for the
gradient norm, beside torch and a copy.""",
        table("tile | warps | division | streams | 10 million | 100 million | 500 million | agrees", rows),
        table("elements | dtype | Triton, TB/s | torch, TB/s | copy, TB/s", sums),
        records=["update_forms_h200.json"],
    )


def loss_forms() -> str:
    found = record("loss_forms_h200")
    rows = [(f"{row['vocabulary']:,}", f"{row['kept']:,}", f"{row['columns']:,}", row["warps"], f"{row['ms']:.2f}", f"{row['tb_a_second']:.2f}",
             "yes" if row["held"] else "no") for row in found["forms"]]  # fmt: skip
    return section(
        "Ways to compile the loss",
        f"""\
Cross entropy with its gradient, of {found["forms"][0]["rows"]:,} rows of bf16 logits, in one kernel. "Kept" columns of a row
stay in registers; the others are read twice. TB/s counts one reading and one writing.""",
        table("vocabulary | kept | columns at a time | warps | ms | TB/s | agrees", rows),
        records=["loss_forms_h200.json"],
    )


def captured_step() -> str:
    found = record("h200_1b_step")
    rows = [(name, ms(found[name]["step_ms"]), f"{found['predicted']['allocated_gib']:.2f}",
             f"{found[name]['peak_allocated_gib']:.2f}") for name in ("eager", "captured")]  # fmt: skip
    return section(
        "One step, eager and as a CUDA graph",
        f"""\
{found["model"]}, {found["layout"]["gradient_accumulation_steps"]} sequences of {found["sequence_length"]} tokens a step,
{found["precision"]}, reference kernels. The losses of {len(found["eager"]["losses"])} steps differ by
{found["max_abs_loss_difference"]}. The matrix products alone need at least {found["floor_ms_at_670_tflops"]:.0f} ms. So this
shows that a step can be captured, not that it is fast.""",
        table("run | step, ms | predicted, GiB | allocated, GiB", rows),
        records=["h200_1b_step.json"],
    )


def parity() -> str:
    nccl, sweep = record("nccl_layouts"), record("test_all")
    rows = [(one["model"], text(one["layout"]), f"{one['gradient_error']:.1e}", f"{one['loss_error']:.1e}")
            for one in nccl["layouts"]]  # fmt: skip
    return section(
        "Gradients against one process",
        f"""\
Layouts on four GPUs with NCCL against one process of plain torch, in float64: the largest relative error of a gradient, and
the error of the loss.

On CPUs, {sweep["passed"]} of {sweep["cases"]} layouts pass; the largest gradient error is
{sweep["worst_gradient_error"]:.1e}.

Falls short: this record of CPUs is older than ZeRO and latent attention. The test suite tests random layouts with both.""",
        table("model | layout | gradient error | loss error", rows),
        records=["nccl_layouts.json", "test_all.json"],
    )


def drawn_faults() -> str:
    found = record("test_faults")
    kills, damage = found["kills"], found["corruptions"]
    rows = [(name, count) for name, count in kills["layouts"].items()]
    wrong = "; ".join(f"{f['kind']} {f['number']}: {f['wrong'].partition(' after ')[0]}" for f in found["failures"])
    failed = f" Found, and to be drawn again where it is mended: {wrong}." if wrong else ""
    planned = f"{kills['planned']} kills and {damage['planned']:,} damaged checkpoints"
    return section(
        "Faults drawn at random",
        f"""\
Draws by a seed on a CPU (`make test-faults`). Runs are killed at random moments, up to three times, and resumed:
{kills["bitwise"]} of {kills["drawn"]} end bitwise as a run that nothing disturbed. Checkpoints are damaged at random and loaded:
of {damage["drawn"]}, {damage["silent"]} give a state that is not that of a whole step, {damage["wrong"]} are wrong in any way.{failed}

{"All that is planned has been drawn." if found["complete"] else f"Falls short: {planned} are planned; this is a first part of them."}""",
        table("layout that was killed | draws", rows),
        records=["test_faults.json"],
    )


def hosts_and_long_runs() -> str:
    hosts, pairs, soak = record("test_hosts"), record("reshard_380"), record("soak_10000")
    late = [row for row in soak["samples"] if row["step"] >= 2000]
    names = {"test_hosts_are_equal_to_one_host[2]": "two hosts", "test_hosts_are_equal_to_one_host[4]": "four hosts",
             "test_a_slow_link_that_is_cut_for_three_seconds_changes_nothing": "a slow link, cut for three seconds",
             "test_a_link_that_is_cut_for_good_ends_both_sides_and_the_run_goes_on_later": "a link cut for good, resumed",
             "test_a_host_that_is_gone_and_comes_back": "a host that is gone and comes back"}  # fmt: skip
    rows = [(names[name], row["outcome"], f"{row['seconds']:.0f}") for name, row in hosts["tests"].items()]
    return section(
        "Hosts, layouts, long runs",
        f"""\
On a CPU. Hosts are namespaces of one machine with torchrun between them (`make test-hosts`); each run must end bitwise as
one on a single host. Of {pairs["pairs"]} pairs of {len(pairs["layouts"])} layouts, {pairs["equal"]} read what the other saved, and
would save it again, byte for byte. {soak["steps"]:,} steps with {soak["saves"]} saves in the background: from step
{late[0]["step"]:,} on {late[0]["resident_mib"]:.1f} MiB are resident, {late[-1]["resident_mib"]:.1f} at the end;
{late[0]["descriptors"]} descriptors, {late[-1]["descriptors"]} at the end.""",
        table("hosts | outcome | seconds", rows),
        records=["test_hosts.json", "reshard_380.json", "soak_10000.json"],
    )


def background_saves() -> str:
    found = record("background_saves")
    rows = [(name, ms([1e3 * x for x in times])) for name, times in found["seconds"].items()]
    return section(
        "Saves in the background",
        f"""\
One rank on a CPU, {found["checkpoint_mib"]:.0f} MiB of fp32 state, both kinds of saves in turns in one run: with
`checkpoint.asynchronous` a save keeps the rank for {percent(found["save_returns_after"])} of the time of a save that it waits for
({percent(found["asked"])} were asked for). The step beside it takes {found["step_beside_a_save"]:.2f} times as long as one after a save at
once: writer and training share the cores. Only the ratios count: the load of the machine was {found["load_average"]}.

Falls short: not measured on a GPU.""",
        table("what keeps the rank | milliseconds: median and range", rows),
        records=["background_saves.json"],
    )


def training_runs() -> str:
    log = (RESULTS / "nccl_training.log").read_text(encoding="utf-8")
    codes = re.findall(r"^rc (\d+)$", log, re.MULTILINE)
    rows = list[Sequence[object]]()
    for run in log.split("=== ")[1:]:
        command = run.splitlines()[0]
        line = re.search(r"loss (\S+) over (\d+) steps · gradient at step 1 (\S+)", run)
        if line:
            rows.append((f"`{command}`", line[2], line[1], line[3]))
        elif found := re.search(r'^\{.*"max_abs_loss_difference".*\}$', run, re.MULTILINE):
            summary = json.loads(found[0])
            rows.append((f"`{command}`", summary["compared_steps"], f"{summary['max_abs_loss_difference']:.1e}",
                         f"{summary['max_rel_gradient_difference_step1']:.1e}"))  # fmt: skip
    return section(
        "Training runs on NCCL",
        f"""\
`penteract train` on four GPUs. Each layout is compared with the run before it: the largest difference of a loss, and of the
gradients of step 1. The log also has a run that resumes on another layout, and a run in which one rank is killed: all other
ranks end, and the exit code is {codes[-1]}.""",
        table("arguments | steps | loss | gradient", rows),
        records=["nccl_training.log"],
    )


def precision_recipes() -> str:
    curves, tiny = record("recipe_curves_1b_h200"), record("precision_300")
    last = {row["recipe"]: mean(row["losses"][-LAST:]) for row in curves["rows"]}
    rows = [(row["recipe"], f"{last[row['recipe']]:.3f}", percent(last[row["recipe"]] / last["bf16"] - 1),
             f"{row['allocated_gib']:.2f}") for row in curves["rows"]]  # fmt: skip
    small = [
        (CASES.get(name, name), f"{loss:.4f}", percent(loss / tiny["losses"]["fp32"] - 1))
        for name, loss in tiny["losses"].items()
    ]
    return section(
        "Loss by precision",
        f"""\
{len(curves["rows"][0]["losses"])} steps of {curves["model"]} on bytes of text, with the same initial weights: the mean of the
last {LAST} losses ([curves](../benchmarks/results/recipe_curves_1b_h200.svg)). The second table has {tiny["steps"]} steps of a
tiny model on a CPU: the mean of the last {tiny["last"]} losses. All must be
within {percent(tiny["within"])} of fp32.

Falls short: the runs are short. The initial weights of the 1B model were drawn in bf16, so the small first updates of the
master weights did not change the bf16 parameters. The script now draws weights in fp32, but has not been run again.""",
        table("recipe | loss | against bf16 | allocated, GiB", rows),
        table("recipe, tiny model | loss | against fp32", small),
        records=["recipe_curves_1b_h200.json", "precision_300.json"],
    )


def other_trainers() -> str:
    peers, book = record("peers_h200"), record("playbook_sweep")
    rows = [(row["row"], row["model"], f"`{row['layout']}`", f"{row['measured_tokens_per_s_per_gpu']:,}",
             f"{row['predicted']:,}", f"{row['ratio']:.2f}") for row in peers["rows"]]  # fmt: skip
    groups = [(group["model"], group["nodes"], group["layouts"], f"{group['spearman']:.2f}",
               group["measured_best_is_our_number"], percent(group["our_first_was_slower_by"]),
               f"{group['median_predicted_over_measured']:.2f}") for group in book["groups"]]  # fmt: skip
    return section(
        "Measurements of other trainers",
        f"""\
{peers["measured_with"]}: tokens per second and GPU, measured and predicted by the planner. The planner counts each pointwise
operation as one fused kernel, as in that trainer.

The second table is the sweep of the Ultra-Scale Playbook on nodes of eight H100s. It compares the order of the planner with
the measured order: the rank correlation (median {book["median_spearman"]}), the planner's rank of the fastest layout, and how
much slower than the fastest the planner's first choice was measured. Predicted/measured is of tokens per second.

Falls short: expert parallelism is slower than predicted. On many nodes, the planner's first choice is often much slower than
the fastest layout.""",
        table("row | model | layout | measured | predicted | predicted/measured", rows),
        table(
            "model | nodes | layouts | rank correlation | rank of the fastest | first choice slower by | predicted/measured",
            groups,
        ),
        records=["peers_h200.json", "playbook_sweep.json"],
    )


def planner_speed() -> str:
    found, asked = record("planner_speed"), record("asked_2000")
    rows = [
        (name, f"{run['counts']['enumerated']:,}", f"{run['counts']['priced']:,}", run["counts"]["simulated"],
         f"{run['seconds']['median']:.1f} ({run['seconds']['least']:.1f}–{run['seconds']['most']:.1f})")
        for name, plans in found["plans"].items() for run in (plans["now"],)
    ]  # fmt: skip
    unlike = sum(one["unlike_fresh"] + one["unlike_fresh_then"] for one in asked["models"].values())
    return section(
        "Speed of the planner",
        f"""\
Whole searches on a CPU, {found["runs"]} runs each. The second record has estimates of {asked["layouts"]:,} layouts in random
order by one planner, each compared with the estimate of a new planner.

{"Falls short: " if unlike else ""}{unlike} of these estimates differ.""",
        table("search | layouts | priced | simulated | seconds", rows),
        records=["planner_speed.json", "asked_2000.json"],
    )


def rehearsals() -> str:
    found, runs = record("rehearsal"), record("rehearsed_12")
    rows = [(f"`{row['layout']}`", 1 + len(row["held_against"]), f"{row['cpu_s']:.0f}", f"{row['most_gib']:.2f}",
             f"{row['peak'] / 2**30:.2f}", len(row["mismatches"])) for row in found["rows"]]  # fmt: skip
    wrong = sum(bool(row["differences"]) for row in runs["rows"])
    return section(
        "Rehearsals",
        f"""\
One rank of Llama-3.1-405B on 4,096 GPUs, with the ranks that it is held against, on a CPU without a GPU: CPU seconds and
memory of the process, and the peak that the rank would allocate.

The second record has {runs["layouts"]} drawn layouts of eight ranks, rehearsed and run under gloo: every call on a wire in
order, and every byte. {wrong} of them differ.""",
        table("layout | ranks walked | CPU seconds | GiB of the process | GiB allocated | mismatches", rows),
        records=["rehearsal.json", "rehearsed_12.json"],
    )


def explore_page() -> str:
    found = record("explore_page")
    flat = [
        (f"{page}: {what}" if "median" in took else f"{page}: {what}: {part}", one)
        for page, times in found["seconds"].items() for what, took in times.items()
        for part, one in (took.items() if "median" not in took else [("", took)])
    ]  # fmt: skip
    rows = [(name, f"{took['median']:.2f}", f"{took['worst']:.2f}") for name, took in flat]
    return section(
        "The explorer's page",
        f"""\
Seconds in {found["browser"]} on {found["cores"]} cores, each {found["times"]} times. Other programs ran too: the load of the machine
was {found["load_before"]} before. A changed layout is drawn in all figures but the slower ones (the step, and what would fit).""",
        table("page | median | worst", rows),
        records=["explore_page.json"],
    )


def rates() -> str:
    hot, burst = record("sustained_h200"), record("ceilings_8xh200")
    largest = {
        dtype: max(shapes, key=lambda shape: shape[0] * shape[1] * shape[2] * shape[3])
        for dtype, shapes in hot["products"].items()
    }  # [times, m, n, k, microseconds]
    rows = [(dtype, f"{m} x {n} x {k}", f"{2 * times * m * n * k / us / 1e6:.0f}")
            for dtype, (times, m, n, k, us) in largest.items()]  # fmt: skip
    sizes = ("1MiB", "64MiB", "1024MiB")
    wires = [(kind, ranks, *(f"{burst[kind][f'g{ranks}_{size}']['busbw']:.0f}" for size in sizes))
             for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all") for ranks in (2, 4, 8)]  # fmt: skip
    moved, took = hot["moved"][-1]
    fa4 = record("sustained_fa4_h200")
    both = zip(fa4["cudnn_attention"], fa4["fa4"], strict=False)  # the longest sequence is of FA4 alone
    attention = [(f"{batch} x {heads} of {kv_heads} x {length:,}", size, *(f"{rate * 2 * batch * heads * length**2 * size / us / 1e6:.0f}"
                  for us, rate in zip((*cudnn, *found), (1, 2.5, 1, 2.5), strict=True)))
                 for (batch, heads, kv_heads, length, size, *cudnn), (*_, f, b) in both for found in ((f, b),)]  # fmt: skip
    return section(
        "Rates that the planner uses",
        f"""\
Compute rates are those of a hot GPU, where power limits the clock. The first table has the largest matrix product that was
measured in each dtype. The sum of two tensors reads and writes {moved / 1e9:.1f} GB at {moved / took / 1e6:.1f} TB/s.

The second table has collectives of {burst["world"]} GPUs of one node: bus bandwidth in GB/s, by number of ranks and size.
NVLink multicast (NVLS) was off. The third table has causal attention in TFLOP/s. `walked_kernels_h200.json` has the times of pointwise kernels whose tensors differ in memory
layout.

Falls short: links between nodes were never measured. The planner uses published figures.""",
        table("product | shape | TFLOP/s", rows),
        table("collective | ranks | " + " | ".join(sizes), wires),
        table(
            "batch x heads of KV heads x sequence | head size | cuDNN forward | cuDNN backward | FA4 forward | FA4 backward",
            attention,
        ),
        records=["sustained_h200.json", "sustained_fa4_h200.json", "ceilings_8xh200.json", "walked_kernels_h200.json"],
    )


NOT_MEASURED = """\
## What has not been measured

- **Several nodes.** All runs used one host. Plans for several nodes use modelled links.
- **Long runs on GPUs** with Muon, with weights gathered in FP8, and with experts in FP8. Tests on CPUs cover all three. On
  GPUs there are only the short runs above of Muon and of gathered FP8 weights, and matrix products of experts in FP8.
- **Latent attention and weights from Hugging Face on GPUs.** Tests on CPUs compare them with plain torch and transformers.
- **macOS and Windows.** Nothing has been run there."""

SECTIONS = (against_torchtitan, against_torchtitan_elsewhere, profile_of_a_step, drawn_sweeps, without_memory, playbook_figures, triton_kernels, planned_times, four_gpus, memory_options, large_model, profiles, start_of_a_step, attention, chunked_loss, fp8,
            optimizer_update, update_forms, loss_forms, captured_step, parity, drawn_faults, hosts_and_long_runs, background_saves, training_runs, precision_recipes, other_trainers, planner_speed,
            rehearsals, explore_page, rates)  # fmt: skip


def page() -> str:
    """The whole page, made from the records."""
    return "\n\n".join([INTRODUCTION, *(make() for make in SECTIONS), NOT_MEASURED]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Write docs/benchmarks.md from the records in benchmarks/results.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page is not up to date")
    if not parser.parse_args().check:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    same = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page()
    if not same:
        print("docs/benchmarks.md does not match the records; fix: python benchmarks/tables.py")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
