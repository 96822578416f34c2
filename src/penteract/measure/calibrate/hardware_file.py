"""Measured rows as a hardware file, which `--gpus FILE.toml` reads. Rates are arithmetic on rows: nothing is fitted."""

from __future__ import annotations

import json
import statistics
import tomllib
from collections.abc import Iterator, Mapping
from os import sysconf

import torch

from penteract.config.device_words import CPU
from penteract.config.files.hardware_schema import MEASURED, PRODUCTS
from penteract.config.files.schema import option
from penteract.config.hardware import DTYPES, gpu
from penteract.errors import BadInput
from penteract.measure.calibrate.attention_workloads import forward_flops
from penteract.measure.calibrate.links.link_tables import (
    between_table,
    copy_rate,
    hosts_and_each,
    link_tables,
    measured_devices,
)
from penteract.measure.calibrate.measured_rows import MeasuredRows

_BACKWARD = 2.5  # FLOPs of attention's backward over its forward: five products for two
_ADAMW, _EITHER_WAY = 28, 2  # bytes of an update by parameter; of a copy on the device by byte
INSIDE = "pcie5"  # what joins devices that the catalogue does not know


def hardware_file(rows: MeasuredRows, device: torch.device, provenance: Mapping[str, str]) -> str:
    """The file as text, held to its own schema. Raises BadInput where a needed row could not be measured."""
    text = "\n".join(_lines(rows, device, provenance)) + "\n"
    MEASURED.check(tomllib.loads(text), "", option)
    return text


def _lines(rows: MeasuredRows, device: torch.device, provenance: Mapping[str, str]) -> Iterator[str]:
    links = "with links between devices" if measured_devices(rows) else "links between devices are modelled by plans"
    yield f"# Measured by penteract calibrate, hot: medians; {links}."
    yield from _node(rows, device)
    yield "\n[provenance]"
    yield from (f"{key} = {json.dumps(value)}" for key, value in provenance.items())
    yield '\n# Products [m, k]·[k, n]: [times, m, n, k, TFLOP/s].\n[gemm]\nbasis = "sustained"'
    for dtype in PRODUCTS:
        if found := products(rows, dtype):
            yield f"\n[gemm.{dtype}]\nshapes = ["
            yield from (f"  [{t}, {m}, {n}, {k}, {rate:.6g}]," for t, m, n, k, rate in found)
            yield "]"
    yield from _attention(rows)
    yield from _memory(rows)
    yield from link_tables(rows)
    yield from between_table(rows, provenance.get("date", "no date"))
    calls = {name: us for (name,), us in rows.under("launch")}
    yield "\n# Microseconds of the host for one call of a kernel.\n[launch]"
    yield f'basis = "measured"\nmicroseconds = {_needed(statistics.median(calls.values()) if calls else None):.4g}'


def products(rows: MeasuredRows, dtype: str) -> list[tuple[int, int, int, int, float]]:
    """The products of a dtype: times, m, n, k, TFLOP/s."""
    found = rows.under("product", dtype)
    return [(t, m, n, k, 2 * t * m * n * k / us / 1e6) for (t, m, n, k), us in found]


def _node(rows: MeasuredRows, device: torch.device) -> Iterator[str]:
    hosts, each = hosts_and_each(rows)
    each = each if measured_devices(rows) and device.type == "cuda" else 1  # ranks of a CPU share it
    yield f"\n[node]\ngpus = {hosts * each}\ngpus_per_node = {each}"
    if device.type == "cuda" and (name := catalogued(torch.cuda.get_device_name(device))):
        yield f"host_memory_gib = {host_memory_gib():.2f}\ngpu = {json.dumps(name)}"
        return
    yield f"inside = {json.dumps(INSIDE)}"
    if device.type == "cuda":  # what has no memory of its own shares its host's
        yield f"host_memory_gib = {host_memory_gib():.2f}"
    yield "\n# Not in the catalogue: its peaks are the best that was measured.\n[node.gpu]"
    name, count, memory = CPU, torch.get_num_threads(), host_memory_gib()
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        name, count, memory = about.name, about.multi_processor_count, about.total_memory / 2**30
    yield f"name = {json.dumps(name)}\nmemory_gib = {memory:.2f}\nmultiprocessors = {count}"
    if device.type == "cuda":
        yield f"capability = [{about.major}, {about.minor}]"
    for dtype in DTYPES:
        yield f"{dtype} = {max((row[4] for row in products(rows, dtype)), default=0.0):.6g}"
    moved = (size / us / 1e3 for (size,), us in rows.under("moved"))
    yield f"hbm = {max([*moved, *(_EITHER_WAY * rate for rate in _rates(rows, 'copy'))], default=0.0):.6g}"
    yield f"host_link = {min([*_rates(rows, 'h2d'), *_rates(rows, 'd2h')], default=0.0):.6g}"


def host_memory_gib() -> float:
    """GiB of this host's memory."""
    return sysconf("SC_PAGE_SIZE") * sysconf("SC_PHYS_PAGES") / 2**30


def catalogued(name: str) -> str | None:
    """The catalogue's name of a GPU that torch calls `name`: NVIDIA H100 80GB HBM3 is an H100."""
    words = name.removeprefix("NVIDIA ").split()
    for end in range(len(words), 0, -1):
        try:
            return gpu("-".join(words[:end])).name
        except BadInput:
            continue
    return None


def _attention(rows: MeasuredRows) -> Iterator[str]:
    """Tables of fused attention: cuDNN's rates, the share of them that flash reaches, and FlashAttention-4's."""
    by_kernel = {name: attention_rates(rows, name) for name in ("cudnn", "flash", "fa4")}
    cudnn, flash = by_kernel["cudnn"], by_kernel["flash"]
    shared = [shape for shape in flash if shape in cudnn]
    if not shared:
        return
    yield "\n# Fused causal attention: [FLOPs of the forward, causal half, head size, sequence length,"
    yield "# TFLOP/s of it, of the backward]."
    yield '[attention]\nbasis = "sustained"'
    shares = [statistics.median(flash[s][way] / cudnn[s][way] for s in shared) for way in (0, 1)]
    yield f"flash = [{shares[0]:.4f}, {shares[1]:.4f}]  # of cuDNN's rates that the flash kernel reaches: medians"
    for key, found in (("shapes", cudnn), ("fa4", by_kernel["fa4"])):
        if found:
            yield f"{key} = ["
            for shape, (forward, backward) in found.items():
                batch, heads, kv_heads, length, size, _ = shape
                about = f"batch {batch}, {heads} heads of {kv_heads}, sequence {length}"
                yield f"  [{forward_flops(shape)}, {size}, {length}, {forward:.6g}, {backward:.6g}],  # {about}"
            yield "]"


def attention_rates(rows: MeasuredRows, name: str) -> dict[tuple[int, ...], tuple[float, float]]:
    """TFLOP/s of a kernel, forward and backward, of shapes for which both were measured."""
    ways = [dict(rows.under("attention", name, way)) for way in ("forward", "input_gradient")]
    found = dict[tuple[int, ...], tuple[float, float]]()
    for shape, us in ways[0].items():
        flops = forward_flops(shape)
        if shape in ways[1]:
            found[shape] = flops / us / 1e6, _BACKWARD * flops / ways[1][shape] / 1e6
    return found


def _memory(rows: MeasuredRows) -> Iterator[str]:
    yield "\n# GB/s: of device memory, bytes read and written; of copies from and to the host.\n[memory]"
    yield f"copy = {_EITHER_WAY * _rate(rows, 'copy'):.6g}\nadamw = {_ADAMW * _rate(rows, 'adamw'):.6g}"
    for way in ("h2d", "d2h"):
        yield f"{way}_all = {copy_rate(rows, f'{way}_all') or _rate(rows, way):.6g}"
        yield f"{way}_one = {_rate(rows, way):.6g}"
    yield "\n# One pointwise kernel: [bytes read and written, microseconds]."
    yield f"[moved]\npoints = {_points(rows, 'moved')}"
    yield "\n# One whose operands differ in dtype and layout: [elements, microseconds]."
    yield f"[walked]\npoints = {_points(rows, 'walked')}"


def _points(rows: MeasuredRows, kind: str) -> str:
    return json.dumps([[size, float(f"{us:.5g}")] for (size,), us in sorted(rows.under(kind))])


def _rates(rows: MeasuredRows, kind: str) -> list[float]:
    """Thousands of bytes (or parameters) in a microsecond."""
    return [size / us / 1e3 for (size,), us in rows.under(kind)]


def _rate(rows: MeasuredRows, kind: str) -> float:
    return _needed(max(_rates(rows, kind), default=None))


def _needed(found: float | None) -> float:
    if found is None:
        raise BadInput("CALIBRATION", "a workload that every hardware file needs could not be measured",
                       fix="stop other programs on the device, remove the .rows file and run it again")  # fmt: skip
    return found
