"""Find state that changed by itself: a flipped bit in memory, or an update that one rank made otherwise.

Replicas of a shard have equal bytes on all their ranks, and so have parameters that an all-gather made whole. Each is
summed up as one whole number, and ranks compare the numbers. A sum of 32-bit words modulo 2^64 is exact in any order,
and any one flipped bit changes it. A shard without a replica is summed up after one update, and again before the next.

Wrong arithmetic is not found: whoever multiplies wrongly and shares the result, shares it with all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from penteract.engine.comm.comm import Comm, Ranks
from penteract.engine.state.state import Flat, TrainingState
from penteract.step.program import Program

_WORD = torch.int32


@dataclass(slots=True)
class StateCheck:
    """Checks the state of one rank.

    bad  []: 0, or NaN once state without a replica has changed between two updates
    """

    p: Program
    state: TrainingState
    comm: Comm
    bad: torch.Tensor = field(init=False)
    _left: torch.Tensor | None = None  # sums of state without a replica after the last update, if they were made

    def __post_init__(self) -> None:
        """Nothing has been found yet."""
        self.bad = torch.zeros((), device=self.state.routed.device)

    def differing(self) -> Mapping[str, Sequence[int]]:
        """The replicas that differ: the first parameter of their bucket -> the ranks that are not like most of them;
        all ranks if there is no majority. Called by all ranks between steps; waits for the device."""
        found = dict[str, Sequence[int]]()
        for ranks, sums in sorted(self._replicated().items()):
            sums = dict(sorted(sums.items()))
            own = torch.stack(list(sums.values()))
            whole = torch.empty(len(ranks) * len(own), dtype=own.dtype, device=own.device)
            self.comm.finish(self.comm.start("all_gather", ranks, own, whole, {}))
            table = whole.view(len(ranks), len(own)).tolist()
            for i, name in enumerate(sums):
                values = [row[i] for row in table]
                if odd := _odd(values):
                    found[name] = [ranks[j] for j in odd]
        return found

    def remember(self) -> None:
        """Sum up what has no replica, after an update."""
        self._left = self._unreplicated()

    def compare(self) -> torch.Tensor:
        """Before an update: `bad`, after comparing what has no replica with what `remember` saw."""
        if self._left is not None:
            changed = (self._unreplicated() != self._left).any()
            self.bad.masked_fill_(changed, torch.nan)
            self._left = None
        return self.bad

    def _replicated(self) -> dict[Ranks, dict[str, torch.Tensor]]:
        """Sums of what several ranks hold, by these ranks."""
        found = dict[Ranks, dict[str, torch.Tensor]]()
        for flat in self.state.flats:
            b, name = flat.bucket, flat.bucket.params[0].name
            if len(b.replicate_ranks) > 1:
                found.setdefault(b.replicate_ranks, {})[name] = _sum(_own(flat))
            if b.shards > 1 and flat.cut_parameter is None:
                found.setdefault(b.shard_ranks, {})[f"{name} (gathered)"] = _sum([flat.parameter])
        return found

    def _unreplicated(self) -> torch.Tensor:
        """Sums [n] of shards that only this rank holds."""
        alone = [flat for flat in self.state.flats if len(flat.bucket.replicate_ranks) == 1]
        sums = [_sum(_own(flat)).to(self.bad.device) for flat in alone]
        return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64, device=self.bad.device)


def _own(flat: Flat) -> Iterator[torch.Tensor]:
    """What an update of this shard changes."""
    yield flat.own_parameter
    yield from flat.optimizer_state.values()


def _sum(tensors: Iterator[torch.Tensor] | Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of the 32-bit words of tensors: int64 []. The last one to three bytes of a tensor count one by one."""
    total = torch.zeros((), dtype=torch.int64)
    for i, x in enumerate(tensors):
        data = x.detach().view(torch.uint8)
        words = len(data) // 4 * 4
        one = data[:words].view(_WORD).sum(dtype=torch.int64) + data[words:].sum(dtype=torch.int64)
        total = total.to(one.device) + one * (2 * i + 1)
    return total


def _odd(values: Sequence[int]) -> list[int]:
    """The places of those that differ from the majority; all places if there is none."""
    (most, n), *others = Counter(values).most_common()
    if not others:
        return []
    return [i for i, value in enumerate(values) if 2 * n <= len(values) or value != most]
