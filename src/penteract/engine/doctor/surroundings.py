"""Environment variables that affect training, and the launcher that starts ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from penteract.engine.doctor.finding import Finding, count
from penteract.engine.doctor.machine import HostReport

AREA = "environment"
TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# Variables that make training slower: name -> (the value that does, its effect).
_COSTLY: Mapping[str, tuple[str, str]] = {
    "CUDA_LAUNCH_BLOCKING": ("1", "the host waits for every kernel: only for debugging"),
    "NCCL_P2P_DISABLE": ("1", "GPUs of this host communicate through its memory"),
    "NCCL_SHM_DISABLE": ("1", "GPUs without peer access communicate through sockets"),
    "NCCL_IB_DISABLE": ("1", "hosts communicate through sockets, InfiniBand is not used"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "every collective is checked by another one: only for debugging"),
    "TORCH_NCCL_BLOCKING_WAIT": ("1", "the host waits for every collective"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1", "the driver allocates every tensor"),
}


def findings(machine: HostReport) -> Iterator[Finding]:
    """The launcher, visible GPUs, and variables that affect training."""
    env = machine.environment
    yield from _launcher(env)
    yield from _visible(machine)
    for name, (value, cost) in _COSTLY.items():
        if env.get(name, "").upper() == value:
            yield Finding(AREA, f"{name}={env[name]}: {cost}", "warn", f"unset {name}")
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        yield from _interface(name, env.get(name, ""), machine.interfaces)
    yield from _threads(machine)
    shown = [f"{name}={env[name]}" for name in sorted(env) if name not in TORCHRUN and not name.startswith("SLURM")]
    if shown:
        yield Finding(AREA, f"set: {', '.join(shown)}", "note")


def all_hidden(machine: HostReport) -> bool:
    """Whether the environment hides all GPUs from this process."""
    return machine.environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1")


def _visible(machine: HostReport) -> Iterator[Finding]:
    there, seen = len(machine.gpus.devices), len(machine.torch.devices) if machine.torch else 0
    if there and all_hidden(machine):
        what = "CUDA_VISIBLE_DEVICES hides every GPU: a run uses the CPU"
        yield Finding(AREA, what, "warn", "unset CUDA_VISIBLE_DEVICES")
    elif 0 < seen < there:
        what = f"a run sees {seen} of {there} GPUs"
        yield Finding(AREA, what, "note", "unset CUDA_VISIBLE_DEVICES, if all are to be used")


def _launcher(env: Mapping[str, str]) -> Iterator[Finding]:
    """The launcher. It must set all five variables; if some are set, they are left over, or the launcher is
    incomplete."""
    here = [name for name in TORCHRUN if name in env]
    if len(here) == len(TORCHRUN):
        what = f"started by a launcher: rank {env['RANK']} of {env['WORLD_SIZE']}, they meet at {env['MASTER_ADDR']}"
        yield Finding(AREA, f"{what}:{env['MASTER_PORT']}")
        return
    if "RANK" in here or "WORLD_SIZE" in here:
        missing = ", ".join(name for name in TORCHRUN if name not in env)
        what = f"{', '.join(here)} are set without {missing}: a run ignores them and starts its own ranks"
        yield Finding(AREA, what, "warn", f"unset {' '.join(here)}, or start with torchrun")
    tasks = env.get("SLURM_NTASKS", env.get("SLURM_NPROCS", "1"))
    if "SLURM_JOB_ID" in env:
        nodes = env.get("SLURM_NNODES", env.get("SLURM_JOB_NUM_NODES", "1"))
        what = f"Slurm job {env['SLURM_JOB_ID']}: {nodes} nodes, {tasks} tasks"
        separate = "SLURM_PROCID" in env and tasks.isdigit() and int(tasks) > 1
        many = nodes.isdigit() and int(nodes) > 1
        if separate:
            what += ": each task would be a run of its own"
        fix = "srun --ntasks-per-node=1 torchrun --nnodes=$SLURM_NNODES --nproc-per-node=gpu --rdzv-backend=c10d "
        fix += "--rdzv-endpoint=HOST:29500 -m penteract train"
        yield Finding(AREA, what, "warn" if separate else "note", fix if separate or many else "")


def _interface(name: str, value: str, there: tuple[str, ...]) -> Iterator[Finding]:
    """NCCL takes prefixes, =exact names and ^exclusions; gloo exact names."""
    if not value or value.startswith("^") or not there:
        return
    exact = value.startswith("=") or name.startswith("GLOO")
    for wanted in value.lstrip("=").split(","):
        if not any(i == wanted or (not exact and i.startswith(wanted)) for i in there):
            what = f"{name}={value}: there is no such network interface (there are {', '.join(there)})"
            yield Finding(AREA, what, "bad", f"unset {name}, or name one of these")


def _threads(machine: HostReport) -> Iterator[Finding]:
    """Warn if ranks have more threads together than there are usable cores."""
    use, usable = machine.use, machine.host.usable
    setting = machine.environment.get("OMP_NUM_THREADS")
    if use.ranks * use.threads > usable:
        why = f"OMP_NUM_THREADS={setting}" if setting else "each rank has one at least"
        ranks, threads = count(use.ranks, "rank"), count(use.threads, "thread")
        what = f"{ranks} of {threads} on {count(usable, 'usable core')}: they would take turns ({why})"
        fix = f"OMP_NUM_THREADS={usable // use.ranks}" if usable >= use.ranks else "fewer ranks"
        yield Finding(AREA, what, "warn", fix)
