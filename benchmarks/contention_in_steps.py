"""What compute loses in steps while collectives run: profiles of the same passes on one rank and on several.

    penteract profile RUN.toml --gpus 1xH200 --out alone_0      # on each GPU: eight layers of Llama-3-8B
    penteract profile RUN2.toml --gpus 2xH200 --out two_0       # the same, dp = 2 and ZeRO 1
    python benchmarks/contention_in_steps.py alone_* two_* four_* --out benchmarks/results/contention_in_steps_h200.json

A rank computes the same with data parallelism as without, and its GPU reduces gradients meanwhile. What its kernels of
passes then take longer, by the seconds in which collectives are planned beside them, is what a second of a collective
costs compute. Planned seconds, not measured ones: a collective takes longer beside compute, and so it slows compute for
longer; both are in the factor.

`beside_ms` is of the whole step, as plans have one factor for passes and update. A third of it is planned beside the update,
whose kernels `computed_ms` leaves out: passes alone lose more, the update less.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]

from provenance import hexadecimal, provenance

from penteract.config.catalog import model
from penteract.config.hardware import cluster
from penteract.config.layout import Layout
from penteract.readings.estimator import Estimator
from penteract.readings.time.step import StepClock

COMPUTED = ("attention", "compute", "pointwise")
PS_MS = 1e-9


def overlapped_ms(run: dict[str, Any], layers: int) -> float:
    """Milliseconds of a step in which a collective is planned beside compute: what one unit of contention adds."""
    fields = {name: tuple(v) if isinstance(v, list) else v for name, v in run["layout"].items()}
    found = Estimator(
        replace(model(run["model"]), layers=layers), cluster(f"{run['world']}xH200"), run["sequence_length"],
        precision=run["precision"],
    )  # fmt: skip
    lost, layout = 0.1, Layout(**fields)
    clocks = [StepClock(found.composer, found.cluster, replace(found.rates, contention=1 + n)) for n in (0, lost)]
    took = [clock.seconds(layout) for clock in clocks]
    return 1e3 * (took[1] - took[0]) / lost


def row(profile: dict[str, Any]) -> dict[str, Any]:
    """What the record keeps of a profile."""
    return {
        "world": profile["run"]["world"], "step_ms": PS_MS * profile["step"]["measured"],
        "computed_ms": [PS_MS * sum(rank["parts"].get(p, 0) for p in COMPUTED) for rank in profile["ranks"]],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--commit", type=hexadecimal, default="")
    args = parser.parse_args()
    profiles = [json.loads((folder / "profile.json").read_text()) for folder in args.folders]
    by_world = defaultdict[int, list[dict[str, Any]]](list)
    for profile in profiles:
        by_world[profile["run"]["world"]].append(profile)
    alone = mean(ms for p in by_world.pop(1) for ms in row(p)["computed_ms"])
    factors = {}
    for world, some in sorted(by_world.items()):
        computed, beside = (
            mean(ms for p in some for ms in row(p)["computed_ms"]),
            overlapped_ms(some[0]["run"], args.layers),
        )
        factors[world] = {"computed_ms": computed, "beside_ms": beside, "factor": 1 + (computed - alone) / beside}
    record = provenance("python benchmarks/contention_in_steps.py", args.commit) | {
        "case": f"{args.layers} layers of {profiles[0]['run']['model']}, {profiles[0]['run']['sequence_length']} tokens a GPU",
        "device": profiles[0]["made"]["device"], "torch": profiles[0]["made"]["torch"], "alone_ms": alone,
        "factors": factors, "rows": [row(profile) for profile in profiles],
    }  # fmt: skip
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(factors, indent=1))


if __name__ == "__main__":
    main()
