"""Packages of kernels are imported from when a rank knows its run, beside all that it waits for meanwhile: other ranks,
the set-up of NCCL, memory. Where kernels are compiled already, no piece of a start takes longer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from threading import Thread

import torch

from penteract.config.rules.kernel_limits import HOPPER
from penteract.config.run import RunSpec
from penteract.engine.device.device import pick_device
from penteract.engine.kernels.checks import check_kernels
from penteract.engine.kernels.fused_attention.compiled import keep_compiled
from penteract.engine.kernels.registry import import_packages
from penteract.engine.session.concurrently import short_switch_interval
from penteract.step.program import compile_run


def begin_imports(spec: RunSpec, environment: Mapping[str, str]) -> Thread | None:
    """Begin to import what this rank's kernels on a GPU need; None without a GPU. The trainer waits for it where it
    imports the same, and raises what went wrong. For a process that ends without finalising Python: a thread that is
    inside a package then would abort it."""
    if spec.precision.device == "cpu" or not torch.cuda.is_available():
        return None
    if spec.layout.attention.startswith("fa4"):
        keep_compiled(HOPPER)  # here, where no library reads the environment in another thread
    rank, local = (int(environment.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))

    def import_them() -> None:
        with short_switch_interval, suppress(Exception):
            program = compile_run(spec, rank)
            device = pick_device(spec.precision.device, local)
            check_kernels(program, device, packed=spec.data.pack_documents)
            import_packages(program, device)

    thread = Thread(target=import_them, name="imports", daemon=True)
    thread.start()
    return thread
