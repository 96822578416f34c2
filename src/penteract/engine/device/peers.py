"""Whether ranks of this host can read each other's memory."""

from __future__ import annotations

import os
from itertools import permutations

import torch


def reads_peers(device: torch.device) -> bool:
    """GPUs need peer access, and a process sees all that it reads; on a CPU it opens the files of others (Linux)."""
    if device.type != "cuda":
        return hasattr(os, "memfd_create")
    count = torch.cuda.device_count()
    return count > 1 and all(torch.cuda.can_device_access_peer(i, j) for i, j in permutations(range(count), 2))
