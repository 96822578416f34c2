"""Sections on kernels."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from sections.beside_peers import BESIDE
from sections.page_parts import CASES, Record, ms, parts, percent, record, section, table


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
    in_step = record("router_in_a_step")
    routers = [
        (phase.replace("_", " "), name, one["device"], f"{sum(kernels.values()):.0f}",
         ", ".join(f"{what} {us:.0f}" for what, us in kernels.items()))
        for name, one in in_step["parts"].items() for phase, kernels in one["us_a_call"].items()
    ]  # fmt: skip
    return section(
        "Triton kernels against plain torch",
        f"""\
Triton kernels that read and write each tensor once, and the reference kernels in plain torch, on one H200 with 16,384 tokens
(4,096 for the loss). Each kernel was first compared with the reference in fp32. A copy of device memory reaches
{copy / 1e3:.2f} TB/s.

The second table has routing, and the matrix products of 128 experts with 131,072 rows. The third has a router in a step,
by its trace: with the choice of experts by plain torch, and by one kernel each way. Both are of 16,384 tokens, but not of one
card. A step of 4 layers took {in_step["step_of_4_layers"]["measured_ms"]:.1f} ms there, {in_step["step_of_4_layers"]["planned_ms"]:.1f} planned.

Falls short: slower than plain torch: {"; ".join(slower)}.""",
        table("op | phase | plain torch, ms | Triton, ms | TB/s", rows),
        table("op | phase | kernel | ms | speed", experts),
        table("phase of a router | choice | device | µs a call | of that", routers),
        records=["one_pass_h200.json", "expert_kernels_h200.json", "router_in_a_step.json", "ceilings_8xh200.json"],
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
    rows = list[Sequence[object]]()
    for row in found["forms"]:
        also = [f"{row.get('stages')} stages"] * bool(row.get("stages")) + ["hints"] * bool(row.get("holds"))
        way = ", ".join([f"{row['kept']:,} kept", *also] if "kept" in row else ["shared"])
        rows.append((f"{row['vocabulary']:,}", way, f"{row['columns']:,}", row["warps"], f"{row['ms']:.2f}", f"{row['sustained_ms']:.2f}",
                     f"{row['tb_a_second']:.2f}", "yes" if row["held"] and row["same"] else "no"))  # fmt: skip
    return section(
        "Ways to compile the loss",
        f"""\
Cross entropy with its gradient, of {found["forms"][0]["rows"]:,} rows of bf16 logits, in one kernel. By a program for each row, columns
that are "kept" stay in registers, the others are read twice, in stages or with hints to the cache; where a row is "shared",
several programs have so many columns each and read them once. "Sustained" is over a second. TB/s counts one reading and one
writing. In the last column: agrees with fp64, and two runs with each other to the bit.""",
        table("vocabulary | a row is | columns at a time | warps | ms | sustained, ms | TB/s | agrees", rows),
        records=["loss_forms_h200.json"],
    )


def norm_forms() -> str:
    found = record("norm_forms_h200")
    rows = [(f"{row['width']:,}", row["elements"], row["stages"] or "none", f"{row['ms']:.3f}", f"{row['tb_a_second']:.2f}",
             "yes" if row["held"] else "no", "yes" if row["same"] else "no") for row in found["forms"]]  # fmt: skip
    return section(
        "Ways to compile the backward of a norm",
        f"""\
RMSNorm's backward of {found["forms"][0]["rows"]:,} rows whose input a residual reads too, in one kernel. A thread has so many elements of
a row; with stages, the next rows are on their way through shared memory meanwhile. TB/s counts three readings and one
writing. Last column: two runs equal, and equal to the first row's to the bit. Three stages with 16 elements run where rows
are at most 4,096 wide in bf16, the widest that were measured.""",
        table("width | elements | stages | ms | TB/s | agrees with fp64 | same bits", rows),
        records=["norm_forms_h200.json"],
    )


def embedding_forms() -> str:
    found = record("embedding_forms_h200")
    rows = [(f"{row['table'][1]:,}", row["ids"], f"{row['columns']:,}", row["rows"], row["warps"], f"{row['ms']:.2f}",
             f"{row['first_ms']:.2f}", "yes" if row["held"] and row["same"] else "no")
            for row in found["forms"] if "columns" in row]  # fmt: skip
    readers = [(f"{row['table'][1]:,}", row["ids"], *(f"{row['ms'][name]:.2f}" for name in
               ("norm, all", "norm, in use", "update, all", "update, in use"))) for row in found["forms"] if "columns" not in row]  # fmt: skip
    return section(
        "Ways to compile the gradient of an embedding",
        f"""\
The gradient of a table of {found["forms"][0]["table"][0]:,} rows from {found["forms"][0]["tokens"]:,} tokens, sort included: ids drawn evenly, and as words of a text
are, where some are frequent. The first time of a step clears the rows in use before. Programs of 1,024 columns, eight
tokens at a time and four warps run: hardly slower than the best with even ids, the fastest with those of a text. The
second table has what reads that gradient next: all rows, or those in use.""",
        table("width | ids | columns | tokens at a time | warps | ms | first, ms | agrees", rows),
        table("width | ids | norm of all, ms | of rows in use, ms | update of all, ms | of rows in use, ms", readers),
        records=["embedding_forms_h200.json"],
    )


def bound_launches() -> str:
    found = record("host_launch_h200")
    kernels = [(name.strip("_").replace("_", " "), f"{row['jit_us']:.1f}", f"{row['bound_us']:.1f}", "yes" if row["equal"] else "no")
               for name, row in found.items() if isinstance(row, dict) and "jit_us" in row]  # fmt: skip
    steps = [(name.removeprefix("step "), f"{row['jit']['host_ms']:.1f}", f"{row['bound']['host_ms']:.1f}", "yes" if row["equal"] else "no")
             for name, row in found.items() if isinstance(row, dict) and "jit" in row]  # fmt: skip
    return section(
        "Launches of Triton kernels",
        """\
What the host needs for one launch, by Triton's JIT and where the call is bound (microseconds), and for a step of a model of
0.6B with one sequence of 256 tokens (milliseconds until all is asked for). Last column: the same bits, the same losses.""",
        table("kernel | JIT, µs | bound, µs | equal", kernels),
        table("step | JIT, ms | bound, ms | equal", steps),
        records=["host_launch_h200.json"],
    )


def gated_backward() -> str:
    found, again = record("gated_backward_h200"), record("gated_again_h200")
    made = [(f"{shape['width']:,} and {shape['wide']:,}", *(f"{shape['stages']['again'][way]['ms']:.2f}" for way in ("beside", "pass", "stored")))
            for shape in again["shapes"]]  # fmt: skip
    steps = [(BESIDE[row["case"]], *(", ".join(f"{run['median_ms']:.1f}" for run in row[kind]) for kind in ("kept", "again")),
              *(f"{row[kind][0]['planned_ms']:.1f}" for kind in ("kept", "again")),
              *(f"{row[kind][0]['allocated_gib']:.1f}" for kind in ("kept", "again"))) for row in again["steps"]]  # fmt: skip
    rows = [(f"{shape['width']:,} and {shape['wide']:,}", {"slopes": "back through down and SwiGLU", "forward": "gate and up, with SwiGLU"}[stage],
             *(f"{ways[way]['ms']:.2f}" if way in ways else "" for way in ("cublas", "beside")))
            for shape in found["shapes"] for stage, ways in shape["stages"].items() if stage in ("slopes", "forward")]  # fmt: skip
    return section(
        "Back through SwiGLU in down's product",
        f"""\
{found["shapes"][0]["rows"]:,} tokens in bf16: cuBLAS's product and a pass of Triton's through SwiGLU, or one product of quack's that stores the
gradients of gate and up, side by side. The forward's product, which stores gate, up and SwiGLU's result, is beside it.
All results were checked against fp32.

SwiGLU's result is a fifth of an 8B's activations. `recompute = ["swiglu"]` drops it, and the product back through down, which
has gate and up at hand, stores it again. The second table has that product alone, with a pass after it that makes the
result, and storing it; another card than that of the first. The third has steps with the result kept and made again, in
turns.""",
        table("width, and of SwiGLU | what | product and pass, ms | one product, ms", rows),
        table(
            "width, and of SwiGLU | product alone, ms | with a pass for the result, ms | storing the result, ms",
            made,
        ),
        table(
            "case | kept, ms | made again, ms | kept, planned | made again, planned | kept, GiB | made again, GiB",
            steps,
        ),
        records=["gated_backward_h200.json", "gated_again_h200.json"],
    )


def step_ends() -> str:
    found = record("step_ends_h200")
    rows = [(f"{part['elements'] / 1e6:,.0f} M", "split" if part["split"] else "fp32",
             *(f"{fmean(part['ms'][name]):.3f}" for name in ("plain", "pass", "found"))) for part in found["update"]]  # fmt: skip
    ends = {
        name: {on: fmean(run[on] for run in runs) for on in ("gpu", "host")}
        for name, runs in found["end"]["us"].items()
    }
    return section(
        "The update finds largest values, and a step ends in one kernel",
        f"""\
AdamW of weights that are cast to FP8: without their largest value, the pass that would find it, and both at once. The
one kernel that ends a step takes {ends["kernel"]["gpu"]:.0f} microseconds of the GPU where plain torch's calls take {ends["torch"]["gpu"]:.0f}, for which they
wait for the host. States and losses have the same bits in all forms.""",
        table("weights | master weights | update, ms | pass, ms | update that finds it, ms", rows),
        records=["step_ends_h200.json"],
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


def calibrated_links() -> str:
    found = record("links_2xh200")
    sizes = sorted({row["bytes"] for row in found["rows"]})
    by = {(row["collective"], row["bytes"]): row for row in found["rows"]}
    kinds = dict.fromkeys(row["collective"] for row in found["rows"])
    rows = [(kind.replace("_", "-"), *(f"{by[kind, size]['us']:,.0f} ({by[kind, size]['catalogue_us']:,.0f})" for size in sizes))
            for kind in kinds]  # fmt: skip
    copies = found["copies_gb_s"]
    plans = [[abs(one) for one in found[name]] for name in ("step_time_errors", "step_time_errors_of_the_catalogue")]
    said = [f"{percent(fmean(each))} on average and {percent(max(each))} at worst" for each in plans]
    slower = [
        f"{min(found[name].values()):.2f} to {max(found[name].values()):.2f}" for name in ("contention", "slowed")
    ]
    return section(
        "Links that calibrate measured",
        f"""\
`penteract calibrate` on two H200s: microseconds of a collective over
both, hot, in brackets those of the catalogue, measured on a node of eight. The spread of a row is {found["spread"]}. Copies from and
to the host of both at once: {copies["h2d_all"]:.0f} and {copies["d2h_all"]:.0f} GB/s.

Below 16 MiB the catalogue's curves carry the time of the host's call too, so plans have small collectives too long.

Products beside a collective take {slower[0]} times as long, collectives beside products {slower[1]} times, by kind.
Plans with this file have the step times of the sweep of two cards, measured on other machines, off by
{said[0]}; with the catalogue's by {said[1]}.

Falls short: two GPUs only.""",
        table("collective | " + " | ".join(f"{size / 2**20:g} MiB" for size in sizes), rows),
        records=["links_2xh200.json"],
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
    found = record("attention_in_layers_h200")
    layers = found["in_layer"]
    told = "; ".join(
        f"{step[3]:,} tokens: {' and '.join(f'{us:,.0f}' for us in step[6:])} in a step, "
        + ", ".join(f"{' and '.join(f'{us:,.0f}' for us in next(r for r in found[where]['cudnn'] if r[:6] == step[:6])[6:])} {how}"
                    for where, how in (("in_layer", "so"), ("behind_products", "behind products alone")))
        for step in found["in_steps"]["cudnn"]
    )  # fmt: skip
    both = zip(layers["cudnn"], layers["fa4"], strict=True)
    attention = [(f"{batch} x {heads} of {kv_heads} x {length:,}", size, *(f"{rate * 2 * batch * heads * length**2 * size / us / 1e6:.0f}"
                  for us, rate in zip((*cudnn, *found), (1, 2.5, 1, 2.5), strict=True)))
                 for (batch, heads, kv_heads, length, size, _, *cudnn), (*_, f, b) in both for found in ((f, b),)]  # fmt: skip
    return section(
        "Rates that the planner uses",
        f"""\
Compute rates are those of a hot GPU, where power limits the clock. The first table has the largest matrix product that was
measured in each dtype. The sum of two tensors reads and writes {moved / 1e9:.1f} GB at {moved / took / 1e6:.1f} TB/s.

The second table has collectives of {burst["world"]} GPUs of one node: bus bandwidth in GB/s, by number of ranks and size.
NVLink multicast (NVLS) was off. The third table has causal attention in
TFLOP/s, between products in the ratio of its layer: it draws less power than they do, so the more of a step it takes, the
higher the clock. Microseconds of cuDNN's forward and backward, 16 heads of 64: {told}. `walked_kernels_h200.json` has the times of pointwise kernels whose tensors differ in memory
layout.

Falls short: links between nodes were never measured. The planner uses published figures.""",
        table("product | shape | TFLOP/s", rows),
        table("collective | ranks | " + " | ".join(sizes), wires),
        table(
            "batch x heads of KV heads x sequence | head size | cuDNN forward | cuDNN backward | FA4 forward | FA4 backward",
            attention,
        ),
        records=[
            "sustained_h200.json",
            "attention_in_layers_h200.json",
            "ceilings_8xh200.json",
            "walked_kernels_h200.json",
        ],
    )
