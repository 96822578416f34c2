"""A step as one CUDA graph: recorded once, replayed with new data, rate and step number in the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from penteract.engine.executor.executor import Run
from penteract.errors import Bug
from penteract.step.walk import walk


@dataclass(slots=True)
class CapturedStep:
    """`replay()` is `walk(run.p, run)` without Python. Feed by copying into `run.batches`, and the targets of all ranks
    into `run.counts`: a captured step draws no batch ahead, and is told of none.

    Capture after an eager step or two, so that libraries have made what they need. Host values are not for graphs:
    raises Bug for a program whose ops look at the host (routed sizes).
    """

    run: Run
    replay: Callable[[], None] = field(init=False)

    def capture(self) -> None:
        """Record the walk. Nothing runs."""
        looks = [op.site for c in self.run.p.chunks for op in c.tape.ops if op.site.op_name == "split_sizes"]
        if looks:
            raise Bug("CAPTURE", "a step that looks at routed counts cannot be captured", where=str(looks[0]))
        self.run.settle_parameters()
        self.run.summed.ahead = None
        self.replay = self.run.device.capture(self._walk)

    def _walk(self) -> None:
        walk(self.run.p, self.run)
        self.run.settle_parameters()  # a graph ends with nothing under way
