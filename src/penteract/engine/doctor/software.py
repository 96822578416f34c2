"""torch and the libraries it was built with, checked against the driver and the GPUs; optional packages."""

from __future__ import annotations

from collections.abc import Iterator

from penteract.config.rules.kernel_packages import packages_for
from penteract.engine.doctor.finding import Finding, numbered
from penteract.engine.doctor.machine import Gpus, GpuState, HostReport, Package, Torch
from penteract.engine.doctor.surroundings import all_hidden

AREA = "software"
TRAIN = "pip install 'penteract[train]'"
HF = "pip install 'penteract[hf]'"

# Package -> (what is not possible without it, how to install it).
OPTIONAL = {
    "numpy": ("no training: data is read with it", TRAIN),
    "safetensors": ("no checkpoints, so no training", TRAIN),
    "tokenizers": ("text as bytes alone, no tokenizer.json", HF),
    "datasets": ('no data.source = "hf:NAME"; files and folders work', HF),
}
NEEDED = ("numpy", "safetensors")


def findings(machine: HostReport) -> Iterator[Finding]:
    """Versions of libraries and of the driver."""
    torch, gpus = machine.torch, machine.gpus
    if torch is None:
        yield Finding(AREA, "training needs torch: none is installed (planning and pricing work)", "bad", TRAIN)
    elif torch.error:
        fix = f"{TRAIN} --force-reinstall, or fix what it names: python -c 'import torch'"
        yield Finding(AREA, f"torch cannot be loaded: {torch.error}", "bad", fix)
    else:
        yield _build(torch)
        yield from _versions(machine)
        yield from _reach(torch, gpus) if gpus.devices and not all_hidden(machine) else ()
        yield from _backends(torch)
        yield from _working(torch)
    for package in machine.packages:
        if package.name in OPTIONAL:
            yield _package(package)
        elif any(package.name in packages_for(gpu.capability) for gpu in gpus.devices):
            yield _kernels(package)


def _build(torch: Torch) -> Finding:
    parts = [f"CUDA {torch.cuda}"] * bool(torch.cuda) + [f"ROCm {torch.hip}"] * bool(torch.hip)
    parts += [f"cuDNN {torch.cudnn}"] * bool(torch.cudnn) + [f"NCCL {torch.nccl}"] * bool(torch.nccl)
    return Finding(AREA, f"torch {torch.version}, built with {', '.join(parts) or 'no GPU support'}")


def _versions(machine: HostReport) -> Iterator[Finding]:
    """torch against this project's requirement, if the project is installed with its metadata."""
    wanted = next((p for p in machine.packages if p.name == "torch"), None)
    if wanted and wanted.wanted and older(wanted.found, wanted.wanted):
        what = f"torch {wanted.found} is older than what this version was tested with ({wanted.wanted})"
        yield Finding(AREA, what, "warn", f"pip install -U 'torch{wanted.wanted}'")


def _reach(torch: Torch, gpus: Gpus) -> Iterator[Finding]:
    """Whether this torch can use the GPUs of the host, and if not, why."""
    if not torch.cuda and not torch.hip:
        what = f"this torch has no CUDA: a run would use the CPU, and none of {len(gpus.devices)} GPUs"
        yield Finding(AREA, what, "bad", _other_build(gpus))
        return
    if torch.cuda and gpus.cuda and number(torch.cuda)[:1] > number(gpus.cuda)[:1]:
        what = f"driver {gpus.driver} runs CUDA up to {gpus.cuda}, and this torch needs {torch.cuda}"
        yield Finding(AREA, what, "bad", f"a driver for CUDA {torch.cuda}, or {_other_build(gpus)}")
        return
    if not torch.available:
        yield Finding(AREA, f"torch finds no GPU it can use: {torch.reason or 'it does not say why'}", "bad", _look())
        return
    if torch.cuda and gpus.cuda and number(torch.cuda) > number(gpus.cuda):
        what = f"torch's CUDA {torch.cuda} is newer than the driver's {gpus.cuda}, of the same major version: it runs"
        yield Finding(AREA, what, "note", "kernels compiled on the fly may need the newer driver")
    missing = [
        g.index for g in gpus.devices if torch.archs and g.capability and not compiled(torch.archs, g.capability)
    ]
    if missing:
        shown = " ".join(torch.archs)
        what = f"this torch has no kernels for GPU {numbered(missing)} (it has {shown})"
        yield Finding(AREA, what, "bad", "pip install -U torch, or an older one for an older GPU")
    if old := [g.index for g in gpus.devices if _is_old(g)]:
        what = f"GPU {numbered(old)}: older than compute capability 8.0, where bf16 is emulated and slow"
        yield Finding(AREA, what, "warn", "--precision.dtype fp32")


def _backends(torch: Torch) -> Iterator[Finding]:
    names = ["gloo"] * torch.gloo + ["NCCL"] * torch.has_nccl
    if names:
        yield Finding(AREA, f"collectives: {' and '.join(names)}")
    if not torch.gloo:
        yield Finding(AREA, "this torch has no gloo: one rank alone", "bad", TRAIN + " --force-reinstall")
    if torch.available and not torch.has_nccl:
        what = "this torch has no NCCL: one GPU alone"
        yield Finding(AREA, what, "bad" if len(torch.devices) > 1 else "warn", "a torch for Linux with CUDA")


def _working(torch: Torch) -> Iterator[Finding]:
    """The results of a small sum on every GPU that torch sees."""
    if broken := {i: d.works for i, d in enumerate(torch.devices) if d.works}:
        for i, why in broken.items():
            rest = ",".join(str(j) for j in range(len(torch.devices)) if j not in broken)
            what = f"torch's GPU {i} did not work: {why}"
            yield Finding(AREA, what, "bad", f"CUDA_VISIBLE_DEVICES={rest}; nvidia-smi -q, dmesg | grep -i xid")
    elif torch.devices:
        yield Finding(AREA, f"a sum on each of {len(torch.devices)} GPUs was right")
    if torch.reason and torch.available:
        yield Finding(AREA, f"torch says: {torch.reason}", "note")


def _package(package: Package) -> Finding:
    lost, fix = OPTIONAL[package.name]
    if not package.found:
        bad = package.name in NEEDED
        return Finding(AREA, f"no {package.name}: {lost}", "bad" if bad else "note", fix)
    if package.wanted and older(package.found, package.wanted):
        return Finding(AREA, f"{package.name} {package.found}, wanted {package.wanted}", "warn", f"{fix} -U")
    return Finding(AREA, f"{package.name} {package.found}")


def _kernels(package: Package) -> Finding:
    """Of a package of kernels, of which only one version is called."""
    if f"=={package.found}" == package.wanted:
        return Finding(AREA, f"{package.name} {package.found}")
    has = f"{package.name} {package.found}" if package.found else f"no {package.name}"
    lost = "runs use torch's kernels, and plans for these GPUs need --packages"
    return Finding(
        AREA, f"{has}: {lost}", "note", f"pip install '{package.name}{package.wanted}', as penteract[gpu] does"
    )


def _other_build(gpus: Gpus) -> str:
    most = f" up to {gpus.cuda}" if gpus.cuda else ""
    return f"a torch built for CUDA{most}: choose it on pytorch.org/get-started, then pip install it"


def _look() -> str:
    return "python -c 'import torch; torch.cuda.init()' shows more; in a container: docker run --gpus all"


def _is_old(gpu: GpuState) -> bool:
    return gpu.capability is not None and gpu.capability < (8, 0)


def number(version: str) -> tuple[int, ...]:
    """12.10.1+cu -> (12, 10, 1)."""
    parts: list[int] = []
    for word in version.split("+")[0].split("."):
        digits = "".join(c for c in word if c.isdigit())
        if not digits:
            break
        parts.append(int(digits))
    return tuple(parts)


def older(found: str, wanted: str) -> bool:
    """Whether `found` is below the ">=" of a requirement such as ">=2.11,<3"."""
    least = next((w.strip()[2:] for w in wanted.split(",") if w.strip().startswith(">=")), "")
    return bool(least) and number(found) < number(least)


def compiled(archs: tuple[str, ...], capability: tuple[int, int]) -> bool:
    """Whether code for `archs` (sm_90, sm_90a, compute_90) runs on a GPU of this capability.

    Machine code runs on the same major version from its own minor version on; code named compute_ is translated for
    any later GPU. Code with a suffix (sm_90a) only runs on exactly that version.
    """
    for arch in archs:
        kind, _, digits = arch.partition("_")
        exact = digits[-1:].isalpha()
        digits = digits.rstrip("af")
        if not digits.isdigit():
            continue
        built = (int(digits[:-1] or 0), int(digits[-1]))
        if capability == built or (not exact and kind == "compute" and built <= capability):
            return True
        if not exact and kind == "sm" and built[0] == capability[0] and built[1] <= capability[1]:
            return True
    return False
