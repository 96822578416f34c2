"""The process group that a launcher such as torchrun has set up around this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penteract.errors import BadInput


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """This process's place: `rank` of `world`, `local_rank` on its host."""

    rank: int
    world: int
    local_rank: int


def launched(environment: Mapping[str, str]) -> Launch | None:
    """The launcher's RANK, WORLD_SIZE and LOCAL_RANK; None unless it set them all, and MASTER_ADDR and MASTER_PORT."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    if any(name not in environment for name in names):
        return None
    rank, world, local = (_count(environment[name], name) for name in names[:3])
    if world < 1 or rank >= world:
        raise BadInput(
            "LAUNCH", "the launcher's ranks do not fit", where="environment",
            found=f"RANK={rank} WORLD_SIZE={world}", allowed="RANK from 0 to WORLD_SIZE - 1",
        )  # fmt: skip
    return Launch(rank=rank, world=world, local_rank=local)


def _count(text: str, name: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise BadInput("LAUNCH", "not a rank or a count", where=f"environment: {name}", found=text[:40] or "nothing")
    return int(text)
