"""What data a run was trained on, as its checkpoints remember it: content, for names and dates change with a copy.

Up to `WHOLE` bytes of token ids are digested whole. Of more, blocks in even distances are, and the length: then a file
that was replaced or tokenised otherwise is found, but not every changed byte.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penteract.engine.data.joined_arrays import JoinedArrays
from penteract.engine.data.tokenizer import Ids
from penteract.errors import BadInput
from penteract.units import MIB

WHOLE = 256 * MIB  # digested at most
BLOCK = 2**14  # ids
_WIDTH = 4  # bytes of an id in the digest

Fingerprint = Mapping[str, Any]  # as JSON


def of_tokens(arrays: Sequence[Ids]) -> Fingerprint:
    """The fingerprint of a stream of ids that is known as a whole. The dtype in which ids are stored is no part of
    it, nor is how they are divided among files."""
    joined = JoinedArrays(arrays)
    count = len(joined)
    every = max(1, -(-count * _WIDTH // WHOLE))  # of so many blocks, one is digested
    found = hashlib.blake2b(str(count).encode(), digest_size=16)
    for first in range(0, count, BLOCK * every):
        for part in joined.parts(first, min(first + BLOCK, count)):
            found.update(np.asarray(part).astype("<u4").tobytes())
    return {"tokens": count, "digest": found.hexdigest()}


def compare(then: Fingerprint, now: Fingerprint) -> None:
    """Raise BadInput unless the data is the same."""
    if dict(then) != dict(now):
        raise BadInput("DATA", "the data is not what the run was trained on", where="data.source", found=_show(now),
                       allowed=_show(then), fix="the same data, or --data.allow_change true")  # fmt: skip


def _show(one: Fingerprint) -> str:
    return " ".join(f"{name} {value}" for name, value in one.items())
