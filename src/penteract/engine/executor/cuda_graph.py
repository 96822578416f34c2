"""A step as one CUDA graph: recorded once, replayed with new data, rate and step number in the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from penteract.engine.executor.executor import Executor
from penteract.errors import Bug
from penteract.parallel import direct
from penteract.step.walk import walk


@dataclass(slots=True)
class CapturedStep:
    """`replay()` does `walk(run.p, run)` without Python. Before it, copy the batch into `run.micro_batches`, and
    the target counts of all ranks into `run.counts`: a captured step does not prefetch.

    Capture after one or two eager steps, in which libraries allocate what they need. A graph cannot use host values:
    raises Bug for a program with routed sizes, which the host reads.

    `penteract train` does not capture steps: benchmarks do, to measure a step without the host's part.
    """

    run: Executor
    replay: Callable[[], None] = field(init=False)

    def capture(self) -> None:
        """Record the walk. Nothing runs."""
        synchronising = [op.site for c in self.run.p.chunks for op in c.tape.ops if op.site.op_name == "split_sizes"]
        if synchronising:
            where = str(synchronising[0])
            raise Bug("CAPTURE", "a step whose host reads routed counts cannot be captured", where=where)
        if direct.axes(self.run.p.layout):
            raise Bug("CAPTURE", "a captured step counts no meetings of ranks", fix='kernels.collectives = "library"')
        if self.run.before_update is not None:
            raise Bug("CAPTURE", "a captured step does not wait for the copies of a snapshot",
                      fix="save synchronously")  # fmt: skip
        self.run.settle_parameters()
        self.run.summed.next_targets = None
        self._find_largest_weights()  # or the graph would find them in each replay
        graph = self.run.device.capture(self._walk)

        def replay() -> None:
            self._find_largest_weights()
            graph()

        self.replay = replay

    def _find_largest_weights(self) -> None:
        """Those of weights that something but an update has set: only the host knows that."""
        if self.run.state.largest_weights is not None:
            self.run.state.largest_weights.begin()

    def _walk(self) -> None:
        walk(self.run.p, self.run)
        self.run.settle_parameters()  # a graph must not end with a collective under way
