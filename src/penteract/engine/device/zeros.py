"""Numbers that are zero when a call asks for one, cleared many at once: a launch to clear each would cost more."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from penteract.errors import Bug
from penteract.ops.declarations.declaration import FLOAT
from penteract.ops.declarations.quantised.fp8 import ONE_SCALE


@dataclass(slots=True)
class Zeros:
    """`count` numbers [1] in fp32, used in turn. A call is done with its number before the next is asked for: when all
    have been used, all are cleared and the first is next. So more micro-batches need no more numbers, and as steps are
    alike, each gets the same memory in the same order.

    table    [count, ONE_SCALE / FLOAT]; a number is the first of its row, so its address is a multiple of 16 bytes
    numbers  these, as views
    pairs    each with the number behind it in its row, as views [2]
    used     of them, since all were cleared
    """

    count: int
    device: torch.device
    table: torch.Tensor = field(init=False)
    numbers: list[torch.Tensor] = field(init=False)
    pairs: list[torch.Tensor] = field(init=False)
    used: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """Make the table."""
        self.table = torch.zeros(self.count, ONE_SCALE // FLOAT, dtype=torch.float32, device=self.device)
        self.numbers = [row[:1] for row in self.table]
        self.pairs = [row[:2] for row in self.table]

    def begin(self) -> None:
        """All are zero again, and none is used."""
        if self.count:
            self.table.zero_()
        self.used = 0

    def next(self) -> torch.Tensor:
        """A zero [1], until the next is asked for. Raises Bug if there are none."""
        if self.used == self.count:
            if not self.count:
                raise Bug("ZEROS", "a call asks for a number, and its rank has none")
            self.begin()
        self.used += 1
        return self.numbers[self.used - 1]

    def pair(self) -> torch.Tensor:
        """Two zeros [2] in its place: its row has room for them."""
        self.next()
        return self.pairs[self.used - 1]
