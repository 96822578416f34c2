"""Time against size, interpolated between measured points."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from math import fsum, inf

from penteract.units import Seconds

_FAR = 1e18  # the last point of an `at_best` curve: beyond it, the rate no longer grows


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds as a function of size, never falling. Linear between points, and extrapolated beyond them along the
    outermost segments: a time of latency + size / rate is reproduced exactly, wherever the points are."""

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    @staticmethod
    def of(points: Iterable[tuple[float, float]]) -> Curve:
        """A curve through (size, seconds). Points of one size are averaged. A point that took longer than a larger
        size was disturbed: it gets the larger one's time. A single point gives a rate without latency."""
        by_size: defaultdict[float, list[float]] = defaultdict(list)
        for size, seconds in points:
            by_size[size].append(seconds)
        if len(by_size) == 1:
            by_size[0.0] = [0.0]
        sizes = sorted(by_size)
        seconds = [fsum(by_size[s]) / len(by_size[s]) for s in sizes]
        for i in reversed(range(len(seconds) - 1)):
            seconds[i] = min(seconds[i], seconds[i + 1])
        return Curve(tuple(sizes), tuple(seconds))

    @property
    def floor(self) -> Seconds:
        """Seconds of size 0: the latency."""
        return max(0.0, self(0))

    def stretched(self, slower: float) -> Curve:
        """The part above the floor takes `slower` times as long."""
        floor = self.floor
        return Curve(self.sizes, tuple(floor + (s - floor) * slower for s in self.seconds))

    def at_best(self) -> Curve:
        """A lower bound of the curve whose seconds per size never rise: each size has the best rate of all up to it."""
        sizes, best, seconds = sorted({1.0, *(s for s in self.sizes if s > 1), _FAR}), inf, list[Seconds]()
        for size in sizes:
            best = min(best, max(0.0, self(size)) / size)
            seconds.append(best * size)
        return Curve(tuple(sizes), tuple(seconds))

    def __call__(self, size: float) -> Seconds:
        """Seconds of a size: linear between the points, and on along the last segment beyond them."""
        sizes, seconds = self.sizes, self.seconds
        i = bisect_left(sizes, size, 1, len(sizes) - 1)
        x, y = sizes[i - 1], seconds[i - 1]
        return y + (seconds[i] - y) * (size - x) / (sizes[i] - x)
