"""How many rows came to a rank's experts, counted on the device, where the host never needs the number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from penteract.step.expert_layers import layers_with_rows
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
        layers = layers_with_rows(p) if p.layout.pads_rows else ()
        keys = [(layer, micro) for layer in layers for micro in range(p.layout.gradient_accumulation_steps)]
        table = torch.zeros(len(keys), dtype=torch.int32, device=device)
        return CountedRows(table, dict(zip(keys, table.unbind() if keys else (), strict=True)))

    def noted(self) -> CountedRows:
        """As they are after all that the device has been asked for so far; nobody waits."""
        return CountedRows(self.table.clone(), self.places)

    def read(self) -> dict[Place, int]:
        """Waits for the device."""
        return dict(zip(self.places, self.table.tolist(), strict=True))
