"""Write the measured rates of a node as a TOML file of the catalogue.

    python benchmarks/make_8xh200.py ceilings_8xh200.json benchmarks/results/sustained_h200.json \
        benchmarks/results/attention_in_layers_h200.json benchmarks/results/update_forms_h200.json \
        benchmarks/results/flash_attention.json \
        benchmarks/results/step_profile_2xh200.json benchmarks/results/walked_kernels_h200.json \
        benchmarks/results/planned_steps_4xh200.json benchmarks/results/bench_one_card_h200.json \
        benchmarks/results/bench_two_cards_h200.json benchmarks/results/host_calls_h200.json \
        benchmarks/results/direct_links_4xh200.json benchmarks/results/bench_plan_30b_4xh200.json benchmarks/results/contention_in_steps_h200.json benchmarks/results/products_in_blocks_h200.json --date 2026-11-20 > src/penteract/config/catalog/hardware/8xh200.toml

The files have:

1. medians of short bursts on eight GPUs at once: matrix products, attention, copies, collectives;
2. the rates that one GPU sustains while power limits its clock, as in a training step (`benchmarks/sustained.py`);
3. fused attention between the products of its layer (`benchmarks/attention_in_layers.py`);
4. AdamW's kernel by the form that it is compiled in (`benchmarks/update_kernel.py --only bf16`);
5. whole steps of one GPU: the host time of a call on average (`benchmarks/flash_attention.py`);
6. the host time of each kind of call and bucket event (`benchmarks/step_profile.py`, `benchmarks/profile_overlap.py`);
7. pointwise kernels whose tensors differ in memory layout (`benchmarks/walked_kernels.py`);
8. layouts one after the other in one process: what a further communicator takes (`benchmarks/planned_steps.py`);
9. and 10. runs in processes of their own, on one GPU and on two: memory beside tensors (`penteract bench`);
11. the host time of each kind of call on one GPU, bound and with the kernels that runs have (`benchmarks/host_calls.py`);
12. collectives in which ranks read each other's memory, on four GPUs (`benchmarks/direct_links.py`);
13. pipelines of four ranks: memory of messages to and from two neighbours (`penteract bench --top`);
14. what compute loses beside collectives, in steps (`benchmarks/contention_in_steps.py`);
15. products of FP8 values with a scale for each block (`benchmarks/products_in_blocks.py`).

Compute rates are those of the second file, of attention those of the third. The bursts are also written, for comparison.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from penteract.config.files.hardware_schema import BLOCK_SUMS, BLOCKS
from penteract.measure.calibrate.attention_workloads import forward_flops

MIB = 2**20
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
FORM = {"tile": 1024, "warps": 4, "exact": False, "fused": True, "stream": False}  # in which AdamW's kernel is compiled
HEAD_SIZE = {"8b": 128, "1b": 64}
HEADER = """\
# Measured curves of 8 x NVIDIA H200 (HGX, NVLink 4). Written by benchmarks/make_8xh200.py; not edited by hand.
# All are medians: over eight ranks where all measured at once, over rounds where one GPU did.
"""


def hot_products(products: Mapping[str, list[list[float]]]) -> Iterator[str]:
    """The table of matrix products."""
    yield "\n# Products [m, k]·[k, n] among others that keep the GPU hot: [times, m, n, k, TFLOP/s].\n[gemm]"
    yield 'basis = "sustained"  # a step is power-bound: no burst lasts'
    for dtype, rows in products.items():
        yield f"\n[gemm.{dtype}]\nshapes = ["
        for times, m, n, k, us in rows:
            yield f"  [{times}, {m}, {n}, {k}, {2 * times * m * n * k / us / 1e6:.2f}],"
        yield "]"


def attention(rows: Mapping[str, list[list[float]]]) -> Iterator[str]:
    """The tables of fused attention."""
    yield "\n# Fused causal attention (cuDNN) between the products of its layer: [FLOPs of the forward, causal half, head"
    yield "# size, sequence length, TFLOP/s forward, TFLOP/s backward]; backward is 2.5 times the FLOPs of the forward.\n[attention]"
    yield 'basis = "sustained"\nshapes = ['
    yield from attention_rates(rows["cudnn"])
    yield "]\n# The same of FlashAttention-4.\nfa4 = ["
    yield from attention_rates(rows["fa4"])
    yield "]"


def attention_rates(rows: list[list[float]]) -> Iterator[str]:
    """A line for each shape."""
    for row in rows:
        batch, heads, kv_heads, length, size, width, forward, backward = row
        flops = forward_flops(row)
        rates = f"{flops / forward / 1e6:.2f}, {2.5 * flops / backward / 1e6:.2f}"
        about = f"batch {batch}, {heads} heads of {kv_heads}, sequence {length}, width {width}"
        yield f"  [{flops:.0f}, {size}, {length}, {rates}],  # {about}"


def flash_share(bursts: Mapping[str, Any]) -> Iterator[str]:
    """The rate of the flash kernel over that of cuDNN for the same shapes, both in bursts."""
    both = [name.removesuffix("_flash_fwd") for name in bursts if name.endswith("_flash_fwd")]
    forward, backward = (
        statistics.median(bursts[f"{name}_cudnn_{way}"]["ms"] / bursts[f"{name}_flash_{way}"]["ms"] for name in both)
        for way in ("fwd", "bwd")
    )
    yield "# Of the rates above that the flash kernel reaches, forward and backward: medians over the same shapes."
    yield f"flash = [{forward:.3f}, {backward:.3f}]"


def update_rate(forms: list[dict[str, Any]]) -> float:
    """GB/s of AdamW's kernel as it is compiled, on the largest shard."""
    form = next(row for row in forms if all(row[key] == value for key, value in FORM.items()))
    return 1e3 * max(form["tb_a_second"].items(), key=lambda one: int(one[0]))[1]


def memory(rows: Mapping[str, Any], moved: list[list[float]], update: float) -> Iterator[str]:
    """The bandwidth of device and host memory, and the time of a pointwise kernel by bytes."""
    yield "\n# GB/s of device memory, bytes read and written; of pinned host memory with all eight at once, and alone.\n[memory]"
    for key, name in (("copy", "d2d_copy_2GiB"), ("add", "add_bf16_2GiB")):
        yield f"{key} = {rows[name]['gbps']:.1f}"
    yield f"adamw = {update:.1f}"
    for key in ("h2d", "d2h"):
        for who in ("all", "one"):
            yield f"{key}_{who} = {rows[f'{key}_pinned_512MiB_{who}']['gbps']:.2f}"
    text = ", ".join(f"[{size}, {us:.2f}]" for size, us in moved)
    yield f"\n# One pointwise kernel, hot: [bytes read and written, microseconds].\n[moved]\npoints = [{text}]"


def walked(rows: list[list[float]]) -> Iterator[str]:
    """The time of a pointwise kernel whose tensors differ in memory layout, by elements."""
    text = ", ".join(f"[{elements}, {us:.2f}]" for elements, us, _ in rows)
    yield "\n# One pointwise kernel whose tensors do not lie alike, in a step: [elements, microseconds]."
    yield f"[walked]\npoints = [{text}]"


def wires(data: Mapping[str, Any], direct: list[Mapping[str, Any]]) -> Iterator[str]:
    """The times of collectives and of messages between neighbours."""
    yield "\n# Collectives, called one by one: [bytes of the whole tensor, microseconds] by number of ranks. Below 4 MiB it is"
    yield "# the host's call that takes the time, not the wire."
    for kind in KINDS:
        yield f"\n[collectives.{kind}]"
        for ranks in (2, 4, 8):
            points = ((r, v) for r, v in data[kind].items() if r.startswith(f"g{ranks}_"))
            text = ", ".join(f"[{round(float(r.split('_')[1][:-3]) * MIB)}, {v['ms'] * 1e3:.2f}]" for r, v in points)
            yield f"{ranks} = [{text}]"
    yield "\n# The same where ranks read each other's memory, on four GPUs."
    for kind in dict.fromkeys(row["collective"] for row in direct):
        yield f"\n[collectives.direct_{kind}]"
        for ranks in (2, 4):
            points = sorted((r["bytes"], r["us"]) for r in direct if (r["collective"], r["ranks"]) == (kind, ranks))
            yield f"{ranks} = [{', '.join(f'[{size}, {us:.2f}]' for size, us in points)}]"
    yield "\n# Neighbours in pairs, all at once: [bytes, microseconds] one way, and with as much coming back.\n[p2p]"
    for key, way in (("one_way", "uni"), ("both_ways", "bidir")):
        points = ((r[len(way) + 1 : -1], v["ms"]) for r, v in data["p2p"].items() if re.fullmatch(rf"{way}_\d+B", r))
        text = ", ".join(f"[{size}, {ms * 1e3:.2f}]" for size, ms in points)
        yield f"{key} = [{text}]"


def contention(steps: Mapping[str, Any]) -> Iterator[str]:
    """How much slower compute is during collectives, of which most are reduce-scatters."""
    factor = statistics.mean(row["factor"] for row in steps["factors"].values())
    yield "\n# Kernels of passes in steps of data parallelism, over the same on one GPU: what they lose in a second of the"
    yield f"# collectives, as these take alone.\n[contention]\nreduce_scatter = {factor:.4f}"


# Parts of a step in a profile of the host -> their names in a timeline (`step/names.py`). Older profiles have the names
# `need` and `land`.
NAMES = {"need": ["wait parameters"], "wait_all_gather": ["wait parameters"], "widen": ["wait gradients"],
         "gather": ["all_gather parameters"], "reduce": ["reduce_scatter gradients", "all_reduce gradients"],
         "measure": ["gradient norm: squares"], "update": ["update"], "land": ["add gradients"],
         "wait_reduce_scatter": ["add gradients"]}  # fmt: skip
IDLE = 5.0  # below so many microseconds, a part had nothing to do


CALLS = ("forward ", "input_gradient ", "weight_gradient ", "update", "gradient norm: squares")  # needs no other rank


def host(
    rows: Mapping[str, float],
    small: Mapping[str, Any],
    profiles: list[Mapping[str, Any]],
    calls: list[Mapping[str, Any]],
) -> Iterator[str]:
    """Host time of calls. `small`: steps in which the device waits for the host, by attention kernel; `profiles`: host
    time of such steps by part; `calls`: of such steps on one GPU by call, instead of the same in `profiles`."""
    each = statistics.median(
        row["ms_per_call"] for row in small.values() if isinstance(row, dict) and "ms_per_call" in row
    )
    yield "\n# Microseconds of the host for one call of a kernel in an eager step; for one op alone: the mean of a pointwise"
    yield "# one and a product.\n[launch]"
    yield f'basis = "measured"\nmicroseconds = {1e3 * each:.1f}\nop = {sum(rows.values()) / len(rows):.2f}'
    yield "\n# The same of those that were measured one by one: medians, of several runs the lowest. What needs no other rank"
    yield "# is bound and has the kernels that runs have by themselves.\n[launch.of]"
    found = dict[str, float]()
    for part, us in (pair for row in profiles for pair in row.get("host_us", {}).items()):
        for name in [part.removeprefix("call ")] if part.startswith("call ") else NAMES.get(part, []):
            found[name] = min(us, found.get(name, us)) if us > IDLE else found.get(name, us)
    bound = dict[str, float]()
    for name, row in (pair for case in calls for pair in case["calls"].items()):
        if name.startswith(CALLS):
            bound[name] = min(row["us"], bound.get(name, row["us"]))
    yield from (f'"{name}" = {us:.1f}' for name, us in sorted((found | bound).items()))


def burst_products(rows: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, int, int], float]]:
    """name, (m, n, k), TFLOP/s of each product that was measured in bursts."""
    for name, row in rows.items():
        found = re.fullmatch(r"(\w+_T\d+)_(fwd|dgrad|wgrad)", name)
        if found:
            tokens, width, out = rows[f"{found[1]}_fwd"]["mkn"]
            sizes = {"fwd": (tokens, out, width), "dgrad": (tokens, width, out), "wgrad": (out, width, tokens)}
            yield name, sizes[found[2]], row["tflops"]
        elif name == "8192^3_nn":
            yield name, (8192, 8192, 8192), row["tflops"]


def bursts(data: Mapping[str, Any]) -> Iterator[str]:
    """Rates in bursts. Plans do not use them: they show how far the rates of a step are below."""
    yield "\n# Bursts of 30 on eight GPUs at once, bf16: [m, n, k, TFLOP/s]. For comparison; no rate is made of them.\n[burst]"
    yield f"sustained_8192 = {data['gemm_bf16']['8192^3_nn_sustained2s']['tflops']:.2f}  # 8192^3 for 2 s, on eight"
    yield "gemm = ["
    for name, (m, n, k), rate in burst_products(data["gemm_bf16"]):
        yield f"  [{m}, {n}, {k}, {rate:.2f}],  # {name}"
    yield "]\n# Attention by cuDNN: [FLOPs of the forward, head size, TFLOP/s forward, TFLOP/s backward]\nattention = ["
    for name, row in data["sdpa"].items():
        if name.endswith("_cudnn_fwd"):
            flops, back = row["tflops"] * row["ms"] * 1e9, data["sdpa"][name[:-3] + "bwd"]["tflops"]
            yield f"  [{flops:.0f}, {HEAD_SIZE[name[:2]]}, {row['tflops']:.2f}, {back:.2f}],  # {name[:-10]}"
    yield "]"


def process(  # a record each
    tried: Mapping[str, Any], one: Mapping[str, Any], two: Mapping[str, Any], four: Mapping[str, Any]
) -> Iterator[str]:
    """MiB of a process beside tensors, from the first case of each kind: the others tell whether it holds."""

    def beside(row: Mapping[str, Any]) -> float:
        device, reserved = (row.get(key) or row["measured"][key] for key in ("device_gib", "reserved_gib"))
        return 2**10 * (max(device) - max(reserved) if isinstance(device, list) else device - reserved)

    def first(record: Mapping[str, Any], has: str, key: str) -> dict[str, Any]:
        return next(row for row in record["rows"] if any(has in text for text in (row[key], str(row.get("settings")))))

    plain, fp8 = first(one, "bf16", "name"), first(one, "fp8", "name")
    more = [beside(after) - beside(before) for before, after in pairwise(tried["rows"])]
    layouts = [row["layout"] for row in tried["rows"]]
    names = [text if isinstance(text, str) else ",".join(f"{k}={v}" for k, v in text.items()) for text in layouts]
    workspace = 2**10 * (plain["allocated_gib"] - plain["planned_gib"])
    communicator = more[0]  # from one layout of data parallelism to another: a communicator more
    pipelined = next(i for i, name in enumerate(names) if "pp" in name and "dp" in name)
    channel = (more[pipelined - 1] - 2 * communicator) / 2  # two of collectives, and two of messages
    apart = beside(plain)
    started = beside(first(two, "tp=2", "layout")) - apart - communicator
    first_channel = beside(first(two, "pp=2", "layout")) - apart - started - communicator - 2 * channel
    ring = beside(first(four, "dp=1,pp=4", "layout")) - apart - started - communicator - first_channel
    found = {
        "workspace": workspace, "fp8_workspace": 2**10 * (fp8["allocated_gib"] - fp8["planned_gib"]) - workspace,
        "cached": 2**10 * (plain["reserved_gib"] - plain["allocated_gib"]), "context": apart,
        "first_communicator": started, "communicator": communicator,
        "first_channel": first_channel, "channel": channel, "further_neighbour": ring / 2 - channel,
    }  # fmt: skip
    yield "\n# MiB of a process beside tensors, in torch's allocator: what libraries work in (with FP8 more), and what blocks"
    yield "# leave. On the device: the CUDA context, and NCCL's communicators and channels of messages, the first of which"
    yield "# takes more; a channel to one rank and from another takes more than with one rank.\n[process]"
    yield from (f"{name} = {size:.2f}" for name, size in found.items())


def toml(  # noqa: PLR0913 (a record each)
    data: Mapping[str, Any],
    hot: Mapping[str, Any],
    layers: Mapping[str, Any],
    update: Mapping[str, Any],
    steps: Mapping[str, Any],
    profile: Mapping[str, Any],
    kernels: Mapping[str, Any],
    tried: Mapping[str, Any],
    one: Mapping[str, Any],
    two: Mapping[str, Any],
    calls: Mapping[str, Any],
    direct: Mapping[str, Any],
    four: Mapping[str, Any],
    beside: Mapping[str, Any],
    blocks: Mapping[str, Any],
    date: str,
) -> str:
    """The whole file."""
    multicast = "off" if data["env"]["NCCL_NVLS_ENABLE"] == "0" else "on"
    about = {"device": data["gpu"], "torch": data["torch"], "cuda": data["cuda"], "nccl": data["nccl"],
             "cudnn": str(data["cudnn"]), "date": date, "date_sustained": hot["date"],
             "nvls_multicast": multicast, "statistic": "median"}  # fmt: skip
    lines = [HEADER, "[node]", 'gpu = "H200"', f"gpus = {data['world']}", f"gpus_per_node = {data['world']}"]
    lines += ["", "[provenance]", *(f"{key} = {json.dumps(value)}" for key, value in about.items())]
    in_blocks = {kind: rows for kind, rows in blocks["products"].items() if kind in (BLOCKS, BLOCK_SUMS)}
    parts = (hot_products(hot["products"] | in_blocks), attention(layers["in_layer"]), flash_share(data["sdpa"]), memory(data["hbm"], hot["moved"], update_rate(update["forms"])),
             walked(kernels["walked: elements, µs, kernels"]), wires(data, direct["rows"]), contention(beside), host(hot["host_us"], steps["small"], profile["rows"], calls["rows"]), process(tried, one, two, four), bursts(data))  # fmt: skip
    return "\n".join([*lines, *(line for part in parts for line in part)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ceilings", type=Path, help="JSON of bursts and collectives on eight GPUs")
    parser.add_argument("sustained", type=Path, help="JSON of benchmarks/sustained.py")
    parser.add_argument("layers", type=Path, help="JSON of benchmarks/attention_in_layers.py")
    parser.add_argument("update", type=Path, help="JSON of benchmarks/update_kernel.py")
    parser.add_argument("steps", type=Path, help="JSON of benchmarks/flash_attention.py")
    parser.add_argument("profile", type=Path, help="JSON of benchmarks/profile_overlap.py")
    parser.add_argument("kernels", type=Path, help="JSON of benchmarks/walked_kernels.py")
    parser.add_argument("tried", type=Path, help="JSON of benchmarks/planned_steps.py")
    parser.add_argument("one", type=Path, help="JSON of a sweep on one GPU")
    parser.add_argument("two", type=Path, help="JSON of a sweep on two")
    parser.add_argument("calls", type=Path, help="JSON of benchmarks/host_calls.py")
    parser.add_argument("direct", type=Path, help="JSON of benchmarks/direct_links.py")
    parser.add_argument("four", type=Path, help="JSON of a sweep on four GPUs, with a pipeline over all")
    parser.add_argument("beside", type=Path, help="JSON of benchmarks/contention_in_steps.py")
    parser.add_argument("blocks", type=Path, help="JSON of benchmarks/products_in_blocks.py")
    parser.add_argument("--date", required=True, help="date of the first file")
    args = parser.parse_args()
    paths = (
        args.ceilings,
        args.sustained,
        args.layers,
        args.update,
        args.steps,
        args.profile,
        args.kernels,
        args.tried,
        args.one,
        args.two,
        args.calls,
        args.direct,
        args.four,
        args.beside,
        args.blocks,
    )
    read = (json.loads(path.read_text()) for path in paths)
    print(toml(*read, args.date), end="")


if __name__ == "__main__":
    main()
