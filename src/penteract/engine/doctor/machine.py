"""A machine as a value: probes fill it, and findings are made from it. None stands for what could not be found out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penteract.engine.device.cpu_affinity import usable
from penteract.units import Bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """`cores`: of the machine; `allowed`: of this process's affinity mask; `quota`: CPU time that a control group
    grants, in cores.

    `memory_limit`: of a control group. `loopback`: why two processes here cannot connect; empty if they can.
    """

    system: str
    python: str
    cores: int
    allowed: int
    quota: float | None = None
    memory: Bytes | None = None
    available: Bytes | None = None
    memory_limit: Bytes | None = None
    shm: Bytes | None = None
    loopback: str = ""

    @property
    def usable(self) -> int:
        """Cores that this process can keep busy."""
        return usable(self.allowed, self.quota)


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuState:
    """One GPU as the driver reports it. Memory in bytes, power (now) in W, clocks in MHz, ECC errors since the driver
    started.

    `slowed`: reasons for reduced clocks now; `remapping`: "pending" or "failed", if rows of memory were replaced;
    `processes` are (process id, bytes) already on it; `links` are its active NVLinks, `links_down` the inactive ones.
    """

    index: int
    name: str
    uuid: str = ""
    memory: Bytes | None = None
    free: Bytes | None = None
    capability: tuple[int, int] | None = None
    power: float | None = None
    power_limit: float | None = None
    power_default: float | None = None
    clock: int | None = None
    clock_most: int | None = None
    slowed: tuple[str, ...] = ()
    ecc: bool | None = None
    corrected: int | None = None
    uncorrected: int | None = None
    remapping: str = ""
    persistence: bool | None = None
    mig: bool | None = None
    processes: tuple[tuple[int, Bytes | None], ...] | None = None
    links: int | None = None
    links_down: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpus:
    """`source` of the data: nvidia-ml-py, nvidia-smi or torch; empty if there was none, and `why` then has the reason.

    `loaded`: the NVIDIA driver of the kernel is there. `cuda` is the newest CUDA that the driver can run.
    `matrix[i][j]`: how GPU i reaches GPU j: NV18 (that many NVLinks), PCIe (peer access over PCIe), P2P (peer access
    over an unknown link), - (through the host's memory), X (itself).
    """

    source: str = ""
    why: str = ""
    loaded: bool = False
    driver: str = ""
    cuda: str = ""
    devices: tuple[GpuState, ...] = ()
    matrix: tuple[tuple[str, ...], ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchDevice:
    """A GPU that torch sees; `works`: what went wrong with a small sum on it; empty if the sum was right."""

    name: str
    memory: Bytes
    free: Bytes | None = None
    capability: tuple[int, int]
    uuid: str = ""
    works: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Torch:
    """The torch that runs would load; `error` says why it cannot be loaded, `version` is then empty.

    `cuda`, `hip`, `cudnn`, `nccl`: the versions it was built with. `reason`: torch's warning if it finds no usable GPU.
    `device` is what the engine picks for `precision.device = auto`.
    """

    error: str = ""
    version: str = ""
    cuda: str = ""
    hip: str = ""
    cudnn: str = ""
    nccl: str = ""
    gloo: bool = False
    has_nccl: bool = False
    available: bool = False
    reason: str = ""
    archs: tuple[str, ...] = ()
    devices: tuple[TorchDevice, ...] = ()
    peers: tuple[tuple[bool, ...], ...] = ()
    device: str = ""
    threads: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """An optional package. `found`: the installed version, empty if absent; `wanted`: this project's requirement."""

    name: str
    found: str = ""
    wanted: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Disk:
    """The disk that holds `folder`. `asked`: the nearest existing folder, where it was examined. `speed`: bytes a
    second; `files`: how many more can be made; `kind`: type of the file system."""

    folder: str
    asked: str
    free: Bytes | None = None
    total: Bytes | None = None
    files: int | None = None
    kind: str = ""
    speed: float | None = None
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessLimits:
    """(soft, hard) limits of this process, -1 for no limit; `tasks`: the limit of a control group."""

    nofile: tuple[int, int] | None = None
    memlock: tuple[int, int] | None = None
    nproc: tuple[int, int] | None = None
    tasks: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Port:
    """A port of an InfiniBand or RoCE adapter, from /sys."""

    name: str
    state: str
    rate: str
    layer: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """What `penteract train` would start here without further options."""

    ranks: int = 1
    threads: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class HostReport:
    """Everything that was examined. `torch`: None if it is not installed."""

    host: Host
    gpus: Gpus
    torch: Torch | None
    disk: Disk
    limits: ProcessLimits
    packages: tuple[Package, ...] = ()
    interfaces: tuple[str, ...] = ()
    ports: tuple[Port, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    use: Use = Use()
