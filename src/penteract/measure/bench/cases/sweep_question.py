"""What a sweep is asked to run, as a value: a base with a grid or cases, or the first layouts of a plan."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from penteract.config.hardware import HEADROOM
from penteract.measure.schemas.sweep import Value

STEPS, WARMUP, LIMIT_S = 10, 3, 600.0
Values = tuple[Value | tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanQuestion:
    """The first `top` layouts of `penteract plan` with these options. `packages`: of kernels; by default those that are
    installed here."""

    model: str
    gpus: str
    top: int = 10
    seq: int | None = None
    batch: str = "1Mi"
    fix: str = ""
    precision: str = "bf16"
    optimizer: str = "adamw"
    headroom: float = HEADROOM
    packages: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplicitCase:
    """A case that is written out: keys of a run file, and a time limit of its own."""

    values: Mapping[str, Any]
    limit: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepQuestion:
    """A sweep as it is asked for.

    run, preset  where each run starts from, as in `penteract train`; empty: the preset tiny, or the plan
    words        keys of a run file for all cases, as `parallel.tp=2`
    grid         key -> the values that it takes, one case for each combination; `cases` beside it are added
    plan         instead of both: a plan's layouts
    gpus         a cluster, for predictions; `ranks` of each case, 0: as many as the cluster has, or the layout needs
    data         random, or run: the source of the run file
    """

    name: str
    run: str = ""
    preset: str = ""
    words: tuple[str, ...] = ()
    grid: Mapping[str, Values] = field(default_factory=dict[str, Values])
    cases: tuple[ExplicitCase, ...] = ()
    plan: PlanQuestion | None = None
    gpus: str = ""
    ranks: int = 0
    steps: int = STEPS
    warmup: int = WARMUP
    limit: float = LIMIT_S
    budget: float | None = None
    headroom: float = HEADROOM
    data: str = "random"

    @property
    def digest(self) -> str:
        """Of all that decides the cases; not of limits and budgets, which may change on the way. Files count by their
        content."""
        asked = {k: v for k, v in asdict(self).items() if k not in ("limit", "budget")}
        if self.plan is not None and not self.plan.packages:
            del asked["plan"]["packages"]  # sweeps of before it was asked go on
        for name in (self.run, self.gpus, self.plan.gpus if self.plan else ""):
            if name.endswith(".toml") and Path(name).is_file():
                asked[name] = Path(name).read_text(encoding="utf-8", errors="replace")
        return hashlib.sha256(json.dumps(asked, sort_keys=True, default=list).encode()).hexdigest()
