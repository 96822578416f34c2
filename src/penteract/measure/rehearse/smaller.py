"""What would fit where a run does not: the planner's changes of one decision, as options of a command line."""

from __future__ import annotations

from penteract.config.hardware import Cluster
from penteract.config.run import RunSpec
from penteract.errors import BadInput
from penteract.measure.profile.prediction import ask_of_run
from penteract.planner.ask import as_settings
from penteract.planner.plan import estimator, plan_one
from penteract.planner.report.smaller_layouts import smaller
from penteract.units import Bytes, show_bytes

MOST = 3  # that are shown


def smaller_runs(spec: RunSpec, cluster: Cluster, usable: Bytes) -> tuple[str, ...]:
    """The fastest changes that fit, each with its bytes and its step beside the present one; none where the run cannot
    be planned."""
    settings = {setting: (value,) for setting, value in as_settings(spec.layout).items()}
    try:
        found = smaller(plan_one(ask_of_run(spec, cluster), settings, estimator), usable)
    except BadInput:
        return ()
    return tuple(
        f"{one.keys} ({show_bytes(one.allocated)}, {1 + one.price:.2f} times the step)" for one in found[:MOST]
    )
