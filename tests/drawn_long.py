"""10,000 drawn inputs: each is done or refused at once, in lines, and leaves nothing behind. Run by `make test-all`,
which leaves the result in benchmarks/results/drawn_10000.json.

    python tests/drawn_long.py                 all that has not been drawn with these sources
    python tests/drawn_long.py --batches 2     at most so many batches more
    python tests/drawn_long.py --fresh         forget what was drawn

Batches of 500, each with a seed of its own, until so many inputs were distinct. A line of each goes to
build/drawn.jsonl: they are resumed unless a source of the package or of the draws has changed. A failure is noted, and
the next input is drawn, so that none hides another. Exit status 1: an input failed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from asked_long import commit
from cli.attempts import SECONDS, Ended, no_ranks
from cli.drawn import INPUTS, Input
from cli.test_drawn import bounded_memory, try_in
from drawn_lines import ROOT, digest, kept_lines

INPUTS_PLANNED, BATCH, SEED = 10_000, 500, 7
PROGRESS = ROOT / "build" / "drawn.jsonl"
RESULT = ROOT / "benchmarks" / "results" / f"drawn_{INPUTS_PLANNED}.json"
SOURCES = ("cli/attempts.py", "cli/drawn.py", "cli/test_drawn.py")
VERBS = ("train", "plan", "convert", "checkpoints")
SLOWEST = 5  # inputs whose words are kept with their seconds
Row = dict[str, Any]


def name(drawn: Input) -> str:
    """Equal for equal inputs."""
    files = sorted((path, entry.kind, entry.content) for path, entry in drawn.files.items())
    return hashlib.sha256(repr((drawn.words, files)).encode("utf-8", "backslashreplace")).hexdigest()[:16]


def one(folder: Path, batch: int) -> Row:
    """Draw a batch; its line. `folder`: an empty one."""
    ends, names, failures, began = list[Ended](), set[str](), list[str](), time.process_time()

    @seed(SEED * 1000 + batch)
    @settings(max_examples=BATCH, database=None, deadline=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(drawn=INPUTS)
    def each(drawn: Input) -> None:
        ended = try_in(folder, drawn)
        ends.append(ended)
        names.add(name(drawn))
        try:
            ended.check()
        except AssertionError as e:
            failures.append(f"{e} of {drawn}"[:2000])

    each()
    slow = sorted(ends, key=lambda ended: -ended.seconds)[:SLOWEST]
    return {
        "batch": batch, "codes": Counter(str(ended.code) for ended in ends),
        "verbs": Counter(next((word for word in ended.words if word in VERBS), "other") for ended in ends),
        "slowest": [[round(ended.seconds, 2), " ".join(ended.words)[:200]] for ended in slow],
        "cpu_seconds": round(time.process_time() - began, 1), "failures": failures, "names": sorted(names),
    }  # fmt: skip


def distinct(lines: Mapping[int, Row]) -> int:
    """How many inputs of these batches differ from all others."""
    return len(set[str]().union(*(line["names"] for line in lines.values())))


def run(sources: str, most: int) -> dict[int, Row]:
    """Draw what is left, at most so many batches; the lines of all."""
    lines, here = {line["batch"]: line for line in kept_lines(PROGRESS, sources)}, Path.cwd()
    print(f"{len(lines)} batches were drawn before with sources {sources}", flush=True)
    PROGRESS.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, PROGRESS.open("a") as out, no_ranks(), bounded_memory():
        while distinct(lines) < INPUTS_PLANNED and most > 0:
            batch, most = len(lines), most - 1
            line = lines[batch] = one(Path(folder), batch)
            print(json.dumps({"sources": sources, **line}), file=out, flush=True)
            print(f"batch {batch}, {distinct(lines)} distinct: {line['cpu_seconds']} s, slowest {line['slowest'][0]}",
                  *line["failures"], sep="\n  ", flush=True)  # fmt: skip
        os.chdir(here)
    return lines


def record(lines: Mapping[int, Row], sources: str) -> Row:
    """What is committed: what has been drawn with these sources, of how much."""
    codes, verbs = Counter[str](), Counter[str]()
    for line in lines.values():
        codes.update(line["codes"])
        verbs.update(line["verbs"])
    slow = sorted((each for line in lines.values() for each in line["slowest"]), reverse=True)
    return {
        "command": "python tests/drawn_long.py", "commit": commit(), "sources": sources,
        "date": time.strftime("%Y-%m-%d", time.gmtime()), "seed": SEED, "planned": INPUTS_PLANNED,
        "distinct": distinct(lines), "inputs": codes.total(), "exit_codes": dict(sorted(codes.items())),
        "verbs": dict(verbs.most_common()), "allowed_cpu_seconds": SECONDS, "slowest_cpu_seconds": slow[:SLOWEST],
        "cpu_seconds": round(sum(line["cpu_seconds"] for line in lines.values()), 1),
        "failures": [failure for _, line in sorted(lines.items()) for failure in line["failures"]],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="Inputs of every kind, drawn by a seed.")
    parser.add_argument("--batches", type=int, default=sys.maxsize, help="draw at most so many more")
    parser.add_argument("--fresh", action="store_true", help="forget what was drawn")
    asked = parser.parse_args()
    if asked.fresh:
        PROGRESS.unlink(missing_ok=True)
    sources = digest(f"{SEED} {BATCH}", SOURCES)
    lines = run(sources, asked.batches)
    RESULT.write_text(json.dumps(record(lines, sources), indent=1) + "\n")
    failed = sum(len(line["failures"]) for line in lines.values())
    print(f"{distinct(lines)} of {INPUTS_PLANNED} distinct inputs drawn, {failed} failed")
    return min(1, failed)


if __name__ == "__main__":
    sys.exit(main())
