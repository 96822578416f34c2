"""The schemas of hardware: which fields GPUs, fabrics, clusters and files of measurements have, and their bounds.

The catalogue, a file given with `--gpus`, the counts in `8xH200` and values from Python are all checked by them. What a
field means is in `config/hardware.py` (`Gpu`, `Fabric`, `Curves`). Bounds are wide: they exclude what no machine has,
and what would break the arithmetic (NaN, negative times, rates of zero).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from penteract.config.files.schema import (
    Either,
    Field,
    FixedList,
    Flag,
    NamedTable,
    Note,
    Number,
    Origin,
    RowList,
    Table,
    Text,
)
from penteract.errors import BadInput

GPUS = Number(int, 1, 2**20)  # how many

_TEXT, _NOTE = Text(), Note()
_DOMAIN = Number(int, 1, 2**20, or_zero=True)  # GPUs that a fabric joins in a node; 0: a fabric between nodes
_RANKS = Number(int, 2, 2**20)  # of a group
_GIB = Number(float, 2**-10, 2**20)
_TFLOPS = Number(float, 1e-6, 1e6)  # low, because a small matmul on a busy CPU is far below 1 GFLOP/s
_PEAK = Number(float, 1e-3, 1e6, or_zero=True)  # TFLOP/s; 0: the device has no matmuls of this dtype
_RATE = Number(float, 1e-3, 1e6)  # GB/s
_MICROSECONDS = Number(float, 1e-3, 1e9)
_LATENCY = Number(float, 1e-3, 1e9, or_zero=True)  # microseconds
_BYTES = Number(float, 1, 2**50)
_SIDE = Number(int, 1, 2**30)  # rows or columns of a matrix, or how many matrices
_FLOPS = Number(int, 1, 2**80)
_HEAD_SIZE = Number(int, 1, 2**16)
_LENGTH = Number(int, 1, 2**40)  # tokens of a sequence
_FRACTION = Number(float, 1e-3, 1)
_FACTOR = Number(float, 1e-3, 1e3)
_VERSION = Number(int, 1, 99, or_zero=True)  # the major or minor part of a compute capability

_POINTS = RowList((_BYTES, _MICROSECONDS))  # `walked` has elements in place of bytes
_FUSED = RowList((_FLOPS, _HEAD_SIZE, _LENGTH, _TFLOPS, _TFLOPS))  # of fused attention: the rates of forward, backward
_BEFORE = 4  # columns of such a row, before it had a sequence length
_SHAPES = Table({"shapes": RowList((_SIDE, _SIDE, _SIDE, _SIDE, _TFLOPS))})  # matmuls: times, m, n, k and the rate
# Products of FP8 values with a scale for each block: with a weight, whose blocks are square; and weight gradients.
BLOCKS, BLOCK_SUMS = "fp8_blockwise", "fp8_blockwise_gradient"
# Optional; bf16 is required: a dtype without measurements is scaled from it.
_DTYPES = ("tf32", "fp32", "fp8", BLOCKS, BLOCK_SUMS, "fp64")
PRODUCTS = ("bf16", *_DTYPES)
_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
# The same by ranks that read each other's memory; a file has all of these or none.
DIRECTLY = "direct_"
DIRECT = tuple(f"{DIRECTLY}{kind}" for kind in _COLLECTIVES if kind != "all_reduce")
# Rates of memory: in device memory, and between pinned host memory and all devices at once, or one of them.
_MEMORY_RATES = ("copy", "adamw", "h2d_all", "h2d_one", "d2h_all", "d2h_one")

GPU = Table(
    {
        "memory_gib": _GIB, "bf16": _PEAK, "tf32": _PEAK, "fp32": _PEAK, "fp8": _PEAK, "fp64": _PEAK, "hbm": _RATE,
        "multiprocessors": Number(int, 1, 2**20),
    },
    {
        "name": _TEXT, "host_link": _RATE, "source": _NOTE, "aliases": Note(read=False),
        "capability": FixedList((_VERSION, _VERSION)),
    },
)  # fmt: skip

FABRIC = Table(
    {"gb_per_second": _RATE},
    {
        "name": _TEXT, "latency_us": _LATENCY, "domain": _DOMAIN, "direct": Flag(), "efficiency": _FRACTION,
        "source": _NOTE,
        "message": Number(int, 1, 2**50, or_zero=True), "devices": GPUS, "aliases": Note(read=False),
        "bus": NamedTable(RowList((Number(float, 1, 2**20), _RATE), fewest=2), fewest=0),
    },
)  # fmt: skip

CLUSTER: Mapping[str, Number] = {
    "gpus": GPUS, "gpus_per_node": GPUS, "memory_gib": Number(float, 2**-10, 2**20, or_zero=True),
    "host_memory_gib": Number(float, 2**-10, 2**20, or_zero=True),
}  # fmt: skip

_NODE = Table(
    {"gpu": Either(Table({**GPU.required, "name": _TEXT}, GPU.optional)), "gpus": GPUS, "gpus_per_node": GPUS},
    {"name": _TEXT, "inside": _TEXT, "between": _TEXT, "host_memory_gib": _GIB},
)


def _gemm() -> Table:
    others: dict[str, Field] = dict.fromkeys(_DTYPES, _SHAPES)
    return Table({"bf16": _SHAPES}, {**others, "basis": _NOTE})


_ATTENTION = Table({"shapes": _FUSED, "flash": FixedList((_FACTOR, _FACTOR))}, {"basis": _NOTE, "fa4": _FUSED})

# What takes several devices to measure. A file has all of these or none; without them, links are those of the
# reference node, scaled.
LINKS = ("collectives", "p2p", "contention")
_LINKS: dict[str, Field] = {
    "collectives": Table(
        dict.fromkeys(_COLLECTIVES, NamedTable(_POINTS, name=_RANKS)),
        dict.fromkeys(DIRECT, NamedTable(_POINTS, name=_RANKS)),
    ),
    "p2p": Table({"one_way": _POINTS, "both_ways": _POINTS}),
    "contention": NamedTable(_FACTOR),
}

# MiB of device memory that a process takes beside its tensors. A file has all of these or none.
PROCESS = (
    "workspace",
    "fp8_workspace",
    "cached",
    "context",
    "first_communicator",
    "communicator",
    "first_channel",
    "channel",
)
FURTHER = "further_neighbour"  # of a channel; a file may have been made before it was measured
_MIB = Number(float, 1e-3, 2**30, or_zero=True)

MEASURED = Table(
    {
        "node": _NODE,
        "provenance": NamedTable(_NOTE),
        "gemm": _gemm(),
        "memory": Table(dict.fromkeys(_MEMORY_RATES, _RATE), {"add": _RATE}),
        "moved": Table({"points": _POINTS}),
        "walked": Table({"points": _POINTS}),
        "launch": Table(
            {"microseconds": _MICROSECONDS, "basis": _NOTE}, {"op": _LATENCY, "of": NamedTable(_LATENCY, fewest=0)}
        ),
    },
    {
        "burst": Note(read=False),  # rates of short bursts, recorded for comparison: nothing reads them
        "attention": _ATTENTION,
        "process": Table(dict.fromkeys(PROCESS, _MIB), {FURTHER: _MIB}),
        "slowed": NamedTable(_FACTOR),
        "between": FABRIC,
        **_LINKS,
    },
)


def check_lengths(tree: Mapping[str, object], origin: Origin) -> None:
    """Raise BadInput for a row of attention without a sequence length, as files had before, or with one that its FLOPs
    cannot be of: 2 · batch · heads · length² · head size. Of other rows the schema says what is wrong."""
    attention = tree.get("attention")
    tables = cast("Mapping[str, Any]", attention if isinstance(attention, Mapping) else {})
    for key in ("shapes", "fa4"):
        rows: Any = tables.get(key)
        for one in rows if isinstance(rows, list) else ():  # pyright: ignore[reportUnknownVariableType]
            row = cast("list[Any]", one if isinstance(one, list) else [])
            if not all(isinstance(x, int) and x > 0 for x in row[:2]):
                continue
            if len(row) == _BEFORE or _of_other_length(row):
                raise BadInput(
                    "VALUE", "not the FLOPs of a sequence length", where=origin(f"attention.{key}"), found=row,
                    allowed="[2 · batch · heads · length² · head size, head size, length, TFLOP/s, TFLOP/s]",
                    fix="write the file anew: penteract calibrate",
                )  # fmt: skip


def _of_other_length(row: list[Any]) -> bool:
    if len(row) != len(_FUSED.cells) or not isinstance(row[2], int) or row[2] <= 0:
        return False
    return row[0] % (2 * row[1] * row[2] ** 2) != 0
