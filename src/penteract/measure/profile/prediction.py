"""What is predicted of a run's step: its timeline by pipeline rank and name, with the work and the part of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from penteract.config.hardware import Cluster
from penteract.config.mesh import Mesh
from penteract.config.run import RunSpec
from penteract.measure.profile.planned_work import BytesOnly, FlopsOnly, Work, planned_work
from penteract.planner.ask import Ask
from penteract.planner.report.waterfall import StepChange, predicted_parts, waterfall
from penteract.planner.search.best import Timed
from penteract.readings.estimator import Estimator
from penteract.readings.ideal import PARTS
from penteract.readings.time.clock import CHAINED, RUN, START, WAIT
from penteract.readings.time.timelines.timeline import Event, StepSpan, emit_events
from penteract.step import names

PARTS_OF_EVENTS: Mapping[str, str] = {
    **dict.fromkeys((names.GATHER, names.REPLICATE, names.QUANTISE, names.NARROW, names.WIDEN, names.ADD,
                     names.WAIT_PARAMETERS, names.WAIT_GRADIENTS, names.LARGEST), "data"),
    **dict.fromkeys((names.MEASURE, names.UPDATE, names.ORTHOGONALISE), "update"),
    **dict.fromkeys((names.WAIT_STAGE, names.WAIT_SENT, names.WAIT_RANKS), "pipeline"),
}  # fmt: skip


@dataclass(slots=True)
class PredictedOp:
    """What is predicted under one name on one pipeline rank: picoseconds of a step, in `calls` calls."""

    stream: str
    calls: int = 0
    picoseconds: int = 0


@dataclass(frozen=True, slots=True)
class Prediction:
    """A predicted step.

    ops     (pp_rank, name) -> what is predicted, in the order of the step
    parts   name -> the part of the waterfall to which it belongs; also of names whose events take no time
    slowest the pipeline coordinate that ends last: its rank has the parts of `totals`
    rows    the waterfall from ideal to predicted
    """

    run: RunSpec
    prices: Estimator
    timed: Timed
    span: StepSpan
    events: list[Event]
    ops: Mapping[tuple[int, str], PredictedOp]
    parts: Mapping[str, str]
    totals: Mapping[str, int]
    rows: list[StepChange]
    slowest: int
    flops: Work = field(repr=False)
    moved: Work = field(repr=False)

    @property
    def step(self) -> int:
        """Picoseconds of the predicted step."""
        return sum(self.totals.values())

    @property
    def ideal(self) -> int:
        """Picoseconds of the ideal step."""
        return next((row.picoseconds for row in self.rows if row.name == "ideal"), 0)


def estimator_of(run: RunSpec, cluster: Cluster) -> Estimator:
    """The estimator of a run on a cluster with a device for each of its ranks."""
    world = run.layout.world
    if cluster.gpus < world:
        cluster = replace(cluster, gpus=world, gpus_per_node=max(cluster.gpus_per_node, min(world, 8)))
    return Estimator.of_run(run, cluster)


def ask_of_run(run: RunSpec, cluster: Cluster) -> Ask:
    """A run as a question to the planner."""
    return Ask(
        model=run.model, cluster=cluster, sequence_length=run.sequence_length,
        global_batch_size=run.layout.global_batch_size, precision=run.precision.policy, optimizer=run.optimizer.kind,
    )  # fmt: skip


def predict(run: RunSpec, cluster: Cluster) -> Prediction:
    """Predict a run's step. Raises BadInput where the cluster has no device or no such products."""
    prices, layout = estimator_of(run, cluster), run.layout
    timed = Timed(estimate := prices.estimate(layout), prices.time(estimate))
    events, ops = list[Event](), dict[tuple[int, str], PredictedOp]()
    span = emit_events(prices.steps, layout, events.append)
    for e in sorted(events, key=lambda e: (e.pp_rank, e.start, e.end)):
        if e.stream != "host":
            op = ops.setdefault((e.pp_rank, e.name), PredictedOp(e.stream))
            if op.stream == "compute" != e.stream:  # a collective under the name of its wait: its own time counts
                op.stream, op.calls, op.picoseconds = e.stream, 0, 0
            if op.stream == e.stream:
                op.calls, op.picoseconds = op.calls + 1, op.picoseconds + e.end - e.start
    return Prediction(
        run, prices, timed, span, events, ops, parts_by_name(prices), predicted_parts(timed), waterfall(prices, timed),
        prices.steps.ranks(layout).slowest, planned_work(prices.steps, layout, FlopsOnly),
        planned_work(prices.steps, layout, BytesOnly),
    )  # fmt: skip


def parts_by_name(prices: Estimator) -> dict[str, str]:
    """The part of a step to which each name belongs, as the clock that has played the step counts it."""
    found = dict(PARTS_OF_EVENTS)
    for clock in prices.steps.clocks.values():
        for ops in clock.ops:
            for op in ops:
                if op[0] in (RUN, WAIT):
                    found[op[3]] = PARTS[op[2]]
                elif op[0] in (START, CHAINED):
                    found.setdefault(str(op[-1]), PARTS[clock.owner[int(op[-4])]])
    return found


def part_of(name: str, parts: Mapping[str, str]) -> str:
    """The part of a name, also of one that only a run has; "unmatched" where none is known."""
    if name in parts:
        return parts[name]
    if name.startswith(("send ", "recv ")):
        return "pipeline"
    return "update" if name.startswith("all_reduce ") else "unmatched"


def pp_rank_of(run: RunSpec, rank: int) -> int:
    """The pipeline coordinate of a rank."""
    return Mesh(run.layout).coordinates(rank)["pp"]
