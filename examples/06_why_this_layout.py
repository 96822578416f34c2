"""Which layout is fastest, and why not another? The planner asked from Python. No torch.

Legal layouts are priced; those that fit are simulated from the lowest bound of their time up, until none that is left
can win. So the answer is the best of all of them, and each number in it can be traced to a line of the network.

    python examples/06_why_this_layout.py
"""

from __future__ import annotations

import sys
from math import fsum

from penteract import plan
from penteract.planner.report.explain import contest, difference, explain
from penteract.readings.explain.why import why
from penteract.units import gib

PINNED = "tp=8"  # what many would try first on a node of eight


def main() -> None:
    found = plan("llama-3.1-8b", "8xH100", sequence_length=8192, batch="512Ki", top=3)
    counts, ask = found.counts, found.ask
    print(f"{ask.model.name} on {ask.cluster.name}, {ask.tokens:,} tokens a step")
    print(f"{counts.enumerated:,} layouts, {counts.fit:,} fit, {counts.simulated} had to be simulated")
    for timed in found.layouts:
        held = gib(timed.estimate.allocated)
        print(f"  {ask.text(timed.layout):50} {held:6.2f} GiB  {timed.time.seconds:6.3f} s a step")

    print("\nwhy the first of them:")
    for line in explain(found, found.best).lines():
        print(f"  {line}")

    two = contest(found, found.best)
    assert two is not None
    best, rival = two
    print(f"\nwhere {ask.text(rival.layout)} loses and gains, in seconds:")
    for part, seconds in difference(best, rival):
        print(f"  {part:10} {seconds:+.3f}")

    tried = plan("llama-3.1-8b", "8xH100", sequence_length=8192, batch="512Ki", layout=PINNED).best
    print(f"\n{PINNED} instead takes {tried.time.seconds / best.time.seconds:.2f} times as long; ", end="")
    print(f"it waits {tried.time.parts['tensor']:.2f} s for tensor ranks")

    rows = why(ask.model, best.layout, ask.sequence_length, ask.precision)
    print("\nthe most that a rank of the best keeps of its micro-batches, and the line that makes it:")
    for row in sorted((r for r in rows.rows if r.kind == "kept"), key=lambda r: -r.value)[:4]:
        print(f"  {gib(row.value):5.2f} GiB  {row.what:30} {row.count:2} × {row.flight} × {row.formula:21} {row.line}")

    times = [timed.time.seconds for timed in found.layouts]
    assert counts.enumerated == counts.fit + sum(counts.refused.values()), "every layout is accounted for"
    assert counts.simulated < counts.enumerated / 100, "bounds spare most simulations"
    assert all(timed.estimate.at_least <= timed.time.seconds for timed in found.layouts), "a bound is one"
    assert all(timed.estimate.allocated <= ask.usable for timed in found.layouts), "what is listed fits"
    assert times[0] <= min(times[1:]) * 1.001 and times[0] <= tried.time.seconds, "equal to four digits, or the fastest"
    assert abs(fsum(best.time.parts.values()) - best.time.seconds) < 1e-9, "the parts of a step are the step"
    assert rows.total("parameters") == best.estimate.memory["parameters"], "formulas sum to the price"
    assert "torch" not in sys.modules


if __name__ == "__main__":
    main()
