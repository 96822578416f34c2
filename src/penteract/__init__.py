"""penteract: plan, train and measure large language models in five dimensions of parallelism."""

from penteract._version import __version__
from penteract.api import plan, trace, train
from penteract.estimate.estimate import Estimate, estimate
from penteract.spec.hardware import Cluster
from penteract.spec.layout import Layout
from penteract.spec.model import ModelSpec, MoESpec

__all__ = ["Cluster", "Estimate", "Layout", "MoESpec", "ModelSpec", "__version__", "estimate", "plan", "trace", "train"]
