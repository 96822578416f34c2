"""Packages of kernels are imported from when a rank knows its run, beside all that it waits for meanwhile: other ranks,
the set-up of NCCL, memory. Where kernels are compiled already, no piece of a start takes longer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from threading import Thread

import torch

from penteract.config.run import RunSpec
from penteract.engine.device.device import pick_device
from penteract.engine.kernels.registry import import_packages
from penteract.engine.session.concurrently import sooner
from penteract.step.program import compile_step


def begin_imports(spec: RunSpec, environment: Mapping[str, str]) -> Thread | None:
    """Begin to import what this rank's kernels on a GPU need; None without a GPU. The trainer waits for it where it
    imports the same, and raises what went wrong."""
    if spec.precision.device == "cpu" or not torch.cuda.is_available():
        return None
    rank, local = (int(environment.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))

    def import_them() -> None:
        with sooner, suppress(Exception):
            program = compile_step(
                spec.model, spec.layout, spec.sequence_length, rank=rank, precision=spec.precision.policy,
                optimizer_kinds=spec.optimizer.optimizer_kinds,
            )  # fmt: skip
            import_packages(program, pick_device(spec.precision.device, local))

    thread = Thread(target=import_them, name="imports", daemon=True)
    thread.start()
    return thread
