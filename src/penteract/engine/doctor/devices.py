"""GPUs: which there are, and what is wrong with each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from penteract.engine.doctor.finding import Finding, count, numbered
from penteract.engine.doctor.machine import Gpus, GpuState, HostReport
from penteract.units import GIB, show_bytes

AREA = "devices"
HELD = GIB  # more memory than this in use on a GPU without visible processes is not the driver's own
DRIVER_SOURCES = ("nvidia-ml-py", "nvidia-smi")


def findings(machine: HostReport) -> Iterator[Finding]:
    """The GPUs of the host, and problems of each."""
    gpus = machine.gpus
    if not gpus.devices:
        yield _none(gpus)
        return
    yield from _kinds(gpus.devices)
    if gpus.driver:
        cuda = f", which runs CUDA up to {gpus.cuda}" if gpus.cuda else ""
        yield Finding(AREA, f"driver {gpus.driver}{cuda} (from {gpus.source})")
    if gpus.source not in DRIVER_SOURCES:
        what = "not known: driver, power, clocks, ECC errors, who else is on the GPUs"
        yield Finding(AREA, f"{what} ({gpus.why})", "note", "pip install nvidia-ml-py")
    for check in _CHECKS:
        yield from check(gpus.devices)


def _none(gpus: Gpus) -> Finding:
    if gpus.loaded:
        what = f"an NVIDIA driver is loaded, and no GPU answers: {gpus.why or 'none is listed'}"
        return Finding(AREA, what, "bad", "nvidia-smi; in a container: docker run --gpus all")
    return Finding(AREA, f"no GPU: {gpus.why or 'no NVIDIA driver is loaded'}", "note")


def _kinds(devices: Sequence[GpuState]) -> Iterator[Finding]:
    """One finding for each kind of GPU; a warning if there are several, because the slowest sets the pace."""
    kinds: dict[tuple[str, object, tuple[int, ...] | None], list[int]] = {}
    for gpu in devices:
        kinds.setdefault((gpu.name, gpu.memory and round(gpu.memory / GIB), gpu.capability), []).append(gpu.index)
    for (name, _, capability), which in kinds.items():
        first = next(g for g in devices if g.index == which[0])
        size = f", {show_bytes(first.memory)} each" if first.memory else ""
        shown = f", compute capability {capability[0]}.{capability[1]}" if first.capability and capability else ""
        yield Finding(AREA, f"{len(which)} x {name}{size}{shown}: GPU {numbered(which)}")
    if len(kinds) > 1:
        fix = f"CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={_listed(max(kinds.values(), key=len))}"
        yield Finding(AREA, "GPUs of several kinds: a run over all goes at the pace of the slowest", "warn", fix)


def _memory_errors(devices: Sequence[GpuState]) -> Iterator[Finding]:
    """ECC errors. An uncorrected error ends the process that reads it; a GPU whose rows cannot be replaced will have
    more."""
    for gpu in devices:
        rest = [g.index for g in devices if g.index != gpu.index]
        without = f"leave it out: CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={_listed(rest)}"
        if gpu.remapping == "failed":
            yield Finding(
                AREA, f"GPU {gpu.index}: bad memory rows could not be replaced", "bad", f"{without}; replace it"
            )
        elif gpu.uncorrected:
            what = f"GPU {gpu.index}: {count(gpu.uncorrected, 'uncorrected ECC error')} since the driver started"
            yield Finding(AREA, what, "bad", f"{without}; or nvidia-smi --gpu-reset -i {gpu.index}")
        elif gpu.remapping == "pending":
            what = f"GPU {gpu.index}: memory rows wait to be replaced at its next reset"
            yield Finding(AREA, what, "warn", f"nvidia-smi --gpu-reset -i {gpu.index}")
        if gpu.corrected:
            what = f"GPU {gpu.index}: {count(gpu.corrected, 'corrected ECC error')} since the driver started"
            yield Finding(AREA, what, "note", f"nvidia-smi -q -d ECC -i {gpu.index}, to see whether it grows")
    counted = [g for g in devices if g.uncorrected is not None]
    clean = not any(g.uncorrected or g.corrected or g.remapping for g in devices)
    if counted and clean and len(counted) == len(devices):
        yield Finding(AREA, "no ECC error on any GPU since the driver started")
    if off := [g.index for g in devices if g.ecc is False]:
        yield Finding(
            AREA, f"ECC is off on GPU {numbered(off)}: flipped bits go unseen", "warn", "nvidia-smi -e 1, reboot"
        )


def _others(devices: Sequence[GpuState]) -> Iterator[Finding]:
    """Memory that other processes use."""
    for gpu in devices:
        used = None if gpu.memory is None or gpu.free is None else gpu.memory - gpu.free
        if gpu.processes:
            pids = ", ".join(str(pid) for pid, _ in gpu.processes[:4])
            held = f", {show_bytes(used)} in use" if used is not None else ""
            what = f"GPU {gpu.index}: {count(len(gpu.processes), 'process', 'processes')} already on it ({pids}){held}"
            yield Finding(AREA, what, "warn", f"ps -p {pids.replace(' ', '')}; end it, or use the other GPUs")
        elif used is not None and used > HELD:
            what = f"GPU {gpu.index}: {show_bytes(used)} in use by processes that cannot be seen from here"
            yield Finding(AREA, what, "warn", "nvidia-smi on the host, outside of this container")


def _pace(devices: Sequence[GpuState]) -> Iterator[Finding]:
    """GPUs that are slower than others of their kind: all others wait for them in every collective."""
    for gpu in devices:
        if gpu.slowed:
            what = f"GPU {gpu.index} is held back now: {', '.join(gpu.slowed)}"
            yield Finding(
                AREA, what, "warn", f"nvidia-smi -q -d PERFORMANCE,TEMPERATURE -i {gpu.index}; check its cooling"
            )
        if gpu.power_limit and gpu.power_default and gpu.power_limit < 0.99 * gpu.power_default:
            what = f"GPU {gpu.index}: power limit {gpu.power_limit:.0f} W, by default {gpu.power_default:.0f} W"
            yield Finding(AREA, what, "warn", f"nvidia-smi -i {gpu.index} -pl {gpu.power_default:.0f}")
    limits = {round(g.power_limit) for g in devices if g.power_limit}
    clocks = {g.clock_most for g in devices if g.clock_most}
    if limits or clocks:
        shown = [f"power limit {'/'.join(map(str, sorted(limits)))} W"] * bool(limits)
        shown += [f"clocks up to {'/'.join(map(str, sorted(clocks)))} MHz"] * bool(clocks)
        yield Finding(AREA, ", ".join(shown))


def _modes(devices: Sequence[GpuState]) -> Iterator[Finding]:
    if cut := [g.index for g in devices if g.mig]:
        what = f"GPU {numbered(cut)} is cut into MIG instances, between which NCCL does not work"
        yield Finding(AREA, what, "warn", f"nvidia-smi -i {_listed(cut)} -mig 0")
    if lazy := [g.index for g in devices if g.persistence is False]:
        what = f"GPU {numbered(lazy)}: persistence mode is off, so each start waits for the driver"
        yield Finding(AREA, what, "note", "nvidia-smi -pm 1")


def _listed(indices: Sequence[int]) -> str:
    return ",".join(map(str, indices))


_CHECKS: tuple[Callable[[Sequence[GpuState]], Iterator[Finding]], ...] = (_memory_errors, _others, _pace, _modes)
