"""What is measured on one device, the most used first.

Each workload has a key, which names it in the rows on disk, and makes its operation when it is its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from penteract.config.files.hardware_schema import BLOCK_SUMS, BLOCKS
from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.config.precision.fp8 import Fp8
from penteract.engine.kernels.kernel import Env
from penteract.engine.kernels.quantised.fp8 import real
from penteract.engine.kernels.quantised.quantise import Operand
from penteract.engine.kernels.registry import kernel
from penteract.engine.optim.optimizer import Factors
from penteract.measure.calibrate.attention_workloads import attention
from penteract.measure.calibrate.hot_clock import HotClock, Op
from penteract.ops.declarations import OPS
from penteract.ops.spec import Spec
from penteract.ops.tape import Site

Key = tuple[str | int, ...]
T, D = 8192, 4096  # tokens and width of an 8B model's layer
BLOCK = Fp8(kind="blockwise").block
LAYERS = (
    (D, 6144), (D, D), (D, 28672), (14336, D), (D, 128256), (D, 768), (512, D), (D, 3584), (1792, D),
)  # width, out  # fmt: skip
SQUARES = (8192, 4096, 2048, 1024, 512)
NARROW = (
    *((m, D, D) for m in (64, 128, 256, 512, 1024, 2048)), *((T, n, D) for n in (128, 256, 512)),
    *((T, D, k) for k in (64, 128, 256)), (2048, 1536, 2048), (2048, 2048, 768), (4096, 1024, 1024),
)  # fmt: skip
BATCHED = (
    (32, 2048, 2048, 128), (32, 2048, 128, 2048), (128, 512, 512, 128), (16, 2048, 1536, 2048), (16, 512, 1536, 2048),
)  # fmt: skip
SLOW = ((2048, 4096, 512), (4096, 512, 4096), (512, 4096, 4096))
ON_CPU = ((256, 256, 256), (64, 64, 64), (512, 512, 512), (512, 256, 1024), (1024, 64, 256), (64, 1024, 512))
DTYPES = {
    "bf16": torch.bfloat16, "fp32": torch.float32, "tf32": torch.float32, "fp64": torch.float64,
    "fp8": torch.float8_e4m3fn, BLOCKS: torch.float8_e4m3fn, BLOCK_SUMS: torch.float8_e4m3fn,
}  # fmt: skip
FP8_SINCE, BLOCKS_SINCE, TF32_SINCE = (8, 9), (9, 0), (8, 0)  # compute capabilities


class Workload(NamedTuple):
    """`make`: -> the operation. `needed`: a hardware file cannot be without it, whatever the budget. `host`: the time
    of its launch is wanted, not its own. `around`: FLOPs of the products between two of its calls in a layer; 0: it is
    timed behind products."""

    key: Key
    make: Callable[[], Op]
    needed: bool = False
    host: bool = False
    around: float = 0.0

    def microseconds(self, clock: HotClock) -> float:
        """Of the operation, or of its launch."""
        op = self.make()
        if self.host:
            return clock.launch_microseconds(op)
        return clock.microseconds_in_layer(op, self.around) if self.around else clock.microseconds(op)


def workloads(device: torch.device) -> list[Workload]:
    """All workloads of a device: those that are needed, then products, attention and memory in the widest use."""
    found = [
        *memory(device), *launches(device), *products(device, "bf16"), *attention_of(device),
        *(w for dtype in dtypes(device) if dtype != "bf16" for w in products(device, dtype)),
    ]  # fmt: skip
    return sorted(found, key=lambda w: not w.needed)


def dtypes(device: torch.device) -> tuple[str, ...]:
    """The dtypes whose products the device has, in the order of their use."""
    if device.type != "cuda":
        return ("bf16", "fp32", "fp64")
    version = torch.cuda.get_device_capability(device)
    blocks = version >= BLOCKS_SINCE
    has = {"fp8": version >= FP8_SINCE, BLOCKS: blocks, BLOCK_SUMS: blocks, "tf32": version >= TF32_SINCE}
    return tuple(dtype for dtype in ("bf16", "fp8", BLOCKS, BLOCK_SUMS, "tf32", "fp32", "fp64") if has.get(dtype, True))


# ---- products ------------------------------------------------------------------------------------------------------


def products(device: torch.device, dtype: str) -> Iterator[Workload]:
    """Products [m, k]·[k, n] over widths and token counts; slow dtypes have small ones."""
    always = ("bf16",) if device.type == "cuda" else ("bf16", "fp32")  # the second is a CPU's default
    for i, shape in enumerate(_shapes(device, dtype)):
        yield Workload(
            ("product", dtype, *shape), lambda shape=shape: product(device, dtype, *shape), dtype in always and i < 4
        )


def _shapes(device: torch.device, dtype: str) -> list[tuple[int, int, int, int]]:
    if device.type != "cuda":
        return [(1, *shape) for shape in ON_CPU]
    if dtype in ("fp32", "fp64"):
        return [(1, *shape) for shape in (*((s, s, s) for s in SQUARES[1:]), *SLOW)]
    layers = [(1, *s) for w, out in LAYERS for s in ((T, out, w), (T, w, out), (out, w, T))]
    squares, narrow = [(1, s, s, s) for s in SQUARES], [(1, *s) for s in NARROW]
    if dtype == BLOCK_SUMS:
        return [one for one in dict.fromkeys([*squares[:1], *layers]) if one[3] == T]
    if dtype == BLOCKS:
        whole = [one for one in (*squares[1:], *layers, *narrow) if not any(size % BLOCK for size in one[2:])]
        return [one for one in dict.fromkeys(whole) if one[3] != T]
    return [*dict.fromkeys([*squares, *layers, *narrow, *(BATCHED if dtype == "bf16" else ())])]


def product(device: torch.device, dtype: str, times: int, m: int, n: int, k: int) -> Op:
    """`times` products in one kernel. Both operands lie along the inner dimension, as in a linear layer."""
    kind, wide = DTYPES[dtype], torch.bfloat16 if dtype in ("fp8", BLOCKS, BLOCK_SUMS) else DTYPES[dtype]
    a, b = (torch.randn(times, rows, k, device=device, dtype=wide) for rows in (m, n))
    out = torch.empty(times, m, n, device=device, dtype=wide)
    if times > 1:
        return lambda: torch.bmm(a, b.transpose(1, 2), out=out)
    if dtype == "fp8":
        x, y, one = a[0].to(kind), b[0].to(kind), torch.ones((), device=device)
        scaled: Any = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage] - no public name yet
        return lambda: scaled(x, y.t(), one, one, out_dtype=wide, use_fast_accum=True)

    if dtype in (BLOCKS, BLOCK_SUMS):
        operands = _in_blocks(a[0].to(kind), b[0].to(kind), squares=dtype == BLOCKS)
        return partial(real, Fp8(kind="blockwise"), *operands, out[0], True)

    def multiply() -> None:
        torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
        torch.mm(a[0], b[0].t(), out=out[0])

    return multiply


def _in_blocks(a: torch.Tensor, b: torch.Tensor, *, squares: bool) -> tuple[Operand, Operand]:
    """Operands of a linear layer whose blocks are scaled by 1. `squares`: those of the second are, as a weight's."""
    (m, k), n = a.shape, len(b)
    second = (n // BLOCK, k // BLOCK) if squares else (k // BLOCK, n)
    return Operand(a, torch.ones(k // BLOCK, m, device=a.device)), Operand(b, torch.ones(second, device=a.device))


# ---- memory --------------------------------------------------------------------------------------------------------


def memory(device: torch.device) -> Iterator[Workload]:
    """Pointwise kernels by size, copies on the device, to and from the host, and an AdamW update."""
    gpu = device.type == "cuda"
    powers = (12, 18, 20, 22, 23, 24, 25, 26, 28, 29) if gpu else (12, 16, 18, 20, 22, 24)
    for i, power in enumerate(powers):
        yield Workload(("moved", 3 * 2**power), lambda power=power: _add(device, 2**power), i % 3 == 0)
    for i, power in enumerate(range(21, 26) if gpu else range(12, 21, 2)):
        yield Workload(("walked", 2**power), lambda power=power: _widen(device, 2**power), i % 4 == 0)
    large, linked, parameters = (2**30, 2**29, 10**8) if gpu else (2**25, 2**25, 10**6)
    yield Workload(("copy", large), lambda: _copy(large, device, device), needed=True)
    host = torch.device("cpu")
    yield Workload(("h2d", linked), lambda: _copy(linked, host, device), needed=True)
    yield Workload(("d2h", linked), lambda: _copy(linked, device, host), needed=True)
    yield Workload(("adamw", parameters), lambda: _adamw(device, parameters), needed=True)


def _add(device: torch.device, size: int) -> Op:
    """out = x + y in bf16, each of `size` bytes."""
    x = torch.zeros(size // 2, device=device, dtype=torch.bfloat16)
    out, y = torch.empty_like(x), torch.ones_like(x)
    return lambda: torch.add(x, y, out=out)


def _widen(device: torch.device, elements: int) -> Op:
    """A bf16 tensor times a number of each row in fp32: operands that differ in dtype and layout."""
    x = torch.ones(elements // 4096, 4096, device=device, dtype=torch.bfloat16)
    scale, out = torch.ones(len(x), 1, device=device), torch.empty(x.shape, device=device)
    return lambda: torch.mul(x, scale, out=out)


def _copy(size: int, source: torch.device, target: torch.device) -> Op:
    """`size` bytes; host memory is page-locked where the other end is a GPU."""
    pin = source.type != target.type
    x, y = (
        torch.zeros(size, dtype=torch.uint8, device=at, pin_memory=pin and at.type == "cpu") for at in (source, target)
    )
    return lambda: y.copy_(x, non_blocking=True)


def _adamw(device: torch.device, parameters: int) -> Op:
    """The update of a step: on a GPU that of a bf16 run, elsewhere torch's with everything in fp32. For a parameter, 28
    bytes are read or written."""
    if device.type == "cuda" and find_spec("triton") is not None:
        return _adamw_on_gpu(device, parameters)
    p = torch.nn.Parameter(torch.zeros(parameters, device=device))
    p.grad = torch.ones_like(p)
    return torch.optim.AdamW([p], fused=True).step


def _adamw_on_gpu(device: torch.device, parameters: int) -> Op:
    from penteract.engine.kernels.triton.optimizer.adamw import update

    gradient, mean, square = (torch.zeros(parameters, device=device) for _ in range(3))
    lower = torch.zeros(parameters, device=device, dtype=torch.int16)
    parameter = torch.zeros(parameters, device=device, dtype=torch.bfloat16)
    factors, nonfinite = torch.ones(len(Factors._fields), device=device), torch.zeros((), device=device)
    bound: dict[Any, Any] = {}
    state = gradient, mean, square, lower, parameter, factors, nonfinite
    return lambda: update(*state, (0.05, 1e-8), decay=True, bound=bound)


# ---- the host ------------------------------------------------------------------------------------------------------


def launches(device: torch.device) -> Iterator[Workload]:
    """Calls of the registry's reference kernels on small tensors, of which only the launch takes time."""
    tokens, width = (Spec((8, 1, 64)),), 64
    cases = {"linear": ((width, width),), "rms_norm": ((width,),), "add": ()}
    for name, weights in cases.items():
        ins = tokens * 2 if name == "add" else tokens
        yield Workload(
            ("launch", name), lambda n=name, i=ins, w=weights: _call(device, n, i, w), needed=True, host=True
        )


def _call(device: torch.device, name: str, ins: tuple[Spec, ...], weights: tuple[tuple[int, ...], ...]) -> Op:
    attrs = {"epsilon": 1e-5}
    outs = [spec for some in OPS[name].declaration.results(ins, weights, attrs) for spec in some]
    site = Site(name, ins, tuple(outs), tuple(f"w{i}" for i in range(len(weights))), weights, attrs)
    run = kernel(name, OPS[name].implementations[-1], device.type).forward
    env = Env(Mesh(Layout()), 0, torch.float32)
    xs, ys = (
        [torch.ones(s.shape, device=device, dtype=torch.float32) for s in specs]  # type: ignore[arg-type]
        for specs in (ins, outs)
    )
    ws = [torch.ones(shape, device=device) for shape in weights]
    return lambda: run(env, site, xs, ws, ys)


# ---- attention -----------------------------------------------------------------------------------------------------


def attention_of(device: torch.device) -> Iterator[Workload]:
    """Forward and backward of each fused kernel of the registry that this device can run."""
    for key, make, around in attention(device):
        yield Workload(key, make, around=around)
