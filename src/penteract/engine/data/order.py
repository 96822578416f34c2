"""The order of windows: a permutation that is computed, not stored.

A Feistel network permutes the numbers of 2b bits whatever its round function (Luby and Rackoff 1988); walking its
cycles until the result is below n permutes [0, n) (Black and Rogaway 2002, "Ciphers with arbitrary finite domains").
So the n-th sample of any epoch is found in a few microseconds, and resuming needs the seed and one integer.
"""

from __future__ import annotations

_ROUNDS = 6
_WORD = 2**64 - 1


def permute(index: int, n: int, seed: int, epoch: int) -> int:
    """The image of `index` under a permutation of [0, n) that depends on (n, seed, epoch) alone."""
    if not 0 <= index < n:
        raise IndexError(f"index {index} is not in [0, {n})")
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask, key = (1 << half) - 1, _mix(_mix(seed & _WORD) ^ (epoch & _WORD))
    while True:  # at most 4 turns on average: the network's domain is no more than 4n
        left, right = index >> half, index & mask
        for turn in range(_ROUNDS):
            left, right = right, left ^ (_mix((key + turn) ^ (right << 8)) & mask)
        index = (left << half) | right
        if index < n:
            return index


def _mix(x: int) -> int:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014): every input bit reaches every output bit."""
    x = (x + 0x9E3779B97F4A7C15) & _WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    return x ^ (x >> 31)
