"""What a core has worked for each frame that a page drew: the clock also counts all else that the machine does."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

# The page clears the measure of a figure when it begins to draw it, and sets it at the end. Marks at both places are in
# the browser's trace, with the time of their thread.
MARKS = """(() => {
  const { clearMeasures, measure } = performance;
  performance.clearMeasures = (name) => {
    clearMeasures.call(performance, name);
    performance.mark(`${name} begins`);
  };
  performance.measure = (name, ...how) => {
    performance.mark(`${name} ends`);
    return measure.call(performance, name, ...how);
  };
})();"""


@contextmanager
def core_times(browser: Any, page: Any) -> Generator[dict[str, list[float]]]:
    """Milliseconds of a core for each frame, by the name of its measure; there at the end of the context. The page goes
    to its address inside."""
    page.add_init_script(MARKS)
    found, begun = defaultdict[str, list[float]](list), dict[str, float]()
    browser.start_tracing(page=page, categories=["blink.user_timing"])
    try:
        yield found
    finally:
        events = json.loads(browser.stop_tracing())["traceEvents"]
    for event in sorted((e for e in events if e.get("tts")), key=lambda e: e["ts"]):
        name, _, what = event["name"].rpartition(" ")
        if what == "begins":
            begun[name] = event["tts"]
        elif what == "ends":
            found[name].append((event["tts"] - begun.pop(name)) / 1000)
