"""How often ranks beat, and the limits that count beats. The store of all ranks is one process on one host: beyond some
hundred ranks each beats less often, so that together they ask no more of it."""

from __future__ import annotations

from dataclasses import dataclass

BEAT_S = 0.5
REQUESTS = 3  # of a beat: the rank's own row, that of the rank which it watches, and the abort key
MOST = 3000.0  # requests a second of all ranks
_TIMEOUT_S, _TIMEOUT_BEATS = 30.0, 8
_BLAME_S, _BLAME_BEATS = 3.0, 3


@dataclass(frozen=True, slots=True)
class Pace:
    """`beat`: seconds from one beat of a rank to the next. `timeout`: seconds without one after which it counts as
    lost."""

    beat: float = BEAT_S
    timeout: float = _TIMEOUT_S

    @staticmethod
    def of(world: int) -> Pace:
        """The pace of so many ranks."""
        beat = max(BEAT_S, world * REQUESTS / MOST)
        return Pace(beat, max(_TIMEOUT_S, _TIMEOUT_BEATS * beat))

    @property
    def blame(self) -> float:
        """Seconds in which every rank that lives beats, also where its store is busy."""
        return max(_BLAME_S, _BLAME_BEATS * self.beat)

    @property
    def look(self) -> float:
        """Seconds between two readings of all records."""
        return max(1.0, self.beat)

    @property
    def late(self) -> float:
        """Seconds by which two readings may be closer than the silence that they look for: each comes with a beat."""
        return max(1.0, 2 * self.beat)

    @property
    def shortest(self) -> float:
        """Seconds without beats that are a silence at all: `late` less is two beats."""
        return max(2.0, 4 * self.beat)
