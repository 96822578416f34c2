"""WHERE it runs: devices, the fabrics between them, and measurements of both. Frozen values, from the catalogue."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from penteract.config.catalog.hardware import Tables, tables
from penteract.config.files.cluster_text import (
    CALIBRATE,
    FILE,
    check_whole,
    count_of,
    in_cluster,
    nodes_of,
    refuse_file,
)
from penteract.config.files.hardware_schema import CLUSTER, DIRECT, FABRIC, GPU, LINKS, MEASURED, check_lengths
from penteract.config.files.machine_file import HERE, kept_machine_file, machine_named
from penteract.config.files.parse_toml import parse_toml
from penteract.config.files.read import origins_in, read_text
from penteract.config.files.schema import Origin, option
from penteract.errors import BadInput

Points = tuple[tuple[float, float], ...]  # (size, time or rate), sizes ascending
Shape = tuple[int, int, int, int, float]  # times, m, n, k, TFLOP/s
FusedShape = tuple[int, int, int, float, float]  # of `Curves.attention`
DTYPES = ("bf16", "tf32", "fp32", "fp8", "fp64")
REFERENCE = "8xh200"  # the measured node; devices without measured curves borrow its efficiency

# Share of a GPU's memory left for what is not our tensors: the CUDA context (1 to 2 GB), communicators (about 0.5 GB
# each, and a layout opens up to five kinds), workspaces of libraries. Registers are in one planned block, so it need
# not cover fragmentation, for which estimates of other programs keep 20 %.
HEADROOM = 0.08


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A device, from its data sheet.

    memory_gib          memory that the driver reports, GiB
    bf16 … fp64         peak dense TFLOP/s of matrix products; 0: not supported. fp32 is full single precision
    hbm                 GB/s of device memory
    host_link           GB/s of the link to the host, one way
    multiprocessors     streaming multiprocessors or compute units
    capability          CUDA's compute capability; (0, 0): no device of CUDA, or not known
    """

    name: str
    memory_gib: float
    bf16: float
    tf32: float
    fp32: float
    fp8: float
    fp64: float
    hbm: float
    multiprocessors: int
    host_link: float = 63.0  # PCIe 5.0 x16
    capability: tuple[int, int] = (0, 0)
    source: str = ""

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s of a dtype. Raises BadInput if the device does not support it."""
        rate: float = getattr(self, dtype) if dtype in DTYPES else 0.0
        if not rate:
            allowed = ", ".join(d for d in DTYPES if getattr(self, d))
            raise BadInput("PRECISION", f"{self.name} has no such products", found=dtype, allowed=allowed, fix="bf16")
        return rate * 1e12


@dataclass(frozen=True, kw_only=True, slots=True)
class Fabric:
    """The network between devices of a node (at most `domain` of them), or between nodes (`domain` 0).

    gb_per_second   GB/s of one device in one direction
    latency_us      µs of each further round between nodes
    direct          whether a device reads the memory of another as fast
    efficiency      fraction of gb_per_second that large messages reach between nodes
    bus             collective -> (nodes, GB/s): measured bus bandwidth of whole nodes of `devices`, `message` bytes
    """

    name: str
    gb_per_second: float
    latency_us: float = 0.0
    domain: int = 0
    direct: bool = False
    efficiency: float = 1.0
    message: int = 0
    devices: int = 8
    bus: tuple[tuple[str, Points], ...] = ()
    source: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curves:
    """Measurements of a node: medians, times in microseconds, sizes in bytes, rates in GB/s and TFLOP/s.

    Compute rates are sustained rates of a hot device, not of bursts. Attention is empty where no fused kernel runs;
    collectives, p2p and contention are empty where only one device was measured.

    gemm         dtype -> (times, m, n, k, TFLOP/s)
    attention    (FLOPs of the forward, causal half, head size, sequence length, TFLOP/s forward, backward), by cuDNN
    flash        fraction of these rates that the flash kernel reaches, forward and backward
    fa4          as `attention`, by FlashAttention-4; empty: not measured
    memory       copy, add, adamw: device; h2d_…, d2h_…: pinned host memory, all devices at once or one
    devices      the number of devices of the measured node
    moved        one pointwise kernel: (bytes read and written, µs)
    walked       one pointwise kernel whose tensors differ in layout or dtype: (elements, µs)
    collectives  (kind, ranks, points), points as (bytes of the whole tensor, µs)
    p2p          in one direction, and in both at once: (bytes, µs)
    contention   how much longer compute takes while a collective runs, by kind: the catalogue's in steps, that of
                 `calibrate` of a product within one long collective
    slowed       how much longer a collective takes while matrix products run, by kind; may be empty. Plans show it
    launch_us    host time of a call in an eager step; `launch_of`: of calls that were measured, by name
    process      MiB of a process beside tensors, by what takes them (`readings/memory/process_memory.py`); may be empty
    """

    gpu: Gpu
    devices: int
    inside: Fabric
    provenance: tuple[tuple[str, str], ...]
    gemm: tuple[tuple[str, tuple[Shape, ...]], ...]
    attention: tuple[FusedShape, ...]
    flash: tuple[float, float]
    fa4: tuple[FusedShape, ...]
    memory: tuple[tuple[str, float], ...]
    moved: Points
    walked: Points
    collectives: tuple[tuple[str, int, Points], ...]
    p2p: tuple[Points, ...]
    contention: tuple[tuple[str, float], ...]
    launch_us: float
    launch_of: tuple[tuple[str, float], ...]
    launch_basis: str
    process: tuple[tuple[str, float], ...] = ()
    slowed: tuple[tuple[str, float], ...] = ()

    @property
    def about(self) -> str:
        """Device, versions and date in one phrase."""
        found = dict(self.provenance)
        keys = ("torch", "cuda", "nccl", "cudnn")
        versions = ", ".join(f"{key} {found[key]}" for key in keys if key in found)
        return f"{found.get('device', self.gpu.name)}, {found.get('date', 'no date')}, {versions}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """`gpus` equal devices, `gpus_per_node` of them behind one fast fabric.

    `memory_gib`: memory of one device for tensors. Without `gpu`, plans can say what fits, but not how long it takes.
    `curves`: measured on this kind of device and node; None if there are none.
    """

    name: str = "this machine"
    gpus: int = 1
    gpus_per_node: int = 8
    memory_gib: float = 0.0  # 0: unknown, so plans do not say what fits
    gpu: Gpu | None = None
    inside: Fabric | None = None
    between: Fabric | None = None
    curves: Curves | None = field(default=None, repr=False)
    host_memory_gib: float = 0.0  # of each node's host; 0: unknown, so it limits nothing

    @property
    def reads_directly(self) -> bool:
        """Whether ranks of a node should read each other's registers: its fabric can, and it was measured."""
        links = self.curves if self.curves is not None and self.curves.collectives else reference()
        measured = {kind for kind, _, _ in links.collectives}
        return self.inside is not None and self.inside.direct and measured.issuperset(DIRECT)

    @property
    def host_share(self) -> int:
        """Bytes of a host's memory for each of its devices; 0 if it is not known."""
        return int(self.host_memory_gib * 2**30) // min(self.gpus, self.gpus_per_node)

    def host_holds(self, each: int) -> bool:
        """Whether a host has room for so many bytes of each of its devices, as far as is known."""
        return not self.host_memory_gib or each <= self.host_share

    def usable(self, headroom: float = HEADROOM) -> int:
        """Bytes of a device that tensors may take; 0 if its memory is not known."""
        return int(self.memory_gib * 2**30 * (1 - headroom))


# ---- the catalogue -------------------------------------------------------------------------------------------------


def gpu(name: str) -> Gpu:
    """The device called `name`, in upper or lower case. Raises BadInput with the nearest name if there is none."""
    table = tables("gpus")
    key = _named(table, name, "GPU")
    return _gpu({"name": key, **table[key]})


def _gpu(row: Mapping[str, Any]) -> Gpu:
    return Gpu(**{k: v for k, v in GPU.check(row, str(row["name"])).items() if k != "aliases"})


def fabric(name: str) -> Fabric:
    """The fabric called `name`, in upper or lower case."""
    table = tables("fabrics")
    key = _named(table, name, "fabric")
    return _fabric(key, FABRIC.check(table[key], key))


def _fabric(name: str, row: Mapping[str, Any]) -> Fabric:
    bus = tuple((k, _points(v)) for k, v in row.get("bus", {}).items())
    return Fabric(name=name, bus=bus, **{k: v for k, v in row.items() if k not in ("aliases", "bus")})


@cache
def measured_curves(file: str) -> Curves:
    """The curves of a measured node of the catalogue."""
    return _curves(tables(file))


def reference() -> Curves:
    """The curves of the reference node; devices without measured curves are scaled from them."""
    return measured_curves(REFERENCE)


_FORM = "[nodes x] devices x name [@ fabric]"


def cluster(text: str, *, fabric: str = "") -> Cluster:
    """The cluster `text`: `8xH200`, `64x8xH100` (nodes, devices of each), `16xA100-40GB`, `64x8xH100@efa`, the path of
    a TOML file of measured curves, or `here`, the file of this machine: `8xhere` is a node of eight such devices.
    `fabric`: between nodes; by default the usual one for such nodes.

    Raises BadInput with the nearest name that exists.
    """
    if here := machine_named(text):
        made = _measured(kept_machine_file(), fabric)
        return made if here[1] is None else _of_size(made, count_of(here[1], text))
    if text.lower().endswith(".toml"):
        return _measured(Path(text), fabric)
    found = re.fullmatch(
        r"\s*(?:(\d+)\s*x\s*)?(?:(\d+)\s*x\s*)?([a-z][\w.-]*?)\s*(?:@\s*([\w-]+))?\s*", text, re.IGNORECASE
    )
    if swapped := re.fullmatch(r"\s*([a-z][\w.-]*?)\s*((?:x\s*\d+\s*)+)(@.*)?", text, re.IGNORECASE):
        numbers = "x".join(re.findall(r"\d+", swapped[2])[::-1])
        raise BadInput("CLUSTER", "the number comes first", where="--gpus", found=text, allowed=_FORM,
                       fix=f"--gpus {numbers}x{gpu(swapped[1]).name}{swapped[3] or ''}")  # fmt: skip
    if not found:
        refuse_file(text, FILE, where="--gpus", allowed=_FORM, fix=CALIBRATE)
        raise BadInput("CLUSTER", "not a cluster", found=repr(text), allowed=_FORM, fix="8xH200")
    counts = [count_of(n, text) for n in found.groups()[:2] if n is not None]
    try:
        device = gpu(found[3])
    except BadInput as bad:
        refuse_file(text, FILE, where="--gpus", allowed=_FORM, fix=CALIBRATE)
        raise in_cluster(bad, text, found[3]) from None
    usual = int(tables("nodes")[device.name]["gpus_per_node"])
    if 0 in counts:
        raise BadInput("CLUSTER", "a cluster without devices", where="--gpus", found=text, allowed=_FORM,
                       fix=f"--gpus {usual}x{device.name}")  # fmt: skip
    nodes, each = counts if len(counts) == 2 else nodes_of(counts[0] if counts else 1, usual)
    return _cluster(device, nodes, each, fabric or found[4] or "")


def _cluster(device: Gpu, nodes: int, each: int, between: str) -> Cluster:
    row = tables("nodes")[device.name]
    inside, outside = fabric(row["inside"]), fabric(between or row["between"])
    if outside.domain:
        allowed = ", ".join(k for k, v in tables("fabrics").items() if not v["domain"])
        raise BadInput("FABRIC", "joins devices, not nodes", found=outside.name, allowed=allowed, fix=row["between"])
    if not 1 <= each <= inside.domain or nodes < 1:
        raise BadInput("CLUSTER", f"no such node of {device.name}", found=f"{nodes}x{each}",
                       allowed=f"1 to {inside.domain} behind {inside.name}",
                       fix=f"{max(1, nodes)}x{inside.domain}x{device.name}")  # fmt: skip
    measured = measured_curves(str(row.get("measured", REFERENCE)))
    name = f"{nodes}x{each}x{device.name}" if nodes > 1 else f"{each}x{device.name}"
    count_of(str(nodes * each), name)
    return Cluster(
        name=name, gpus=nodes * each, gpus_per_node=each, memory_gib=device.memory_gib, gpu=device,
        inside=inside, between=outside,
        curves=measured if measured.gpu == device and measured.inside == inside else None,
    )  # fmt: skip


# ---- measured curves -----------------------------------------------------------------------------------------------


def _measured(path: Path, between: str) -> Cluster:
    text = read_text(path)
    try:
        tree = parse_toml(text)
    except ValueError as error:
        raise BadInput("CLUSTER", f"not a file of measured curves: {error}", where=str(path),
                       allowed=f"the tables of {REFERENCE}.toml",
                       fix="write it as that file is written") from None  # fmt: skip
    if tree and not tree.keys() & {"node", "provenance", "gemm"}:
        refuse_file(str(path), FILE, where="--gpus", allowed=_FORM, fix=CALIBRATE)
    origin = origins_in(text, path.name)
    measured, node = _curves(tree, origin), tree["node"]
    where, usual = origin("node"), tables("nodes").get(measured.gpu.name, {}).get("between")
    gpus, each, inside = node["gpus"], node["gpus_per_node"], measured.inside
    if each > inside.domain:
        raise BadInput("CLUSTER", "no fabric joins so many devices of a node", where=f"node.gpus_per_node ({where})",
                       found=each, allowed=f"1 to {inside.domain} behind {inside.name}")  # fmt: skip
    check_whole(gpus, each, f"node.gpus ({where})")
    outside = fabric(between or node.get("between", usual or "infiniband-ndr"))
    if not between and "between" in tree:  # held to the schema with the curves
        outside = _fabric("measured", tree["between"])
    return Cluster(
        name=node.get("name", path.stem), gpus=gpus, gpus_per_node=each, memory_gib=measured.gpu.memory_gib,
        gpu=measured.gpu, inside=inside, between=outside,
        host_memory_gib=node.get("host_memory_gib", 0.0),
        curves=measured,
    )  # fmt: skip


def _of_size(made: Cluster, gpus: int) -> Cluster:
    """One node of `gpus` devices."""
    domain = made.inside.domain if made.inside is not None else 1
    if not 1 <= gpus <= domain:
        raise BadInput("CLUSTER", "no fabric joins so many devices of a node", where="--gpus", found=gpus,
                       allowed=f"1 to {domain}")  # fmt: skip
    return replace(made, name=f"{gpus}x{HERE}", gpus=gpus, gpus_per_node=gpus)


def check_cluster(given: Cluster) -> None:
    """Hold a cluster made in Python to the bounds of those from files. Raises BadInput."""
    for name, number in CLUSTER.items():
        number.check(getattr(given, name), f"Cluster.{name}")
    check_whole(given.gpus, given.gpus_per_node, "Cluster.gpus")
    if given.gpu is not None:
        GPU.check(_values(given.gpu), "Cluster.gpu")
    for name in ("inside", "between"):
        found: Fabric | None = getattr(given, name)
        if found is not None:
            FABRIC.check(_values(found) | {"bus": dict(found.bus)}, f"Cluster.{name}")


def _values(part: Gpu | Fabric) -> dict[str, Any]:
    return {f.name: getattr(part, f.name) for f in fields(part)}


def _curves(tree: Tables, origin: Origin = option) -> Curves:
    """The curves of a file's tables; raises BadInput for an entry that breaks the schema."""
    check_lengths(tree, origin)
    found = MEASURED.check(tree, "", origin)
    node, attention, launch = found["node"], found.get("attention", {}), found["launch"]
    if 0 < len(given := [name for name in LINKS if name in found]) < len(LINKS):
        raise BadInput("MISSING", "measured links are incomplete", where=origin(given[0]), found=", ".join(given),
                       allowed=f"all or none of {', '.join(LINKS)}")  # fmt: skip
    device = gpu(node["gpu"]) if isinstance(node["gpu"], str) else _gpu(node["gpu"])
    if "inside" not in node and device.name not in tables("nodes"):
        raise BadInput("MISSING", "a key is missing", where=origin("node"), found="no node.inside",
                       allowed=f"{', '.join(k for k, v in tables('fabrics').items() if v.get('domain'))}")  # fmt: skip
    collectives = (
        (k, int(n), _points(rows)) for k, by in found.get("collectives", {}).items() for n, rows in by.items()
    )
    return Curves(
        gpu=device,
        devices=node["gpus_per_node"],
        inside=fabric(node["inside"] if "inside" in node else tables("nodes")[device.name]["inside"]),
        provenance=tuple(found["provenance"].items()),
        gemm=tuple((kind, rows["shapes"]) for kind, rows in found["gemm"].items() if kind != "basis"),
        attention=attention.get("shapes", ()),
        flash=attention.get("flash", (1.0, 1.0)),
        fa4=attention.get("fa4", ()),
        memory=tuple(found["memory"].items()),
        moved=_points(found["moved"]["points"]),
        walked=_points(found["walked"]["points"]),
        collectives=tuple(sorted(collectives)),
        p2p=tuple(_points(found["p2p"][way]) for way in ("one_way", "both_ways")) if "p2p" in found else (),
        contention=tuple(found.get("contention", {}).items()),
        launch_us=launch["microseconds"],
        launch_of=tuple(launch.get("of", {}).items()),
        launch_basis=launch["basis"],
        process=tuple(found.get("process", {}).items()),
        slowed=tuple(found.get("slowed", {}).items()),
    )


def _points(rows: Points) -> Points:
    return tuple(sorted(rows))


def _named(table: Tables, name: str, what: str) -> str:
    names = {key.lower(): key for key in table}
    names |= {alias.lower(): key for key, row in table.items() for alias in row.get("aliases", ())}
    if name.lower() in names:
        return names[name.lower()]
    near = get_close_matches(name.lower(), names, n=1, cutoff=0.6)
    raise BadInput(what.upper(), f"no such {what}", found=name, allowed=", ".join(table),
                   fix=f"use {names[near[0]]}" if near else "penteract calibrate, then --gpus here"
                   if name.lower() == "cpu" else "choose one of these")  # fmt: skip
