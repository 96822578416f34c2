"""FLOPs that a step needs on any device, and the main reason why a layout takes longer than these at peak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penteract.config.layout import Layout
from penteract.ops.declarations import OPS
from penteract.readings.composed import Composer
from penteract.readings.layers.expert_load import Balanced
from penteract.readings.layers.layer_program import shapes
from penteract.readings.layers.stages import counted
from penteract.units import Flops, Seconds

PARTS = ("compute", "attention", "pointwise", "tensor", "context", "expert", "launch", "pipeline", "data", "update",
         "host")  # fmt: skip
# How reports call a part.
PART_NAMES: Mapping[str, str] = {
    "compute": "matmul", "attention": "attention", "pointwise": "memory-bound", "tensor": "TP comm",
    "context": "CP comm", "expert": "EP comm", "launch": "launch", "pipeline": "PP bubble", "data": "DP comm",
    "update": "optimizer", "host": "host copies",
}  # fmt: skip
_REASONS: Mapping[str, str] = {
    "compute": "matmul efficiency", "attention": "attention efficiency", "pointwise": "memory-bound ops",
    "tensor": "TP communication", "context": "CP communication", "expert": "EP communication",
    "launch": "kernel launches", "pipeline": "pipeline bubble and P2P", "data": "DP communication",
    "update": "optimizer", "host": "copies to and from the host",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepFlops:
    """FLOPs that training needs in a step: three times a forward pass. `causal`: with half of attention's."""

    full: Flops
    causal: Flops


@dataclass(frozen=True, slots=True)
class Forward:
    """FLOPs of one sequence's forward pass on one device: of all products, and of attention's products (`scores`)."""

    products: Flops
    scores: Flops

    @staticmethod
    def of(composer: Composer) -> Forward:
        """Count the FLOPs that the declarations give for one sequence on a single device."""
        single_device, forward, scores = Layout(attention="flash"), 0, 0
        load = Balanced.of(composer.model, single_device, composer.sequence_length)
        for kind, n in counted(composer.layers_by_stage(single_device)).items():
            for op in composer.recorder.tape(single_device, kind).ops:
                entry = OPS.get(op.site.op_name)
                if op.program is None and entry is not None:
                    declaration = entry.declaration
                    flops = n * declaration.flops("forward", shapes(op.site, load), op.site.weights, op.site.attrs)
                    forward, scores = forward + flops, scores + flops * (declaration.part == "attention")
        return Forward(forward, scores)

    def step(self, tokens: int, sequence_length: int) -> StepFlops:
        """FLOPs of training on `tokens` tokens."""
        both = 2 * self.products - self.scores
        return StepFlops(3 * self.products * tokens // sequence_length, 3 * both * tokens // (2 * sequence_length))

    def split(self, ideal: Seconds) -> dict[str, Seconds]:
        """The seconds of a step's products at the device's peak, by the parts of a step that they belong to."""
        share = self.scores / (2 * self.products - self.scores)
        return {"compute": ideal * (1 - share), "attention": ideal * share}

    def limit(self, parts: Mapping[str, Seconds], seconds: Seconds, ideal: Seconds) -> str:
        """The main reason why a step takes longer than `ideal`: the seconds of its products at the device's peak."""
        lost = {**parts, **{part: max(0.0, parts[part] - least) for part, least in self.split(ideal).items()}}
        worst = max(lost, key=lost.__getitem__)
        return f"{_REASONS[worst]}, {lost[worst] / seconds:.0%}"
