"""Sections beside other trainers."""

from __future__ import annotations

from typing import Any

from sections.page_parts import Record, paragraph, percent, record, section, table

BESIDE = {
    "A1": "8 layers of Llama-3-8B, 8,192 tokens, 2 sequences", "B1": "1B, 4,096 tokens, 4 sequences",
    "E1": "1B, 32,768 tokens, 1 sequence", "F1": "4 layers of Qwen3-30B-A3B, 4,096 tokens, 4 sequences",
    "A1_fp8": "8 layers of Llama-3-8B, 8,192 tokens, 2 sequences, FP8 tensorwise",
    "A1_fp8_fast": "8 layers of Llama-3-8B, FP8 tensorwise, our products of gradients summed in fewer bits",
    "A1_documents": "8 layers of Llama-3-8B, 2 sequences of 8 documents of 1,024 tokens",
    "E1_documents": "1B, a sequence of 2 documents of 16,384 tokens", "B1_documents": "1B, 4 sequences of 4 documents of 1,024 tokens",
    "A2": "8B, data parallel 2, 8,192 tokens, 1 sequence a GPU", "tp2": "8B, tensor parallel 2, 8,192 tokens, 2 sequences",
    "pp2": "8B, pipeline parallel 2, 8,192 tokens, 16 micro-batches",
    "A4": "8B, data parallel 4, 8,192 tokens, 2 sequences a GPU",
    "A4_recomputed": "8B, data parallel 4, 8,192 tokens, 2 sequences a GPU, norms and SwiGLU's result recomputed",
    "A4_fp8": "8B, data parallel 4, 8,192 tokens, 2 sequences a GPU, FP8 tensorwise",
    "C4": "8B, tensor parallel 2, data parallel 2, 8,192 tokens, 2 sequences a data rank",
    "D4": "8B, pipeline parallel 2, data parallel 2, 8,192 tokens, 32 sequences",
    "E4": "8B, tensor parallel 4, one sequence of 131,072 tokens",
    "F4": "16 layers of Qwen3-30B-A3B, data parallel 4, 4,096 tokens, 4 sequences a GPU",
}  # fmt: skip


# What was asked for on an H200: our tokens per second over torchtitan's.
ASKED = {"A1": 1.10, "A1_fp8": 1.20, "A1_fp8_fast": 1.20, "B1": 1.13, "E1": 1.15, "F1": 1.55, "A4": 1.08, "A4_recomputed": 1.08, "C4": 1.12,
         "F4": 1.50, "D4": 1.12, "A4_fp8": 1.18}  # fmt: skip


LEAST = 0.05  # milliseconds: a row of the table of waits has one number that is not less


def profile_of(row: Record) -> Record | None:
    """What our last run with profiled steps has of them."""
    return next((run["profile"] for run in reversed(row["our_runs"]) if "profile" in run), None)


def beside_table(found: Record) -> str:
    """Both sides of each row of a record of `beside_torchtitan.py`. The last column: if it has profiled steps."""
    profiles = [profile_of(row) for row in found["rows"]]
    idle = [(percent(one["idle"]) if one else "",) if any(profiles) else () for one in profiles]
    rows = [
        (
            BESIDE[row["case"]], f"{row['peer_tok_s_gpu'][row['peer_mode']]:,.0f}" if row["peer_runs"] else "",
            f"{row['tok_s_gpu']:,.0f}", f"{row['ratio']:.2f}" if row["peer_runs"] else "",
            f"{len(row['our_runs'])} and {len(row['peer_runs'])}", f"{row['planned_over_measured']:.2f}",
            f"{row['our_runs'][-1]['allocated_gib']:.1f} ({row['planned_gib']:.1f} predicted)",
            f"{row['peer_runs'][-1]['allocated_gib']:.1f}" if row["peer_runs"] else "", *last,
        )
        for row, last in zip(found["rows"], idle, strict=True)
    ]  # fmt: skip
    return table(
        "case | torchtitan, tokens/s/GPU | ours, tokens/s/GPU | ours/torchtitan | runs, ours and theirs"
        " | planned/measured | ours, GiB | torchtitan, GiB" + " | ours, idle" * any(profiles),
        rows,
    )


def waits_by_axis(found: Record) -> tuple[str, ...]:
    """What our steps wait for, planned and measured: a paragraph, and a table of rows of several GPUs. Nothing for a
    record without profiled steps."""
    profiles = {row["case"]: one for row in found["rows"] if (one := profile_of(row))}
    missing = [
        f'"{BESIDE[row["case"]]}" is not profiled: {row["our_runs"][-1]["not_profiled"]}'
        for row in found["rows"] if row["our_runs"] and "not_profiled" in row["our_runs"][-1]
    ]  # fmt: skip
    if not (profiles or missing):
        return ()
    about = [
        "Idle is the share of a step in which nothing runs on the GPU, with torch's profiler, which slows the host: without"
        " it there is less."
    ] * bool(profiles)
    rows = [
        (BESIDE[case], axis, *(f"{wait[key]:.1f}" for key in ("planned_ms", "measured_ms", "idle_ms", "planned_slower_ms")))
        for case, one in profiles.items() if len(one["ranks"]) > 1
        for axis, wait in one["exposed"].items() if max(wait.values()) >= LEAST
    ]  # fmt: skip
    if rows:
        about += ["Exposed communication, by axis: milliseconds of a step in which compute waits for a collective or a message,"
                  " planned and measured in up to three steps after those that are timed; how much of the idle time is a wait for"
                  " one that no kernel shows; and by how much the plan has compute slower beside it, which the measured times of products contain. In the update, ranks wait for the last"
                  " one."]  # fmt: skip
    tables = [
        table("case | axis | planned, ms | measured, ms | idle for it, ms | compute planned slower by, ms", rows)
    ] * bool(rows)
    return paragraph(" ".join([*about, *(f"{one}." for one in missing)])), *tables


def more_memory(found: Record) -> str:
    """In how many rows we allocate more than the peer."""
    rows = [row for row in found["rows"] if row["peer_runs"]]
    larger = sum(row["our_runs"][-1]["allocated_gib"] > row["peer_runs"][-1]["allocated_gib"] for row in rows)
    return f"we allocate more memory than torchtitan in {larger} of {len(rows)} rows"


def repeated_runs(found: dict[str, Any]) -> str:
    """By how much our runs of one row differ, as a sentence."""
    repeated = [[run["tok_s_gpu"] for run in row["our_runs"]] for row in found["rows"] if len(row["our_runs"]) > 1]
    if not repeated:
        return "Each side ran once a row."
    most = max(max(speeds) / min(speeds) - 1 for speeds in repeated)
    return f"Our repeated runs of a row differ by up to {percent(most)}."


def against_torchtitan() -> str:
    found = record("beside_torchtitan")
    clocks = [run["clock_mhz"] for row in found["rows"] for run in row["our_runs"]]
    spread = repeated_runs(found)
    worst = max(found["rows"], key=lambda row: abs(row["planned_over_measured"] - 1))
    others = [
        f'"{BESIDE[row["case"]]}"' for row in found["rows"] if row.get("commit", found["commit"]) != found["commit"]
    ]
    missing = [
        f'"{BESIDE[row["case"]]}" reaches {row["ratio"]:.3f} of {ASKED[row["case"]]:.2f}:'
        f" {row['median_ms'] * (1 - row['ratio'] / ASKED[row['case']]):.1f} ms of {row['median_ms']:.0f} are missing"
        for row in found["rows"] if row["ratio"] < ASKED[row["case"]]
    ]  # fmt: skip
    of_another = f"{' and '.join(others)} {'is' if len(others) == 1 else 'are'}" if others else "none is"
    return section(
        "Against torchtitan, on one GPU",
        f"""\
torchtitan 0.2.2 with `torch.compile`, in its own mode for one GPU (autocast over fp32 parameters), and this program with its
fastest kernels. Both run as separate processes on an H200, one after the other, with the same four batches of random tokens
and fp32 gradients. A time is the median of the last 10 of 18 steps, by CUDA events. A run counts only if its loss is finite
and falls. Runs of a row alternate, in one call on one GPU; {of_another} of another commit. {found["about"]}

Power limits the clock of the GPU: it was {min(clocks):,.0f} to {max(clocks):,.0f} MHz in our runs. {spread}

Falls short: of what was asked for, {"; ".join(missing)}. [kernels.md](kernels.md) has where their time goes: products
run at the rate that power allows, attention below it. In FP8 the output projection stays in bf16, gradients are summed in
fp32, and products of gradients accumulate as torchao's do by default; in the row that sums them in fewer bits, which
torchtitan has no option for, ours alone do. {more_memory(found).capitalize()}. The planned time of
"{BESIDE[worst["case"]]}" is {worst["planned_over_measured"]:.2f} times the measured time.""",
        beside_table(found),
        *waits_by_axis(found),
        records=["beside_torchtitan.json"],
    )


def against_torchtitan_elsewhere() -> str:
    two, h100 = record("beside_torchtitan_two"), record("beside_torchtitan_h100")
    profile, slowed = record("profile_a2_h200"), record("contention_in_steps_h200")
    (loses,) = slowed["factors"].values()
    alike = [[ms for row in slowed["rows"] if row["world"] == world for ms in row["computed_ms"]] for world in (1, 2)]
    apart = [max(some) - min(some) for some in alike]
    lost = {row["label"]: row["picoseconds"] / 1e9 for row in profile["waterfall"]}  # the last of a name is measured
    sums = next(op for op in profile["ops"] if op["name"] == "reduce_scatter gradients")
    spread = repeated_runs(two)
    off = [step["planned_ms"] / step["median_ms"] for step in record("calibrated_h100")["steps"].values()]
    return section(
        "Against torchtitan, on two H200s and on an H100",
        f"""\
As above; on the H100 each side once a row. {spread} On two GPUs torchtitan uses FSDP2 for data parallelism; under tensor and pipeline parallelism
(1F1B) it runs FSDP2 over one rank, without which it computes in fp32. Ours: ZeRO 1; sequence parallelism; an interleaved
schedule of 16 stages, of which the last has a layer less. Memory is that of the fullest rank.

Falls short: on two GPUs {more_memory(two)}. The rows of the H100 were planned by rates that `penteract calibrate` had
measured in bursts, before its clock had settled. By today's, put together from calibrations of three other cards at
three commits (the record says which part is whose), they are planned {min(off):.2f} to {max(off):.2f} times as long as they take.

By an earlier profile of A2's step ({profile["step"]["measured"] / 1e9:.0f} ms), attention took {lost["Attention"]:.1f} ms more than planned, as sums of gradients ran beside its backward
pass for {sums["measured"] / 1e9:.0f} ms, with the waits of the rank that is ahead, where {sums["predicted"] / 1e9:.0f} were planned. So what compute loses was measured in steps since: {slowed["case"].replace("llama-3.1-8b", "Llama-3-8B")}, take
{loses["computed_ms"]:.1f} ms of kernels on each of two GPUs and {slowed["alone_ms"]:.1f} on one, {loses["computed_ms"] - slowed["alone_ms"]:.1f} more in {loses["beside_ms"]:.1f} ms of collectives as these take alone (those beside the
update too, whose kernels are not counted: a third by the plan). That is one
profile of both and one of each alone, in which two GPUs that do the same differ by up to {max(apart):.1f} ms. Plans have compute {loses["factor"]:.2f} times
as slow beside them, those of these rows too.""",
        beside_table(two),
        *waits_by_axis(two),
        beside_table(h100),
        *waits_by_axis(h100),
        records=[
            "beside_torchtitan_two.json",
            "beside_torchtitan_h100.json",
            "calibrated_h100.json",
            "profile_a2_h200.json",
            "contention_in_steps_h200.json",
        ],
    )


def against_torchtitan_on_four() -> str:
    found, profile = record("beside_torchtitan_four"), record("profile_a4_h200")
    short = [f'"{BESIDE[row["case"]]}" reaches {row["ratio"]:.3f} of {ASKED[row["case"]]:.2f}'
             for row in found["rows"] if row["ratio"] and row["ratio"] < ASKED[row["case"]]]  # fmt: skip
    lost = {row["label"]: row["picoseconds"] / 1e9 for row in profile["waterfall"]}
    wires = {op["name"]: (op["predicted"] / 1e9, op["measured"] / 1e9) for op in profile["ops"]}
    gather, scatter = wires["all_gather parameters"], wires["reduce_scatter gradients"]
    commits = " and ".join(dict.fromkeys(row.get("commit", found["commit"]) for row in found["rows"]))
    long = next(row for row in found["rows"] if row["case"] == "E4")
    slow, falls = long["our_runs"][-1], "the loss of the first of four sequences, each of which is a step, falls from"
    others = "; ".join(
        f"with {fast['rate']:g} it was {fast['losses'][4]:.1f} and {fast['losses'][8]:.1f}"
        for fast in long.get("our_runs_at_other_rates", ())
    )
    return section(
        "Against torchtitan, on four H200s",
        f"""\
As above, each side once a row, both on one machine, at commits {commits}. torchtitan uses FSDP2, and expert parallelism 4 for Qwen3. Ours: expert parallelism 2 and ZeRO 1 for Qwen3, ZeRO 2 for other data
parallelism, ZeRO 1 beside tensor and pipeline parallelism, an interleaved schedule of 16 stages. Beside tensor parallelism nothing
is recomputed, which takes 4 GiB more than gathering inputs again and a little less time. At 131,072 tokens ours alone: all of a
layer but its norms' and SwiGLU's results is kept. There {falls}
{slow["losses"][0]:.1f} by {slow["losses"][4]:.1f} and {slow["losses"][8]:.1f} to {slow["losses"][12]:.2f} with a learning rate of {slow["rate"]:g}; {others}.

Falls short: {"; ".join(short)}. {more_memory(found).capitalize()}.
All rows but that of Qwen3 were planned with compute 1.14 times as slow beside collectives, that one with today's 1.41.

Where data parallelism lost time before the change that the next section has, by `penteract profile` of such a step: collectives ran {gather[1] + scatter[1]:,.0f} ms of
{profile["step"]["measured"] / 1e9:,.0f}, nearly all of that beside compute; the plan had {gather[0] + scatter[0]:,.0f} ms for them. Products took {lost["Matmuls"]:,.0f} ms more than
planned, attention {lost["Attention"]:,.0f} ms.""",
        beside_table(found),
        *waits_by_axis(found),
        records=["beside_torchtitan_four.json", "profile_a4_h200.json"],
    )


def _setting(of: tuple[str, Any]) -> str:
    """A field of a layout and its value."""
    name, value = of
    return f"{name} {', '.join(value) or 'none' if isinstance(value, list) else value}"


def collectives_beside_products() -> str:
    found = record("collectives_beside_products_h200")
    runs = found["runs"]
    rows = [
        (BESIDE[run["case"]], f"{run['bucket_bytes'] >> 20:,} MiB", run["free_tiles"],
         ", ".join([*map(_setting, run["layout"].items()), *filter(None, [run["more"]])]),
         f"{run['median_ms']:,.1f}", "{:,} to {:,}".format(*run["spread_ms"]), f"{run['tok_s_gpu']:,.0f}",
         f"{run['planned_ms']:,.1f}")
        for run in runs
    ]  # fmt: skip
    four = [run for run in runs if run["case"] == "A4"]
    one, two = four[2], four[6]  # a micro-batch of two sequences; two of one
    beside = next(row for row in record("beside_torchtitan_four")["rows"] if row["case"] == "A4")["tok_s_gpu"]
    again = [run["median_ms"] for run in runs if run["case"] == "F1" and run["free_tiles"] == "all"]
    before = [run["median_ms"] for run in runs if run["case"] == "F1" and run["free_tiles"] != "all"]
    placed = [
        run["median_ms"] / next(r for r in pair if r["more"] != run["more"])["median_ms"] - 1
        for pair in zip(*[iter([run for run in runs if run["case"] == "A2"])] * 2, strict=True)
        for run in pair if not run["more"]
    ]  # fmt: skip
    reading = [
        run for run in runs if "collectives" in run["layout"] and run["case"] == "C4" and run["commit"] == "9e65f436"
    ]
    library, direct, *over = (
        run["median_ms"]
        for kind in ("library", "direct", "overlapped")
        for run in reading
        if run["layout"]["collectives"] == kind
    )
    seen = next(run["of_two_steps_in_a_trace"] for run in reading if "of_two_steps_in_a_trace" in run)
    streams = found["streams_of_copies"]["us_by_ranks_and_streams"]["4"]
    return section(
        "What collectives take from the products beside them",
        f"""\
Our side alone, one run a row. While a collective holds multiprocessors, a kernel whose blocks have a fixed share of the tiles
waits for blocks that cannot start; where tiles go to whichever block is free ("free tiles"), it does not. One collective for the
matrices of a layer holds them once, one for each matrix five times. Buckets of 1,024 MiB hold a layer at tensor parallelism 1, and
two and a half at 2; today's end with a layer.

Copy engines gain nothing that shows beside what runs differ by, and gathers that nothing hides cost {four[5]["median_ms"] - one["median_ms"]:.0f} ms more than hidden ones.
With ZeRO 1, two micro-batches of one sequence take {1 - two["median_ms"] / one["median_ms"]:.1%} less than one of two with ZeRO 2, where the plan says {two["planned_ms"] / one["planned_ms"] - 1:.1%} more.

A reduction begins with the next backward pass of attention, whose many short blocks lose about what the collective takes. On
two GPUs a step with reductions where they are due took {", ".join(f"{x:.1%}" for x in placed)} longer.

Where ranks read each other's registers (`kernels.collectives`), copy engines move what tensor parallelism gathers. In one call
a step took {library:.1f} ms with NCCL, {direct:.1f} so, and {" and ".join(f"{x:.1f}" for x in over)} with products in two parts beside the copies: {1 - sum(over) / 2 / library:.1%} less. By its trace
of two steps, copies run {seen["copies_ms_a_step"]:.0f} ms of a step, and compute waits for them {seen["of_which_copies_run_ms"]:.0f} ms. Where a rank's own share was copied in the stream of the collectives, that copy, which
needs multiprocessors, waited for the end of the product beside it, and the others behind it. Copies on several streams take longer
between four GPUs, {streams["2"]} µs on two and {streams["1"]} on one for 256 MiB, as ranks then read one another at once. With tensor parallelism 4 the
product of a rank's own rows is too short for three copies, which are waited for at once.

Falls short: one run a row, and the same layout in another call was {beside / four[3]["tok_s_gpu"] - 1:.0%} faster, so differences under that may be noise. On
one GPU, where nothing runs beside products, Qwen3 took {", ".join(f"{x:.1f}" for x in again)} ms with free tiles, {", ".join(f"{x:.1f}" for x in before)} without:
each product then clears a counter, and a host that is busy with another run falls behind.""",
        table("case | buckets | free tiles | beside that | ms a step | from, to | tokens/s/GPU | planned, ms", rows),
        records=["collectives_beside_products_h200.json", "direct_links_4xh200.json"],
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
