"""How many rows came to a rank's experts, counted on the device, where the host never needs the number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from penteract.step.program import Program

Place = tuple[int, int]  # layer, micro-batch


@dataclass(frozen=True, slots=True)
class CountedRows:
    """The rows of the last step, of layers whose registers are padded. `table`: one number for each of `places`."""

    table: torch.Tensor
    places: Mapping[Place, torch.Tensor]  # its elements

    @staticmethod
    def of(p: Program, device: torch.device) -> CountedRows:
        """Nothing is counted where registers are not padded."""
        sites = [op.site for c in p.chunks for op in c.tape.ops if op.site.op_name == "expert_offsets"]
        micro_batches = range(p.layout.gradient_accumulation_steps if p.layout.pads_rows else 0)
        keys = [(site.layer, micro) for site in sites for micro in micro_batches]
        table = torch.zeros(len(keys), dtype=torch.int32, device=device)
        return CountedRows(table, dict(zip(keys, table.unbind() if keys else (), strict=True)))

    def read(self) -> dict[Place, int]:
        """Waits for the device."""
        return dict(zip(self.places, self.table.tolist(), strict=True))
