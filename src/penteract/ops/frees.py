"""When each register is freed: after the last instruction that reads or writes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penteract.ops.tape import Call, Tape


@dataclass(frozen=True, slots=True, eq=False)
class Instruction:
    """A call, and the registers that are freed after it."""

    call: Call
    frees: tuple[int, ...]


def place_frees(
    lists: Mapping[str, Sequence[Call]], tape: Tape, exit_: int | None, entry_gradient: int | None
) -> tuple[dict[str, tuple[Instruction, ...]], frozenset[int]]:
    """Every register but the resident inputs is freed after its last use; a register that is sent, by the send."""
    last: dict[int, int] = {}  # register -> its last call, counted over all actions
    count = 0
    for calls in lists.values():
        for i, c in enumerate(calls, count):
            last |= dict.fromkeys(c.ins, i)
            last |= dict.fromkeys(c.outs, i)
        count += len(calls)
    resident = set(tape.inputs.values())
    by_send = set[int]()
    if exit_ is not None and last[exit_] < len(lists["Fwd"]):
        by_send.add(exit_)
    if entry_gradient is not None and last[entry_gradient] < count - len(lists.get("Wgt", ())):
        by_send.add(entry_gradient)
    frees: list[list[int]] = [[] for _ in range(count)]
    for r, i in last.items():
        if r not in resident and r not in by_send:
            frees[i].append(r)
    each = iter(frees)
    actions = {name: tuple([Instruction(c, tuple(next(each))) for c in calls]) for name, calls in lists.items()}
    return actions, frozenset(by_send)
