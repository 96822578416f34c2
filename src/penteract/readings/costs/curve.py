"""Time against size, as it was measured: straight between the points."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from math import fsum, inf

from penteract.units import Seconds

_FAR = 1e18  # where a curve at its best ends; beyond, its rate no longer grows


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of a size, never falling. Straight between points, and beyond them as the outermost pieces go on: what
    takes latency + size / rate is met exactly, wherever the points lie."""

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    @staticmethod
    def of(points: Iterable[tuple[float, float]]) -> Curve:
        """Points of one size are averaged. One that took longer than a larger one was disturbed: it gets the larger's
        time. A single point means a rate without latency."""
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
        """What the smallest takes."""
        return max(0.0, self(0))

    def stretched(self, slower: float) -> Curve:
        """What lies above the floor takes `slower` times as long."""
        floor = self.floor
        return Curve(self.sizes, tuple(floor + (s - floor) * slower for s in self.seconds))

    def at_best(self) -> Curve:
        """No more anywhere, and seconds over size never rise: each size at the best rate of any up to it."""
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
