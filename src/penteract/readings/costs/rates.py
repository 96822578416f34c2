"""Seconds of each kind of work on a cluster, from sizes. A call takes about a microsecond."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import fsum
from types import MappingProxyType

from penteract.config.files.hardware_schema import BLOCK_SUMS, BLOCKS
from penteract.config.hardware import Cluster, Curves, Gpu, fabric, reference
from penteract.config.precision.policy import BYTES
from penteract.errors import BadInput
from penteract.ops.declarations.declaration import FusedKernel, Product, ScaledBy
from penteract.readings.costs.attention_time import FusedRates, fused_rates
from penteract.readings.costs.curve import Curve
from penteract.readings.costs.gemm import Gemm
from penteract.readings.costs.interconnect import GroupSpan, Interconnect
from penteract.units import Bytes, Flops, Seconds

__all__ = ["GroupSpan", "Rates"]

_OVERLAPPED = ("all_gather", "reduce_scatter")
_BY_NAME: Mapping[ScaledBy, str] = {"tensors": "fp8", "blocks": BLOCKS, "blocks of tokens": BLOCK_SUMS}  # in files


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Seconds of work on one device of a cluster, in one precision.

    Compute rates are those of a hot device: in a long step, power limits the clock.

    scaled_by  products of FP8 values, by what has a scale; empty without them
    flash      the flash kernel's fraction of cuDNN's rate, forward and backward
    fused      cuDNN attention by head size, the largest first
    fa4        the same of FlashAttention-4
    pointwise  against bytes; `walking`: against elements, for kernels whose tensors differ in layout or dtype
    updating   s/byte of an optimizer update
    copying    s/byte of a copy to or from pinned memory of the host
    launch     seconds the host needs for a call in an eager step; `launches`: for calls that were measured, by name
    contention how much longer compute takes while a collective runs, at least 1
    basis      for each kind of work, "measured: …" or "modelled: …"
    """

    gemm: Gemm
    scaled_by: Mapping[ScaledBy, Gemm]
    flash: tuple[float, float]
    fused: tuple[tuple[int, FusedRates], ...]
    fa4: tuple[tuple[int, FusedRates], ...]
    pointwise: Curve
    walking: Curve
    interconnect: Interconnect
    updating: float
    copying: Mapping[str, float]
    launch: Seconds
    launches: Mapping[str, Seconds]
    contention: float
    basis: Mapping[str, str]

    @staticmethod
    def of(cluster: Cluster, precision: str, *, fp8: bool = False) -> Rates:
        """The rates of a cluster. `fp8`: with products of FP8 values.

        Raises BadInput if the cluster names no device, or the device has no such products.
        """
        device = cluster.gpu
        if device is None:
            raise BadInput("CLUSTER", "an estimate of time needs a device", found=cluster.name,
                           allowed="a device by name", fix="cluster('8xH200')")  # fmt: skip
        device.peak(precision)
        curves = cluster.curves or reference()
        fused, links = (curves if own else reference() for own in (curves.attention, curves.collectives))
        shapes, memory = dict(curves.gemm), dict(curves.memory)
        dtype = precision if precision in shapes else "bf16"
        hbm = device.hbm / curves.gpu.hbm
        width = BYTES.get(precision, 1)
        inside, between = cluster.inside or curves.inside, cluster.between or fabric("infiniband-ndr")
        soft = "bf16" if precision == "fp8" else precision  # attention stays in bf16 if linear layers are in FP8
        speed = memory["copy"] * hbm * 1e9
        return Rates(
            gemm=Gemm.of(shapes[dtype], (curves.gpu, dtype), (device, precision), speed, width),
            scaled_by=MappingProxyType(
                {by: _scaled(name, curves, device, speed) for by, name in _BY_NAME.items() if fp8}
            ),
            flash=fused.flash,
            fused=fused_rates(fused.attention, slower := fused.gpu.peak("bf16") / device.peak(soft)),
            fa4=fused_rates(fused.fa4 or fused.attention, slower),
            pointwise=Curve.of((size, us * 1e-6) for size, us in curves.moved).stretched(1 / hbm),
            walking=Curve.of((n, us * 1e-6) for n, us in curves.walked).stretched(
                curves.gpu.multiprocessors / device.multiprocessors
            ),
            interconnect=Interconnect.of(links, inside, between),
            updating=1e-9 / (memory["adamw"] * hbm),
            copying=MappingProxyType(_copying(cluster, curves, device)),
            launch=curves.launch_us * 1e-6,
            launches=MappingProxyType({name: us * 1e-6 for name, us in curves.launch_of}),
            contention=_contention(links),
            basis=MappingProxyType(_basis(cluster, curves, precision)),
        )

    def at_best(self) -> Rates:
        """Lower bounds of these rates, whose seconds per unit of work fall as the work grows. Products already do so:
        their formula has no negative term. Contention is left out."""
        fused, fa4 = (
            tuple((head, FusedRates(*(way.at_best() for way in some))) for head, some in heads)
            for heads in (self.fused, self.fa4)
        )
        interconnect = replace(self.interconnect, best=True, costs={})
        return replace(
            self,
            fused=fused,
            fa4=fa4,
            pointwise=self.pointwise.at_best(),
            walking=self.walking.at_best(),
            interconnect=interconnect,
            contention=1.0,
        )

    def product(self, p: Product) -> Seconds:
        """One batch of matrix products, as one kernel."""
        return self.gemm(p)

    def scaled(self, p: Product, by: ScaledBy = "tensors") -> Seconds:
        """The same for FP8 values, by what has a scale."""
        return self.scaled_by[by](p)

    def attention(
        self,
        products_flops: Flops,
        elements: int,
        *,
        backward: bool,
        causal: bool,
        head_size: int = 128,
        kernel: FusedKernel = "cudnn",
    ) -> Seconds:
        """Fused attention.

        `products_flops`: FLOPs of its products, masked scores included; a causal mask saves half of them.
        `elements`: of its queries.
        """
        done = products_flops * 0.5 if causal else products_flops
        heads = self.fa4 if kernel == "fa4" else self.fused
        fused = heads[0][1]
        for size, smaller in heads:
            if head_size <= size:
                fused = smaller
        seconds = (fused.backward if backward else fused.forward)(done, elements)
        return seconds / self.flash[backward] if kernel == "flash" else seconds

    def moved(self, amount: Bytes, walked: int = 0) -> Seconds:
        """A pointwise kernel that reads and writes `amount` bytes of device memory. `walked`: its elements, if its
        tensors differ in layout or dtype."""
        seconds = self.pointwise(amount)
        return max(seconds, self.walking(walked)) if walked else seconds

    def collective(self, kind: str, span: GroupSpan, amount: Bytes) -> Seconds:
        """A collective. `amount`: bytes of the output of a gather, of the input of others. A message is a "send" of two
        ranks, or a "shift" if an equal message comes back."""
        return self.interconnect.collective(kind, span, amount)

    def copy(self, op_name: str, amount: Bytes) -> Seconds:
        """A copy `to_host` or `from_host`, while all devices of a node copy."""
        return amount * self.copying[op_name]

    def launched(self, name: str) -> Seconds:
        """Host time to launch an op, by its name in a timeline (`step/names.py`)."""
        return self.launches.get(name.partition(" (")[0], self.launch)

    def update(self, amount: Bytes) -> Seconds:
        """An optimizer update that reads and writes `amount` bytes: AdamW with all in fp32 has 28 a parameter."""
        return self.pointwise.floor + amount * self.updating


def _copying(cluster: Cluster, curves: Curves, device: Gpu) -> dict[str, float]:
    """s/byte of copies. The devices of a node share the bandwidth that all of them reached together, and none is faster
    than one on its own. For other devices this is scaled by the host link. A host has as many devices as the measured
    node: larger NVLink domains have several hosts. Where fewer devices were measured than the node has, what all of
    them reach is that of the reference."""
    node, at = min(cluster.gpus, cluster.gpus_per_node), reference()
    together = curves if curves.devices >= min(node, at.devices) else at
    memory, every = dict(curves.memory), dict(together.memory)
    slower, slower_together = (c.gpu.host_link / device.host_link for c in (curves, together))
    share = together.devices / min(node, together.devices)

    def seconds(way: str) -> float:
        return 1e-9 * max(slower / memory[f"{way}_one"], slower_together / (share * every[f"{way}_all"]))

    return {"to_host": seconds("d2h"), "from_host": seconds("h2d")}


def _basis(cluster: Cluster, curves: Curves, precision: str) -> dict[str, str]:
    """Where each rate comes from, in a phrase."""
    own, device = cluster.curves is not None, cluster.gpu.name if cluster.gpu else ""
    source = (
        f"measured: {curves.about}" if own else f"modelled: {device} by its data sheet, as efficient as {curves.about}"
    )
    borrowed = f"modelled: in {precision} as efficient as in bf16, {curves.about}"
    fused, wires = (
        source if rows or not own else f"modelled: {device} by its data sheet, as efficient as {reference().about}"
        for rows in (curves.attention, curves.collectives)
    )
    contended = wires
    if cluster.between and cluster.gpus > cluster.gpus_per_node:
        own = cluster.between.source.startswith("measured")
        wires = f"{wires}; between nodes {'' if own else 'modelled: '}{cluster.between.source}"
    return {
        "product": (source if precision in dict(curves.gemm) else borrowed) + "; sustained, fitted to shapes",
        "attention": (fused if precision in ("bf16", "fp8") else borrowed) + "; sustained, cuDNN, by FLOPs and tokens",
        "moved": f"{source}; sustained, a sum of two tensors",
        "collective": wires,
        "send": wires,
        "update": f"{source}; fused AdamW",
        "copy": f"{source}; pinned memory, all devices of a node at once",
        "launch": f"{curves.launch_basis}: {curves.about}; an op called in an eager step",
        "contention": f"{contended}; {_contention_basis(curves if curves.contention else reference())}",
    }


def _scaled(name: str, curves: Curves, device: Gpu, speed: float) -> Gemm:
    """Products of FP8 values, by their name in a file. If it has none, those of the reference are scaled."""
    measured = curves if name in dict(curves.gemm) else reference()
    return Gemm.of(dict(measured.gemm)[name], (measured.gpu, "fp8"), (device, "fp8"), speed, 1)


def _beside_compute(links: Curves) -> tuple[tuple[str, float], ...]:
    """How much longer compute takes while a collective runs, of the kinds that run beside it: FSDP's; of all that were
    measured, if these were not."""
    return tuple(one for one in links.contention if one[0] in _OVERLAPPED) or links.contention


def _contention(links: Curves) -> float:
    """The mean of these, at least 1."""
    factors = [factor for _, factor in _beside_compute(links)]
    return max(1.0, fsum(factors) / len(factors))


def _contention_basis(links: Curves) -> str:
    """What was measured of products and collectives that run at once."""
    text = f"compute while {', '.join(kind for kind, _ in _beside_compute(links))} run, their mean"
    if links.slowed:
        text += (
            f"; collectives then take {', '.join(f'{factor:.2f}' for _, factor in links.slowed)} times as long, which"
        )
        text += " plans leave out"
    return text
