"""Where a search has its values from that cost time: bounds, memory, simulated steps.

Each depends on the question, and on which rows of its own family were priced before: what did not fit, larger ones do
not either. Bounds of other families do not change the order in one. So it does not matter who computes a value: an
answer is the same to the last bit with any number of processes (`workers.py`), and one that dies is only missed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from penteract.units import Seconds

T = TypeVar("T")
Key = tuple[Any, ...]


class Values(Protocol):
    """Values by keys that name them. `share`: whose a value is; 0: it is computed by the search that answers."""

    def computed(self, key: Key, share: int) -> Any:
        """The value, if somebody else has computed it; None if not."""
        ...

    def put(self, key: Key, value: Any) -> None:
        """Give the value to those who may need it."""
        ...

    def reached(self, bound: Seconds, last: Seconds) -> bool:
        """The search is at layouts with this bound; its k-th best takes `last`. Returns whether it is to go on."""
        ...


class ComputedHere:
    """A single process computes all values."""

    def computed(self, key: Key, share: int) -> Any:
        """None: nobody else computes."""
        return None

    def put(self, key: Key, value: Any) -> None:
        """Nobody else needs it."""

    def reached(self, bound: Seconds, last: Seconds) -> bool:
        """It always goes on."""
        return True


def value(values: Values, share: int, key: Key, compute: Callable[[], T]) -> T:
    """The value of a key: computed only if it is not known."""
    found = values.computed(key, share)
    if found is None:
        found = compute()
        values.put(key, found)
    return found
