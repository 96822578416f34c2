"""Profiles for tests: one that the product made of two ranks on a CPU, and large ones that are drawn from it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from random import Random
from typing import Any

from penteract.measure.schemas.profile_parts import LABELS

Json = dict[str, Any]
MADE = Path(__file__).parents[1] / "measure" / "profiles"
TWO_RANKS = MADE / "tiny_tp2.json"  # `penteract profile --preset tiny parallel.tp=2 model.layers=1 …` on a CPU
BEFORE = MADE / "tiny_tp2_pp2.json"  # of an earlier version: without a timeline, and without the plan's owners


def made(file: Path = TWO_RANKS) -> Json:
    return json.loads(file.read_text(encoding="utf-8"))


def written(folder: Path, profile: Json | str) -> Path:
    """A folder of a profile."""
    folder.mkdir(parents=True)
    text = profile if isinstance(profile, str) else json.dumps(profile)
    (folder / "profile.json").write_text(text, encoding="utf-8")
    return folder


def drawn(seed: int, ranks: int = 64, spans: int = 3000, ops: int = 300) -> Json:
    """A profile of many ranks over two pipeline ranks, with many ops and long timelines."""
    random, found = Random(seed), made()
    parts = list(LABELS)
    names = [{"name": f"forward op{i} (model/file_{i % 7}.py:{i})", "part": parts[i % len(parts)]} for i in range(ops)]
    row = found["ops"][0]
    found["ops"] = [
        {**row, "pp_rank": pp_rank, "rank": pp_rank * ranks // 2, "stream": "compute", "name": one["name"],
         "part": one["part"], "matched": random.choice(["both", "both", "both", "predicted", "measured"]),
         "calls": random.randint(1, 64), "predicted": random.randint(0, 10**9), "measured": random.randint(1, 10**9),
         "kernels": [{"name": "kernel_" + "x" * 200 + f"_{k}", "calls": 8, "picoseconds": random.randint(1, 10**8)}
                     for k in range(8)]}
        for pp_rank in (0, 1) for one in names
    ]  # fmt: skip

    def lane(pp_rank: int, rank: int | None) -> Json:
        compute = [n for _ in range(spans) for n in (random.randrange(ops), random.randint(1, 10**9))]
        starts = sorted(random.randrange(spans * 10**8) for _ in range(spans // 10))
        streams = [{"kind": kind, "spans": [n for s in starts for n in (random.randrange(ops), s, 10**7)]}
                   for kind in ("message", "gather", "collective")]  # fmt: skip
        return {
            "pp_rank": pp_rank,
            "rank": rank,
            "picoseconds": sum(compute[1::2]),
            "compute": compute,
            "streams": streams,
        }

    found["timeline"] = {"names": names, "predicted": [lane(0, None), lane(1, None)],
                         "measured": [lane(2 * rank // ranks, rank) for rank in range(ranks)]}  # fmt: skip
    rank_row, memory = found["ranks"][0], found["memory"][0]
    found["ranks"] = [
        {**rank_row, "rank": rank, "pp_rank": 2 * rank // ranks, "work": rank_row["work"] + random.randint(0, 10**9)}
        for rank in range(ranks)
    ]
    found["memory"] = [{**copy.deepcopy(memory), "rank": rank, "pp_rank": 2 * rank // ranks} for rank in range(ranks)]
    found["run"]["world"] = ranks
    return found
