"""What a lane of the page tells apart: kinds of the time of a rank, by the names that the simulated clock gives."""

from __future__ import annotations

from typing import NamedTuple

from penteract.readings.time.timelines.timeline import Event
from penteract.readings.time.timelines.trace import kind, other_stream
from penteract.step import names


class TimeKind(NamedTuple):
    """A kind of time. `other_stream`: of what runs on another stream than compute."""

    name: str
    label: str
    about: str
    other_stream: bool = False


KINDS = (
    TimeKind("forward", "Forward", "Calls of forward passes."),
    TimeKind("input_gradient", "Input gradients",
         "Calls of backward that give the gradients of activations, which the stage before waits for; with what is "
         "computed again."),
    TimeKind("weight_gradient", "Weight gradients",
         "Calls of backward that give the gradients of parameters. A schedule may put them off."),
    TimeKind("update", "Gradients and update",
         "Gradients are added up and measured, and the optimizer updates its part of the parameters."),
    TimeKind("exposed", "Exposed communication",
         "Compute waits for a collective of its own step, or for a copy: communication that nothing hides."),
    TimeKind("idle", "Bubble", "Nothing to compute: the rank waits for others of the pipeline, or of its groups."),
    TimeKind("launch", "Launches", "Compute waits for the host, which launches calls one after another."),
    TimeKind("message", "Sends and receives", "Activations go to the next stage, and gradients back.",
         other_stream=True),
    TimeKind("gather", "Gathers", "All-gathers: of parameters that ZeRO shards, and of activations.",
         other_stream=True),
    TimeKind("collective", "Other collectives", "Reductions of gradients and of activations, and exchanges of tokens.",
         other_stream=True),
    TimeKind("copy", "Copies", "Between the device and the host's memory.", other_stream=True),
)  # fmt: skip
NUMBER = {one.name: i for i, one in enumerate(KINDS)}
IDLE, LAUNCH = NUMBER["idle"], NUMBER["launch"]
_IDLE = frozenset((names.WAIT_STAGE, names.WAIT_SENT, names.WAIT_RANKS))


def of_compute(e: Event) -> int:
    """The kind of an event of the compute stream."""
    what = kind(e)
    if what == "bucket":
        return NUMBER["update"]
    return NUMBER[what] if what in NUMBER else IDLE if e.name in _IDLE else NUMBER["exposed"]


def of_other_stream(e: Event) -> int | None:
    """The kind of an event of another stream than compute; None for the host's launches, and for waits."""
    what = other_stream(e)
    return NUMBER[what] if what else None
