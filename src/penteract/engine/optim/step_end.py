"""The end of a step in one kernel, where a layout asks for Triton's: the factors of the update, what is done, the
latch, and the next step's counts of targets. The values are those of `Executor` and `AdamW` in plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from penteract.engine.device.launches import bind
from penteract.engine.optim.optimizer import AdamW, Factors
from penteract.step.program import Program
from penteract.step.update import one_pass_norm


@dataclass(slots=True)
class StepEnd:
    """`run[next]()`: the end of a step, with the `next` step's counts or without; then `factors` are those of the step.

    vector   [n]: the totals that ranks have summed
    latch    [], done [], counts: as of `Executor`
    largest  [values, 4] or None: largest values of weights, of which the updates that follow find the first of each row
    """

    p: Program
    optimizer: AdamW
    vector: torch.Tensor
    latch: torch.Tensor
    done: torch.Tensor
    counts: torch.Tensor
    largest: torch.Tensor | None
    factors: Factors = field(init=False)
    run: dict[bool, Callable[[], None]] = field(init=False)

    def __post_init__(self) -> None:
        """Bind the launches."""
        from penteract.engine.kernels.triton.optimizer.end_step import end_step

        adamw, spec, device = self.optimizer, self.optimizer.spec, self.vector.device
        numbers = torch.tensor([spec.weight_decay, 0.0, 0.0, 0.0], dtype=torch.float64, device=device)
        betas = torch.tensor(spec.betas, dtype=torch.float64, device=device)
        made = torch.zeros(len(Factors._fields), dtype=torch.float32, device=device)
        self.factors = Factors(*made.unbind())
        beta1, beta2 = spec.betas
        values = 0 if self.largest is None else len(self.largest)
        self.run = {
            ahead: partial(_run, betas, adamw.step, numbers[2:], bind(
                end_step, (1,), self.vector, self.latch, self.done, adamw.step, adamw.rate, numbers, made,
                self.counts if ahead else None, self.largest, 1 - beta1, 1 - beta2, float(spec.clip_norm or 0), values,
                LOSSES=len(self.p.losses), MEANS=len(self.p.means), CLIP=bool(spec.clip_norm),
                VALUES=1 << max(values - 1, 0).bit_length(), num_warps=1, enable_fp_fusion=False,
            ))
            for ahead in (False, True)
        }  # fmt: skip


def _run(betas: torch.Tensor, step: torch.Tensor, powers: torch.Tensor, launch: Callable[[], None]) -> None:
    torch.pow(betas, step, out=powers)
    launch()


def one_kernel_end(p: Program, optimizer: AdamW) -> bool:
    """Whether a kernel ends a step: factors are in fp32, the loss is not scaled, and no rule for factors is another
    than AdamW's, which are those of the kernel."""
    kind = type(optimizer)
    own = kind.factors is AdamW.factors and kind.clipping is AdamW.clipping
    return own and optimizer.scaling is None and one_pass_norm(p.precision, p.layout.elementwise)
