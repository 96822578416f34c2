"""Runs that are killed at random moments, and checkpoints that are damaged at random: draws by a seed.

    python tests/faults_long.py                    all that has not been drawn with these sources
    python tests/faults_long.py --seconds 600      no new draw after so long
    python tests/faults_long.py --begin 84         from the turn of kill 84 on, and then those before it
    python tests/faults_long.py --fresh            forget what was drawn

Run by `make test-faults`. Progress goes to build/faults.jsonl, a line a draw; it is resumed unless a source of the
package or of the draws has changed. Each time benchmarks/results/test_faults.json is written: what has been drawn, of
how much. Exit status 1: a draw failed.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from asked_long import commit
from drawn_lines import ROOT, digest, kept_lines
from faults.corruptions import Damage
from faults.kills import LAYOUTS, Kills
from penteract._version import __version__

PROGRESS = ROOT / "build" / "faults.jsonl"
RESULT = ROOT / "benchmarks" / "results" / "test_faults.json"
SOURCES = ("forks.py", "faults/corruptions.py", "faults/kills.py")
SEED, KILLS, CORRUPTIONS = 7, 200, 1500
TURN = 12  # kills of a turn; as many corruptions as keep both in step
Row = dict[str, Any]


def drawn(sources: str) -> dict[tuple[str, int], Row]:
    """(kind, number) -> its line, of the draws that were made with these sources."""
    return {(line["kind"], line["number"]): line for line in kept_lines(PROGRESS, sources)}


def turns(begin: int = 0) -> list[tuple[str, int]]:
    """All draws, kills and corruptions in turns, that of kill `begin` first: a part of them is a part of both."""
    out, firsts = list[tuple[str, int]](), range(0, KILLS, TURN)
    at = begin // TURN
    for first in (*firsts[at:], *firsts[:at]):
        upto = min(KILLS, first + TURN)
        out += [("corruption", n) for n in range(CORRUPTIONS * first // KILLS, CORRUPTIONS * upto // KILLS)]
        out += [("kill", n) for n in range(first, upto)]
    return out


def one(kills: Kills, damage: Callable[[], Damage], kind: str, number: int) -> Row:
    """Make one draw; its line."""
    began = time.monotonic()
    if kind == "kill":
        killed = kills.draw(number, SEED)
        found: Row = {"layout": killed.layout, "kills": killed.kills, "anew": killed.anew, "wrong": killed.wrong}
    else:
        done = damage().draw(number, SEED)
        found = {"kinds": done.kinds, "result": done.result, "wrong": done.wrong}
    return {"kind": kind, "number": number, **found, "seconds": round(time.monotonic() - began, 3)}


def run(sources: str, seconds: float, begin: int = 0) -> dict[tuple[str, int], Row]:
    """Make the draws that are left, until it has taken `seconds`; the lines of all."""
    lines, began = drawn(sources), time.monotonic()
    left = [which for which in turns(begin) if which not in lines]
    print(f"{len(turns())} draws, {len(lines)} of them made before with sources {sources}", flush=True)
    PROGRESS.parent.mkdir(exist_ok=True)
    made = list[Damage]()
    with tempfile.TemporaryDirectory() as folder, PROGRESS.open("a") as out:

        def damage() -> Damage:
            if not made:
                made.append(Damage(Path(folder) / "damaged"))
            return made[0]

        kills = Kills(Path(folder))
        for i, (kind, number) in enumerate(left, 1):
            if time.monotonic() - began > seconds:
                break
            line = one(kills, damage, kind, number)
            lines[kind, number] = line
            print(json.dumps({"sources": sources, **line}), file=out, flush=True)
            if line["wrong"] or kind == "kill":
                print(f"{i}/{len(left)}  {time.monotonic() - began:.0f} s  {json.dumps(line)}", flush=True)
    return lines


def record(lines: dict[tuple[str, int], Row], sources: str) -> Row:
    """What is committed: what has been drawn so far with these sources, of how much."""
    killed, damaged = ([line for (kind, _), line in sorted(lines.items()) if kind == k] for k in ("kill", "corruption"))
    who = Counter(what.partition(",")[0] for line in killed for what in line["kills"])
    results, kinds = Counter(line["result"] for line in damaged), Counter(k for line in damaged for k in line["kinds"])
    failed = [line for _, line in sorted(lines.items()) if line["wrong"]]
    return {
        "command": "python tests/faults_long.py", "commit": commit(), "sources": sources,
        "date": time.strftime("%Y-%m-%d", time.gmtime()), "seed": SEED,
        "versions": {"penteract": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "complete": len(killed) == KILLS and len(damaged) == CORRUPTIONS,
        "kills": {
            "drawn": len(killed), "planned": KILLS, "bitwise": sum(not line["wrong"] for line in killed),
            "victims": dict(who.most_common()), "began_anew": sum(line["anew"] for line in killed),
            "layouts": {name: sum(line["layout"] == name for line in killed) for name in LAYOUTS},
        },
        "corruptions": {
            "drawn": len(damaged), "planned": CORRUPTIONS, "silent": sum("silent" in line["wrong"] for line in damaged),
            "wrong": sum(bool(line["wrong"]) for line in damaged), "results": dict(sorted(results.items())),
            "kinds": dict(kinds.most_common()),
        },
        "seconds": round(sum(line["seconds"] for line in lines.values()), 1),
        "failures": failed,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="Kills and corruptions, drawn by a seed.")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no new draw after so long")
    parser.add_argument("--begin", type=int, default=0, metavar="KILL", help="the turn of this kill is first")
    parser.add_argument("--fresh", action="store_true", help="forget what was drawn")
    asked = parser.parse_args()
    if asked.fresh:
        PROGRESS.unlink(missing_ok=True)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    logging.getLogger("penteract").setLevel(logging.ERROR)
    sources = digest(f"{SEED}", SOURCES)
    lines = run(sources, asked.seconds, asked.begin)
    RESULT.write_text(json.dumps(record(lines, sources), indent=1) + "\n")
    failed = sum(bool(line["wrong"]) for line in lines.values())
    print(f"{len(lines)} of {len(turns())} drawn, {failed} failed")
    return min(1, failed)


if __name__ == "__main__":
    sys.exit(main())
