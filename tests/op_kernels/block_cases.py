"""What ops on blocks of rows are tried on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

import torch

from op_kernels.case import Case, In, behind, given, order, x

ROUTED: Mapping[str, tuple[list[int], int, int]] = {  # copies of each expert, ranks, room of a block
    "uneven": ([3, 1, 0, 2, 1, 5], 3, 7),
    "an expert without rows": ([2, 0, 4, 6], 2, 11),
    "a rank without rows": ([5, 3, 0, 0, 1, 3], 3, 9),
    "first and last rank without rows": ([0, 0, 4, 8, 0, 0], 3, 13),
    "full blocks": ([1, 5, 6, 0], 2, 6),
    "one expert a rank": ([4, 0, 8], 3, 8),
}
OVERFLOWS: Mapping[str, tuple[list[int], int, int]] = {
    "one too many": ([2, 4, 6, 0], 2, 5),
    "the last experts lose all": ([3, 2, 4, 2, 1, 0], 2, 4),
    "all to one": ([0, 0, 12, 0], 2, 5),
}


def placed(copies: list[int], ranks: int, block: int) -> list[int]:
    """Rows in the blocks of copies that fit, in an order of the copies of their own."""
    own = len(copies) // ranks
    each = [sum(copies[r * own : (r + 1) * own]) for r in range(ranks)]
    rows = [r * block + i for r, n in enumerate(each) for i in range(n)]
    return [rows[i] for i in torch.randperm(len(rows), generator=torch.Generator().manual_seed(block)).tolist()]


def there(rows: list[int], of: int, width: int) -> In:
    """[of, width], of which only these rows are there."""
    filled = behind(0, of, width).value
    filled[rows] = torch.randn(len(rows), width, generator=torch.Generator().manual_seed(of), dtype=torch.float64)
    return In("compute", (of, width), filled)


def blocks() -> Iterator[Case]:
    """12 copies of 6 tokens, or of 12, or of 4."""
    for what, (copies, ranks, block) in {**ROUTED, **OVERFLOWS}.items():
        about = {"ranks": ranks, "block": block}
        yield Case("block_places", what, (order(sum(copies)), given(copies)), (), about)
    for (what, (copies, ranks, block)), k in product(ROUTED.items(), (2, 1, 3)):
        yield from moved(f"{what}, top {k}", copies, k, ranks, block, 5)
    for what, (coming, ranks, block) in {
        "two senders": ([2, 0, 1, 1, 0, 3], 2, 7),
        "a sender of nothing": ([2, 0, 1, 0, 0, 0, 0, 4, 0], 3, 6),
        "the last sends nothing": ([0, 3, 0, 0], 2, 5),
        "full blocks": ([1, 3, 4, 0, 2, 2], 3, 4),
        "nothing at all": ([0] * 4, 2, 3),
    }.items():
        yield from by_expert(what, coming, ranks, block, 3)


def moved(what: str, copies: list[int], k: int, ranks: int, block: int, width: int) -> Iterator[Case]:
    """Copies to blocks and back."""
    rows, tokens = placed(copies, ranks, block), sum(copies) // k
    about, places, room = {"top_k": k, "ranks": ranks, "block": block}, given(rows), ranks * block
    yield Case("block_permute", what, (x(tokens // 2, 2, width), places), (), about)
    y = there(rows, room, width)
    yield Case("block_unpermute", what, (y, x(tokens // 2, 2, k), places), (), {"top_k": k})


def by_expert(what: str, coming: list[int], ranks: int, block: int, width: int) -> Iterator[Case]:
    """Blocks to rows by expert and back."""
    own, room = len(coming) // ranks, ranks * block
    each = [sum(coming[r * own : (r + 1) * own]) for r in range(ranks)]
    sent = there([r * block + i for r, n in enumerate(each) for i in range(n)], room, width)
    about = {"ranks": ranks, "block": block, "rows": room}
    yield Case("sort_blocks", f"{what}, by expert", (sent, given(coming)), (), about | {"inverse": False})
    sorted_ = behind(sum(coming), room, width)
    yield Case("sort_blocks", f"{what}, by sender", (sorted_, given(coming)), (), about | {"inverse": True})
