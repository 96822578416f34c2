"""penteract: plan, train and measure large language models in five dimensions of parallelism."""

import sys
from pathlib import Path

from penteract._version import __version__

try:
    from penteract.api import plan, trace, train
    from penteract.estimate.estimate import Estimate, estimate
    from penteract.spec.hardware import Cluster
    from penteract.spec.layout import Layout
    from penteract.spec.model import ModelSpec, MoESpec
except KeyboardInterrupt:
    if Path(sys.argv[0]).stem in ("-m", "penteract"):  # a command, stopped before there is anything that could answer
        sys.exit(130)
    raise

__all__ = ["Cluster", "Estimate", "Layout", "MoESpec", "ModelSpec", "__version__", "estimate", "plan", "trace", "train"]
