"""penteract: plan, train and measure large language models in five dimensions of parallelism.

A name is imported when it is first asked for: a command or a rank needs few of them, and the planner takes longest.
"""

import gc
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penteract._version import __version__

_COMMAND = "penteract" in (*(Path(name).stem for name in sys.argv[:1]), *sys.orig_argv)
if (_COMMAND and "train" in sys.argv) or "penteract.engine.runtime.worker" in sys.orig_argv:
    from penteract.engine.rank.stopping import Stopping  # before all else, which takes a while

    Stopping.of_process().__enter__()  # to the end of the process

    from penteract.engine.runtime.exits import end_before_finalising

    end_before_finalising()
if not {"penteract.engine.runtime.worker", "penteract.engine.session.ahead.compile_step"}.isdisjoint(sys.orig_argv):
    gc.disable()  # collecting takes a fifth of the time in which torch is imported; `imports_are_done` switches it on
if "penteract.engine.runtime.worker" in sys.orig_argv:
    from penteract.engine.device import early_libraries, late_torch

    late_torch.leave_out()
    early_libraries.begin()

if TYPE_CHECKING:
    from penteract.api import bench, calibrate, plan, profile, rehearse, train
    from penteract.config.hardware import Cluster
    from penteract.config.layout import Layout
    from penteract.config.model import ModelSpec, MoESpec
    from penteract.planner.report.trace import trace
    from penteract.readings.estimate import Estimate, estimate

__all__ = [
    "Cluster",
    "Estimate",
    "Layout",
    "MoESpec",
    "ModelSpec",
    "__version__",
    "bench",
    "calibrate",
    "estimate",
    "plan",
    "profile",
    "rehearse",
    "trace",
    "train",
]

# Where each name is. None of them may be a module of this package: importing it would hide what is exported.
_EXPORTS = {
    "Cluster": "config.hardware",
    "Estimate": "readings.estimate",
    "Layout": "config.layout",
    "MoESpec": "config.model",
    "ModelSpec": "config.model",
    "bench": "api",
    "calibrate": "api",
    "estimate": "readings.estimate",
    "plan": "api",
    "profile": "api",
    "rehearse": "api",
    "trace": "planner.report.trace",
    "train": "api",
}
_MODULES = ("errors", "units")  # `except penteract.errors.BadInput` needs no import of its own


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    value = getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    globals()[name] = value  # from now on it is found as any other
    return value


def __dir__() -> list[str]:
    """What is exported, and what each module has; not what this one imports."""
    return sorted({*__all__, *_MODULES, *(name for name in globals() if name.startswith("__"))})
