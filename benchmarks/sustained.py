"""One GPU: sustained rates of matrix products and pointwise ops on a hot device.

    python benchmarks/sustained.py --date 2026-11-21 > benchmarks/results/sustained_h200.json

In a training step, power limits the clock, so the rates of short bursts are not reached. Here, about 20 ms of large products
run before each op that is timed. Rounds repeat for `--seconds`. The record has the median over rounds, in microseconds. Host
times are those of launching one op from Python while the stream's queue is not full. The record's attention is of before
`attention_in_layers.py`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

Op = Callable[[], Any]
T, D = 8192, 4096  # tokens and width of an 8B model's layer
SQUARES = [(1, s, s, s) for s in (512, 1024, 2048, 4096, 8192)]
LAYERS = [
    (D, 6144),
    (D, D),
    (D, 28672),
    (14336, D),
    (D, 128256),
    (D, 768),
    (512, D),
    (D, 3584),
    (1792, D),
]  # width, out
SMALL = [(m, 4096, 4096) for m in (64, 128, 256, 512, 1024, 2048)] + [(T, n, D) for n in (128, 256, 512)]
SHORT = [(T, D, k) for k in (64, 128, 256)] + [(2048, 1536, 2048), (2048, 2048, 768), (4096, 1024, 1024)]
BATCHED = [
    (32, 2048, 2048, 128),
    (32, 2048, 128, 2048),
    (128, 512, 512, 128),
    (16, 2048, 1536, 2048),
    (16, 512, 1536, 2048),
]
DTYPES = {
    "bf16": torch.bfloat16,
    "fp8": torch.bfloat16,
    "tf32": torch.float32,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


def shapes(dtype: str) -> list[tuple[int, int, int, int]]:
    """The products to time: times, m, n, k. Slow dtypes have only small ones."""
    if dtype in ("fp32", "fp64"):
        return [*SQUARES[:4], (1, 2048, 4096, 512), (1, 4096, 512, 4096), (1, 512, 4096, 4096)]
    thrice = [s for w, o in LAYERS for s in ((1, T, o, w), (1, T, w, o), (1, o, w, T))]
    rest = [(1, *s) for s in SMALL + SHORT] + (BATCHED if dtype == "bf16" else [])
    return SQUARES + thrice + [s for s in rest if dtype != "fp8" or s[3] % 16 == 0]


def product(dtype: str, times: int, m: int, n: int, k: int) -> Op:
    """A batch of `times` products [m, k]·[k, n]."""
    kind = DTYPES[dtype]
    a, b = torch.randn(times, m, k, device="cuda", dtype=kind), torch.randn(times, n, k, device="cuda", dtype=kind)
    out = torch.empty(times, m, n, device="cuda", dtype=kind)
    if times > 1:
        return lambda: torch.bmm(a, b.transpose(1, 2), out=out)
    if dtype != "fp8":
        return lambda: torch.mm(a[0], b[0].t(), out=out[0])
    x, y, one = a[0].to(torch.float8_e4m3fn), b[0].to(torch.float8_e4m3fn), torch.ones((), device="cuda")
    return lambda: torch._scaled_mm(x, y.t(), one, one, out_dtype=kind, use_fast_accum=True)


def hot(ops: list[Op], filler: Op, seconds: float) -> list[float]:
    """Microseconds of each op after `filler` ops: medians over rounds."""
    rounds: list[list[float]] = [[] for _ in ops]
    for op in (filler, *ops):
        op()
    torch.cuda.synchronize()
    fill = max(1, round(20 / timed([filler], filler, 0)[0]))
    repeat = [max(1, min(20, round(8 / max(ms, 1e-3)))) for ms in timed(ops, filler, 0)]
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(rounds[0]) < 3:
        for i, ms in enumerate(timed(ops, filler, fill, repeat)):
            rounds[i].append(ms * 1e3)
    return [statistics.median(r) for r in rounds]


def timed(ops: list[Op], filler: Op, fill: int, repeat: list[int] | None = None) -> list[float]:
    """Milliseconds of each op in one round: `fill` times `filler`, then the op, which is repeated."""
    marks = []
    for op, times in zip(ops, repeat or [2] * len(ops), strict=True):
        for _ in range(fill):
            filler()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(times):
            op()
        end.record()
        marks.append((start, end, times))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / times for start, end, times in marks]


def host(op: Op, times: int = 1000) -> float:
    """Microseconds that Python needs to launch `op`, while the stream keeps up."""
    found = []
    for _ in range(9):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(times):
            op()
        found.append((time.perf_counter() - start) / times * 1e6)
    return statistics.median(found)


def pointwise() -> Iterator[tuple[int, Op]]:
    """(bytes read and written, out = x + y in bf16), by size."""
    for power in (12, 18, 20, 22, 23, 24, 25, 26, 28, 29):
        x = torch.zeros(2**power // 2, device="cuda", dtype=torch.bfloat16)
        out, y = torch.empty_like(x), torch.ones_like(x)
        yield 3 * 2**power, lambda x=x, y=y, out=out: torch.add(x, y, out=out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--date", required=True, help="for the record")
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds of each kind of work")
    args = parser.parse_args()
    record: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda,
                            "cudnn": torch.backends.cudnn.version(), "date": args.date}  # fmt: skip
    x, out = (torch.randn(128, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    record["host_us"] = {"add": host(lambda: torch.add(x, x, out=out)), "mm": host(lambda: torch.mm(x, x, out=out))}
    filler, bytes_and_ops = product("bf16", 1, 8192, 8192, 8192), list(pointwise())
    found = hot([op for _, op in bytes_and_ops], filler, args.seconds / 4)
    record["moved"] = [[size, us] for (size, _), us in zip(bytes_and_ops, found, strict=True)]
    del bytes_and_ops
    record["products"] = {}
    for dtype in DTYPES:
        torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
        ops = [product(dtype, *shape) for shape in shapes(dtype)]
        largest = (
            product(dtype, 1, 4096, 4096, 4096) if dtype in ("fp32", "fp64") else product(dtype, 1, 8192, 8192, 8192)
        )
        found = hot(ops, largest, args.seconds)
        record["products"][dtype] = [[*shape, us] for shape, us in zip(shapes(dtype), found, strict=True)]
    print(json.dumps(record))


if __name__ == "__main__":
    main()
