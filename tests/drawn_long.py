"""10,000 drawn inputs: each is done or refused at once, in lines, and leaves nothing behind. Run by `make test-all`,
which leaves the result in benchmarks/results/drawn_10000.json.

    python tests/drawn_long.py [N]             draw N instead, and write nothing
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, given, seed, settings

from asked_long import commit
from cli.attempts import Ended, no_ranks
from cli.drawn import INPUTS, Input
from cli.test_drawn import try_in

EXAMPLES, SEED = 10_000, 7
RESULT = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / f"drawn_{EXAMPLES}.json"


def main() -> int:
    examples = int(sys.argv[1]) if len(sys.argv) > 1 else EXAMPLES
    began, here, codes, verbs = time.process_time(), Path.cwd(), Counter[int](), Counter[str]()
    slowest, failure = 0.0, ""

    def note(ended: Ended) -> None:
        nonlocal slowest
        codes[ended.code] += 1
        verbs[next((word for word in ended.words if word in ("train", "plan", "convert", "checkpoints")), "other")] += 1
        slowest = max(slowest, ended.seconds)

    with tempfile.TemporaryDirectory() as folder, no_ranks():

        @seed(SEED)
        @settings(max_examples=examples, database=None, deadline=None, suppress_health_check=list(HealthCheck))
        @given(drawn=INPUTS)
        def each(drawn: Input) -> None:
            ended = try_in(Path(folder), drawn)
            note(ended)
            ended.check()

        try:
            each()
        except AssertionError as e:
            failure = str(e)
        os.chdir(here)
    record = {
        "command": "python tests/drawn_long.py", "commit": commit(), "date": time.strftime("%Y-%m-%d"), "seed": SEED,
        "inputs": codes.total(), "exit_codes": dict(sorted(codes.items())), "verbs": dict(verbs.most_common()),
        "slowest_seconds": round(slowest, 2), "cpu_seconds": round(time.process_time() - began, 1),
        "failures": [failure] * bool(failure),
    }  # fmt: skip
    if examples == EXAMPLES:
        RESULT.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))
    return bool(failure)


if __name__ == "__main__":
    sys.exit(main())
