"""Fused attention of the registry, as workloads: each implementation that this device can run, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.config.rules.kernel_limits import ATTENTION, KernelLimits, installed_version
from penteract.engine.kernels.kernel import Env
from penteract.engine.kernels.registry import kernel
from penteract.measure.calibrate.hot_clock import Op
from penteract.ops.declarations import OPS, Implementation
from penteract.ops.declarations.fused_attention.fused import FusedAttention
from penteract.ops.spec import Spec
from penteract.ops.tape import Site

Shape = tuple[int, int, int, int, int, int]  # batch, heads, KV heads, sequence, head size; width of the model
SHAPES: tuple[Shape, ...] = (
    (1, 32, 8, 8192, 128, 4096), (2, 32, 8, 4096, 128, 4096), (4, 32, 8, 4096, 64, 2048), (1, 32, 8, 2048, 128, 4096),
    (1, 32, 8, 8192, 64, 2048), (1, 32, 8, 4096, 128, 4096), (2, 32, 8, 8192, 128, 4096), (1, 32, 8, 4096, 64, 2048),
    (1, 8, 2, 8192, 128, 4096), (1, 16, 4, 8192, 128, 4096), (1, 4, 1, 8192, 128, 4096), (4, 32, 8, 2048, 128, 4096),
    (8, 32, 8, 1024, 128, 4096), (8, 12, 12, 1024, 64, 768), (1, 8, 8, 1024, 64, 512), (1, 8, 8, 1024, 128, 1024),
    (1, 32, 8, 32768, 128, 4096), (1, 32, 8, 32768, 64, 2048), (1, 32, 8, 16384, 64, 2048), (1, 16, 8, 32768, 64, 1024),
    (1, 16, 8, 16384, 64, 1024), (1, 32, 8, 131_072, 128, 4096),
)  # fmt: skip


# Of a layer's products by token, width and width of its heads: queries and results, keys and values of a quarter of the
# heads, and three of a feed-forward part 3.5 times as wide. Backward has twice as many.
_PRODUCTS = 2 * (2 + 0.5 + 3 * 3.5)


def attention(device: torch.device) -> Iterator[tuple[tuple[str | int, ...], Callable[[], Op], float]]:
    """(key, what makes the operation, FLOPs of the products around it in a layer). Keys name the kernel by the curve
    that prices it (`FusedAttention.speed`)."""
    for shape in SHAPES:
        for one in implementations(device):
            speed = speed_of(one, shape)
            if speed is None:
                continue
            for way in ("forward", "input_gradient"):
                key = ("attention", speed, way, *shape)
                around = products_around(shape) * (1 if way == "forward" else 2)
                yield key, lambda one=one, shape=shape, way=way: operation(device, one, shape, way), around


def forward_flops(shape: Sequence[int]) -> int:
    """FLOPs of attention's forward, causal half."""
    batch, heads, _, length, size, *_ = shape
    return 2 * batch * heads * length**2 * size


def products_around(shape: Shape) -> float:
    """FLOPs of the products of a layer's forward, of those heads."""
    batch, heads, _, length, size, width = shape
    return _PRODUCTS * batch * length * width * heads * size


def implementations(device: torch.device) -> list[Implementation]:
    """The fused implementations of attention that this device, and the packages installed, can run."""
    found = (one for one in OPS["attention"].implementations if one.name in ATTENTION and device.type in one.kernels)
    return [one for one in found if _runs(ATTENTION[one.name], device)]  # type: ignore[index]


def _runs(can: KernelLimits, device: torch.device) -> bool:
    if can.package is not None and installed_version(can.package[0]) != can.package[1]:
        return False
    return can.capability is None or torch.cuda.get_device_capability(device) == can.capability


def speed_of(one: Implementation, shape: Shape) -> str | None:
    """The curve of an implementation, if it is its own and takes such heads; others are priced by that curve too."""
    made = one.serves(_site(shape), Layout(attention=one.name))  # type: ignore[arg-type]
    if not isinstance(made, FusedAttention) or made.speed != one.name or shape[4] > ATTENTION[made.speed].widest:
        return None
    return made.speed


def _site(shape: Shape) -> Site:
    batch, heads, kv_heads, length, size, _ = shape
    q, k = (Spec((length, batch, n * size)) for n in (heads, kv_heads))
    row, rows = Spec((length,), "index"), Spec((length, batch), "index")
    attrs = {"head_size": size, "value_size": size, "scale": size**-0.5, "window": 0}
    ins = (q, k, k, row, rows, row)
    results, extras = OPS["attention"].declaration.results(ins, (), attrs)
    return Site("attention", ins, (*results, *extras), attrs=attrs)


def operation(device: torch.device, one: Implementation, shape: Shape, way: str) -> Op:
    """A call of the kernel as a step makes it, on one document a sequence."""
    site, run = _site(shape), kernel("attention", one, device.type)
    env = Env(Mesh(Layout(attention=one.name)), 0, torch.float32)  # type: ignore[arg-type]
    q, k, v = (torch.randn(s.shape, device=device, dtype=torch.bfloat16) for s in site.ins[:3])  # type: ignore[arg-type]
    at = torch.arange(shape[3], device=device)
    ins = [q, k, v, at, torch.zeros(shape[3], shape[0], dtype=torch.int64, device=device), at]
    out, log_sum = torch.empty_like(q), torch.empty(site.outs[1].shape, device=device)  # type: ignore[arg-type]

    def forward() -> None:
        run.forward(env, site, ins, [], [out, log_sum])

    if way == "forward":
        return forward
    forward()
    gradient, made, backward = torch.randn_like(out), [torch.empty_like(x) for x in (q, k, v)], run.input_gradient
    assert backward is not None
    return lambda: backward(env, site, [*ins, out, log_sum, gradient], [], made)
