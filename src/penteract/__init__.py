"""penteract: plan, train and measure large language models in five dimensions of parallelism."""

import sys
from pathlib import Path

from penteract._version import __version__

_COMMAND = "penteract" in (*(Path(name).stem for name in sys.argv[:1]), *sys.orig_argv)
if (_COMMAND and "train" in sys.argv) or "penteract.engine.runtime.worker" in sys.orig_argv:
    from penteract.engine.rank.stopping import Stopping  # before all else, which takes a while

    Stopping.of_process().__enter__()  # to the end of the process
try:
    from penteract.api import bench, calibrate, plan, profile, rehearse, trace, train
    from penteract.config.hardware import Cluster
    from penteract.config.layout import Layout
    from penteract.config.model import ModelSpec, MoESpec
    from penteract.readings.estimate import Estimate, estimate
except KeyboardInterrupt:
    if Path(sys.argv[0]).stem in ("-m", "penteract"):  # a command, stopped before there is anything that could answer
        sys.exit(130)
    raise

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
