"""Functions whose names differ between the supported torch versions (2.11 and 2.13), and nothing else."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def all_gather(out: torch.Tensor, x: torch.Tensor, group: Any) -> Any:
    """Asynchronous all-gather along dim 0 into one tensor."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    return getattr(dist, name)(out, x, group=group, async_op=True)


def reduce_scatter(out: torch.Tensor, x: torch.Tensor, group: Any) -> Any:
    """Asynchronous reduce-scatter (sum) along dim 0; this rank's part goes into `out`."""
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    return getattr(dist, name)(out, x, group=group, async_op=True)
