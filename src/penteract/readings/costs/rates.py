"""How long each kind of work takes on a cluster: seconds from sizes, about a microsecond a question."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import fsum
from types import MappingProxyType
from typing import NamedTuple

from penteract.config.hardware import Cluster, Curves, Gpu, fabric, reference
from penteract.config.precision.policy import BYTES
from penteract.errors import BadInput
from penteract.ops.declarations.declaration import Product
from penteract.readings.costs.curve import Curve
from penteract.readings.costs.gemm import Gemm
from penteract.readings.costs.wires import GroupSpan, Wires
from penteract.units import Bytes, Flops, Seconds

__all__ = ["GroupSpan", "Rates"]

_BACKWARD = 2.5  # FLOPs of attention's backward over its forward: five products for two


class FusedRates(NamedTuple):
    """Fused attention of one head size: seconds against FLOPs that are really done, forward and backward."""

    forward: Curve
    backward: Curve


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Seconds of work on one device of a cluster, in one precision.

    Compute is what a hot device keeps up: in a step that goes on, power bounds the clock, and no burst lasts.

    fused      by head size, the largest first
    pointwise  against bytes; `walking`: against elements, of kernels that go through them one by one
    updating   s/byte
    copying    s/byte of a copy to or from pinned memory of the host
    launch     seconds the host needs for a call in an eager step; `launches`: for those that were measured, by name
    beside     how much longer compute takes while a collective is on the wire, at least 1
    basis      for each question, "measured: …" or "modelled: …"
    """

    gemm: Gemm
    codes: Gemm | None  # of products of FP8 codes
    flash: tuple[float, float]  # its share of cuDNN's rate, forward and backward
    fused: tuple[tuple[int, FusedRates], ...]
    pointwise: Curve
    walking: Curve
    wires: Wires
    updating: float
    copying: Mapping[str, float]
    launch: Seconds
    launches: Mapping[str, Seconds]
    beside: float
    basis: Mapping[str, str]

    @staticmethod
    def of(cluster: Cluster, precision: str, *, fp8: bool = False) -> Rates:
        """BadInput when the cluster names no device, or the device has no products in `precision`, or none of FP8 codes
        where there are some."""
        device = cluster.gpu
        if device is None:
            raise BadInput("CLUSTER", "how long it takes needs a device", found=cluster.name,
                           allowed="a device by name", fix="cluster('8xH200')")  # fmt: skip
        device.peak(precision)
        known = cluster.curves or reference()
        shapes, memory = dict(known.gemm), dict(known.memory)
        dtype = precision if precision in shapes else "bf16"
        hbm = device.hbm / known.gpu.hbm
        width = BYTES.get(precision, 1)
        inside, between = cluster.inside or known.inside, cluster.between or fabric("infiniband-ndr")
        soft = "bf16" if precision == "fp8" else precision  # attention stays in bf16 where linears are fp8
        speed = memory["copy"] * hbm * 1e9
        return Rates(
            gemm=Gemm.of(shapes[dtype], (known.gpu, dtype), (device, precision), speed, width),
            codes=Gemm.of(shapes["fp8"], (known.gpu, "fp8"), (device, "fp8"), speed, 1) if fp8 else None,
            flash=known.flash,
            fused=_fused(known, known.gpu.peak("bf16") / device.peak(soft)),
            pointwise=Curve.of((size, us * 1e-6) for size, us in known.moved).stretched(1 / hbm),
            walking=Curve.of((n, us * 1e-6) for n, us in known.walked).stretched(
                known.gpu.multiprocessors / device.multiprocessors
            ),
            wires=Wires.of(known, inside, between),
            updating=1e-9 / (memory["adamw"] * hbm),
            copying=MappingProxyType(_copying(cluster, known, device)),
            launch=known.launch_us * 1e-6,
            launches=MappingProxyType({name: us * 1e-6 for name, us in known.launch_of}),
            beside=max(1.0, fsum(factor for _, factor in known.contention) / len(known.contention)),
            basis=MappingProxyType(_basis(cluster, known, precision)),
        )

    def at_best(self) -> Rates:
        """Seconds no more than these, that fall for each unit of work as the work grows. So those of products do as
        they are: their law has no negative term. What is on the wire slows nothing down."""
        fused = tuple((head, FusedRates(*(curve.at_best() for curve in some))) for head, some in self.fused)
        wires = replace(self.wires, best=True, lines={})
        return replace(
            self,
            fused=fused,
            pointwise=self.pointwise.at_best(),
            walking=self.walking.at_best(),
            wires=wires,
            beside=1.0,
        )

    def product(self, p: Product) -> Seconds:
        """One batch of matrix products, as one kernel."""
        return self.gemm(p)

    def scaled(self, p: Product) -> Seconds:
        """The same of FP8 codes."""
        assert self.codes is not None
        return self.codes(p)

    def attention(
        self, products_flops: Flops, *, backward: bool, causal: bool, head_size: int = 128, flash: bool = False
    ) -> Seconds:
        """Fused attention whose products, masked scores too, are `products_flops`. A causal mask spares half.

        By cuDNN, or by the slower flash kernel.
        """
        done = products_flops * 0.5 if causal else products_flops
        fused = self.fused[0][1]
        for size, smaller in self.fused:
            if head_size <= size:
                fused = smaller
        seconds = fused.backward(done) if backward else fused.forward(done)
        return seconds / self.flash[backward] if flash else seconds

    def moved(self, amount: Bytes, walked: int = 0) -> Seconds:
        """A pointwise kernel that reads and writes `amount` bytes of device memory; `walked`: elements, where it goes
        through them one by one."""
        seconds = self.pointwise(amount)
        return max(seconds, self.walking(walked)) if walked else seconds

    def collective(self, kind: str, span: GroupSpan, amount: Bytes) -> Seconds:
        """`amount`: bytes of the tensor handed over, the output of a gather, the input of others. A message is a "send"
        of two ranks, and a "shift" where as much comes back."""
        return self.wires.collective(kind, span, amount)

    def copy(self, op_name: str, amount: Bytes) -> Seconds:
        """`to_host` or `from_host`, all devices at work on a node at once."""
        return amount * self.copying[op_name]

    def launched(self, name: str) -> Seconds:
        """Of the host for a part of a step, by its name in a timeline (`step/names.py`)."""
        return self.launches.get(name.partition(" (")[0], self.launch)

    def update(self, amount: Bytes) -> Seconds:
        """The optimizer reads and writes `amount` bytes: AdamW, 28 a parameter with everything in fp32."""
        return self.pointwise.floor + amount * self.updating


def _copying(cluster: Cluster, known: Curves, device: Gpu) -> dict[str, float]:
    """Devices at work share what all of a node reached at once, and none goes faster than one did alone; elsewhere, by
    the standard of the link. As many as were measured share a host: larger domains have several."""
    memory, slower = dict(known.memory), known.gpu.host_link / device.host_link
    share = known.devices / min(cluster.gpus, cluster.gpus_per_node, known.devices)

    def seconds(way: str) -> float:
        return slower * 1e-9 / min(memory[f"{way}_one"], share * memory[f"{way}_all"])

    return {"to_host": seconds("d2h"), "from_host": seconds("h2d")}


def _fused(known: Curves, slower: float) -> tuple[tuple[int, FusedRates], ...]:
    """Scaled by the peaks of products."""

    def curve(head: int, way: int) -> Curve:
        more = (1.0, _BACKWARD)[way]
        points = ((flops * more, rates) for flops, size, *rates in known.attention if size == head)
        return Curve.of((done, done / (rates[way] * 1e12)) for done, rates in points).stretched(slower)

    heads = sorted({size for _, size, _, _ in known.attention}, reverse=True)
    return tuple((head, FusedRates(curve(head, 0), curve(head, 1))) for head in heads)


def _basis(cluster: Cluster, known: Curves, precision: str) -> dict[str, str]:
    """Where each rate comes from, in a phrase."""
    own, device = cluster.curves is not None, cluster.gpu.name if cluster.gpu else ""
    told = f"measured: {known.about}" if own else f"modelled: {device} by its data sheet, as efficient as {known.about}"
    borrowed = f"modelled: in {precision} as efficient as in bf16, {known.about}"
    wires = told
    if cluster.between and cluster.gpus > cluster.gpus_per_node:
        wires = f"{told}; between nodes modelled: {cluster.between.source}"
    return {
        "product": (told if precision in dict(known.gemm) else borrowed) + "; sustained, fitted to shapes",
        "attention": (told if precision in ("bf16", "fp8") else borrowed) + "; sustained, cuDNN, by FLOPs",
        "moved": f"{told}; sustained, a sum of two tensors",
        "collective": wires,
        "send": wires,
        "update": f"{told}; fused AdamW",
        "copy": f"{told}; pinned memory, all devices of a node at once",
        "launch": f"{known.launch_basis}: a declaration called in an eager step, {known.about}",
        "beside": f"{told}; products of 8192³ beside gathers and scatters, mean of both",
    }
