"""What tensors of a rank may take on this machine, where no cluster says it."""

from __future__ import annotations

from penteract.config.run import RunSpec
from penteract.engine.device.host_memory import available
from penteract.engine.doctor.probe.gpus import DRIVER, gpus
from penteract.units import Bytes

OF_A_GPU = 0.92  # of its free memory: the rest is for libraries and gaps between blocks


class RoomHere:
    """Asked for each run; the GPUs are asked once."""

    def __init__(self) -> None:
        self._least: Bytes | None = None
        self._asked = False

    def __call__(self, run: RunSpec) -> Bytes | None:
        """Bytes of one rank: of the GPU with the least free memory, or of the host's memory its part; None: not
        known."""
        if run.precision.device == "cpu" or not DRIVER.exists():
            free = available()
            return None if free is None else free // run.layout.world
        if not self._asked:
            self._asked = True
            self._least = min((gpu.free for gpu in gpus(None).devices if gpu.free), default=None)
        return None if self._least is None else int(self._least * OF_A_GPU)
