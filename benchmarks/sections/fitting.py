"""Sections on memory: what fits, and what is beside the Playbook's figures."""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import median

from sections.page_parts import CASES, Record, ms, percent, planned_ms, record, section, table


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


def options_on_one_gpu() -> str:
    found = record("bench_one_card_options_h200")
    base, *others = rows = found["rows"]
    common = set(base["settings"])
    products = record("products_in_blocks_h200")["products"]
    whole = {tuple(sizes): us for *sizes, us in products["fp8"]}
    slower = {kind: median(whole[tuple(sizes)] / us for *sizes, us in products[kind] if tuple(sizes) in whole)
              for kind in ("fp8_blockwise", "fp8_blockwise_gradient")}  # fmt: skip
    errors = {row["name"]: abs(row["planned_ms"] / row["median_ms"] - 1) for row in rows}
    beside = [(row["device_gib"] - row["allocated_gib"] - base["device_gib"] + base["allocated_gib"]) * 1024
              for row in rows if "offload" in row["name"]]  # fmt: skip
    far = [name for name, error in errors.items() if error > 0.1]
    near = max(error for name, error in errors.items() if name not in far)

    def changed(row: Record) -> str:
        words = [re.sub(r"^\w+\.", "", word).replace('"', "") for word in row["settings"] if word not in common]
        return f"`{', '.join(words)}`" if words else "bf16, nothing recomputed"

    return section(
        "Options on one GPU",
        f"""\
8 layers of `llama-3.1-8b`, 2 sequences of 8,192 tokens on an H200, with FlashAttention-4 and Triton kernels, by `penteract
bench` with `benchmarks/sweeps/one_card_options.toml`. Each row changes what it names.

Falls short: {len(far)} of {len(rows)} steps took over 10 % longer than was planned before they were measured, the others are planned within
{percent(near)}. Products in blocks were planned at the rate of those with one scale a tensor; what Muon does beside its products,
and the passes of plain torch's kernels, were planned as one pass. Where something is copied to the host and back, the process
takes up to {max(beside):.0f} MiB of the device more than is predicted beside tensors.

Products in blocks were measured since, beside those with a scale for each tensor, on a hot card, in the shapes of `penteract
calibrate`: as fast as {slower["fp8_blockwise"]:.2f} of them in the median with a weight's square blocks, and {slower["fp8_blockwise_gradient"]:.2f} in weight gradients, where both
operands have blocks of one row. Plans have these rates; [accuracy.md](accuracy.md) has the rows planned again.""",
        table(
            "changed | step, ms | planned, ms | recorded/planned | tokens/s | predicted, GiB | allocated, GiB",
            [
                (changed(row), ms(row["spread_ms"], row["median_ms"]), f"{row['planned_ms']:,.0f}",
                 f"{row['median_ms'] / row['planned_ms']:.2f}", f"{row['tok_s_gpu']:,.0f}", f"{row['planned_gib']:.2f}",
                 f"{row['allocated_gib']:.2f}")
                for row in (base, *others)
            ],
        ),
        records=["bench_one_card_options_h200.json", "products_in_blocks_h200.json"],
    )  # fmt: skip


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
and changes; then the same run with the first of these changes, of which two steps are taken. The model without ZeRO is the
8B with 40 layers, as 32 fit two H200s.""",
        table("try | device | exit code | first change | memory then", rows),
        records=["out_of_memory.json"],
    )


def at_the_limit() -> str:
    found = record("at_the_limit_h200")
    kinds: dict[str, list[Record]] = {"under a limit of its own": [], "the same on two GPUs": [], "the whole card": []}
    for row in found["rows"]:
        small = "the same on two GPUs" if row.get("gpus") == 2 else "under a limit of its own"
        kinds["the whole card" if isinstance(row["limit"], str) else small].append(row)
    rows = []
    for name, cases in kinds.items():
        shares = [row["share_of_usable"] for row in cases]
        beside = [(row["measured_reserved"] - row["reserved"]) / 2**20 for row in cases
                  if row.get("measured_reserved") and row.get("reserved") and row["words"].get("parallel.pp", 1) == 1]  # fmt: skip
        sizes = [row["allocated"] / 2**30 for row in cases]
        rows.append((name, f"{min(sizes):.1f}–{max(sizes):.1f}", f"{percent(min(shares))}–{percent(max(shares))}",
                     f"{sum(row['trained'] for row in cases)} of {len(cases)}", f"{min(beside):+.0f} to {max(beside):+.0f}"))  # fmt: skip
    before = found["before"]
    return section(
        "Layouts at the limit",
        f"""\
Layouts that are predicted to take 95 to 100 % of the memory that tensors may have, drawn by a seed, on an H200: small
models under limits of their own, on one GPU and on two, and models for which the whole card is just enough. Three steps have
to end with a finite loss. All do. Memory is that of the first rank, so the last column leaves out pipelines, where another
rank may be fuller. The first time only {before["trained"]} of {before["cases"]} did: where a run begins, {before["why"]}, which takes more memory than
a step of a small model; now they are converted in parts.""",
        table(
            "limit | predicted allocated, GiB | of what tensors may take | trained | reserved over predicted, MiB", rows
        ),
        records=["at_the_limit_h200.json"],
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
