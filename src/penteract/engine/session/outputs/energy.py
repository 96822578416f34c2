"""The energy that a GPU has used, from NVML's counter, which most cards since Volta have."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from penteract.engine.device.device import device_of

log = logging.getLogger("penteract")


@dataclass(slots=True)
class EnergyMeter:
    """Joules between two readings. `read`: millijoules since the driver was loaded; None: there is no counter.

    The driver updates the counter a few times a second at most: a step that is shorter has 0, and the next one more.
    """

    read: Callable[[], int] | None = None
    last: int = 0

    @staticmethod
    def of(device: torch.device) -> EnergyMeter:
        """The meter of a device; one without a counter where there is no GPU, no `nvidia-ml-py`, or no such counter."""
        uuid = device_of(device).uuid
        if uuid is None or find_spec("pynvml") is None:
            return EnergyMeter()
        try:
            return EnergyMeter.by_uuid(import_module("pynvml"), uuid)
        except Exception as e:  # whatever a driver does, a run goes on without this number
            log.info("energy is not measured: %s", e)
            return EnergyMeter()

    @staticmethod
    def by_uuid(pynvml: Any, uuid: str) -> EnergyMeter:
        """The meter of the GPU that torch knows by `uuid`, whichever GPUs are visible. Raises what NVML raises."""
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")

        def read() -> int:
            return int(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))

        return EnergyMeter(read, read())

    def used(self) -> float | None:
        """Joules since the last call; None without a counter. One that fails is not asked again."""
        if self.read is None:
            return None
        try:
            now = self.read()
        except Exception as e:
            log.info("energy is not measured any more: %s", e)
            self.read = None
            return None
        joules, self.last = (now - self.last) / 1e3, now
        return joules
