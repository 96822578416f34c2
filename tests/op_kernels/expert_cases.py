"""What each op of the mixture of experts is tried on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from op_kernels.block_cases import blocks
from op_kernels.case import Case, behind, draw, given, order, positive, splits, x

ALL_EXPERTS: Mapping[str, Any] = {"scale": 1.0, "groups": 1, "top_groups": 1, "group_score": "max"}


def _grouped_routers() -> Iterator[Case]:
    """Many tokens and experts, so that what the choice of groups takes shows beside the products."""
    for (score, balance), normalize, group_score, (groups, top_groups), k in product(
        [("softmax", "loss"), ("sigmoid", "bias"), ("softmax", "none")], (True, False), ("max", "top2"),
        [(3, 1), (4, 4), (6, 5)], (1, 4),
    ):  # fmt: skip
        attrs = {"top_k": k, "experts": 12, "score": score, "normalize": normalize, "balance": balance,
                 "bias": "steer" if balance == "bias" else "", "scale": 2.5 if normalize else 0.5, "groups": groups,
                 "top_groups": top_groups, "group_score": group_score}  # fmt: skip
        what = f"{top_groups} of {groups} groups by {group_score}, {score}, top {k}{', normalised' * normalize}"
        yield Case("router", f"{what}, balance {balance}", (x(5, 2, 3),), ((12, 3),), attrs)


def experts() -> list[Case]:
    out: list[Case] = []
    for score in ("softmax", "sigmoid"):
        for normalize in (True, False):
            for balance in ("loss", "bias", "none"):
                attrs = {"top_k": 2, "experts": 5, "score": score, "normalize": normalize, "balance": balance,
                         "bias": "steer" if balance == "bias" else "", **ALL_EXPERTS}  # fmt: skip
                what = f"{score}{', normalised' if normalize else ''}, balance {balance}"
                out.append(Case("router", what, (x(4, 2, 3),), ((5, 3),), attrs))
        one = {"top_k": 1, "experts": 3, "score": score, "normalize": False, "balance": "none", "bias": "",
               **ALL_EXPERTS}  # fmt: skip
        out.append(Case("router", f"{score}, one sequence, top 1", (x(6, 1, 8),), ((3, 8),), one))
        out.append(
            Case("router", f"{score}, one token, all", (x(1, 3, 2),), ((2, 2),), one | {"top_k": 2, "experts": 2})
        )
        shares = {"sequence_length": 8, "top_k": 2, "experts": 5, "score": score}
        counts = draw(9, 2, 5)
        positive_scores = positive(4, 2, 5)
        out.append(Case("balance_loss", score, (positive_scores, counts), (), shares))
        out.append(Case("balance_loss", f"{score}, one token", (positive(1, 1, 5), draw(9, 1, 5)), (), shares))
        out.append(Case("balance_loss", f"{score}, long", (positive(40, 1, 5), draw(9, 1, 5)), (), shares))
    out += list(_grouped_routers())
    rows = splits([2, 0, 1], [1, 0, 3])  # two ranks send to three experts; nobody to the second
    chunks = given([2, 0, 1, 1, 0, 3])  # the same
    return [
        *out,
        Case(
            "expert_permutation",
            "one expert unused",
            (given([[[3, 0], [0, 3]], [[1, 3], [0, 1]]]),),
            (),
            {"experts": 5},
        ),
        Case("expert_permutation", "all to one", (given([[[2], [2], [2]]]),), (), {"experts": 3}),
        *(
            Case(
                "expert_permutation",
                f"rank {rank} of two",
                (given([[[3, 0], [0, 3]], [[1, 2], [0, 1]]]),),
                (),
                {"experts": 4, "ranks": 2},
                rank=rank,
                ep=2,
            )
            for rank in (0, 1)
        ),
        Case(
            "expert_permutation",
            "none on this rank",
            (given([[[0, 1], [1, 0]]]),),
            (),
            {"experts": 6, "ranks": 2},
            rank=1,
            ep=2,
        ),
        Case("split_sizes", "two ranks", (given([3, 0, 2, 4]), given([1, 0, 5, 2])), (), {"ranks": 2}),
        Case("split_sizes", "one rank", (given([3, 0, 2]), given([3, 0, 2])), (), {"ranks": 1}),
        Case("expert_offsets", "two ranks", (given([3, 0, 2, 4]),), (), {"ranks": 2}),
        Case("expert_offsets", "one rank", (given([3, 0, 2]),), (), {"ranks": 1}),
        Case("permute", "top 2", (x(3, 2, 4), order(12)), (), {"top_k": 2}),
        Case("permute", "top 1", (x(3, 1, 4), order(3)), (), {"top_k": 1}),
        Case("permute", "half of the copies", (x(3, 2, 4), order(12)), (), {"top_k": 2, "ranks": 2, "rows": 6}),
        Case("sort_chunks", "by expert", (x(7, 3), chunks), (), {"ranks": 2, "inverse": False}),
        Case("sort_chunks", "by sender", (x(7, 3), chunks), (), {"ranks": 2, "inverse": True}),
        Case("sort_chunks", "three ranks", (x(9, 3), given([1, 0, 2, 2, 1, 3])), (), {"ranks": 3, "inverse": False}),
        Case("sort_chunks", "no rows", (x(0, 3), given([0, 0, 0, 0])), (), {"ranks": 2, "inverse": True}),
        Case("expert_linear", "an expert without rows", (x(7, 3), rows), ((3, 4, 3),)),
        Case("expert_linear", "no rows at all", (x(0, 3), splits([0, 0])), ((2, 4, 3),)),
        Case("expert_linear", "one expert", (x(5, 6), splits([5])), ((1, 2, 6),)),
        Case("expert_pair", "an expert without rows", (x(7, 3), rows), ((3, 4, 3), (3, 4, 3))),
        Case("expert_pair", "no rows at all", (x(0, 3), splits([0, 0])), ((2, 4, 3), (2, 4, 3))),
        Case("unpermute", "top 2", (x(12, 4), x(3, 2, 2), order(12)), (), {"top_k": 2}),
        Case("unpermute", "top 1, narrow", (x(5, 1), x(5, 1, 1), order(5)), (), {"top_k": 1}),
        Case("unpermute", "half of the copies", (x(6, 4), x(3, 2, 2), order(12)), (), {"top_k": 2, "ranks": 2}),
        Case("unpermute", "no copies", (x(0, 4), x(3, 2, 2), order(12)), (), {"top_k": 2, "ranks": 2}),
        *padded(),
        *blocks(),
        Case("tokens_per_expert", "two sequences", (draw(9, 2, 5),), (), {"name": "steer"}),
    ]


def padded() -> Iterator[Case]:
    """Registers with room for all 12 copies, of which some, all or none are here."""
    for there in (5, 12, 0):
        ends, what = given([0, there // 2, there], "offset"), f"{there} of 12 rows"
        about = {"top_k": 2, "ranks": 2}
        yield Case("padded_permute", what, (x(3, 2, 4), order(12), ends), (), about | {"rows": 12})
        yield Case("padded_swiglu", what, (behind(there, 12, 6), behind(there, 12, 6), ends))
        yield Case("padded_unpermute", what, (behind(there, 12, 4), x(3, 2, 2), order(12), ends), (), about)
    ends = given([0, 2], "offset")
    about = {"top_k": 3, "ranks": 3}  # whose own experts are one: a token goes there once
    yield Case("padded_permute", "room for 5", (x(5, 1, 7), order(15), ends), (), about | {"rows": 5})
    yield Case("padded_unpermute", "room for 5", (behind(2, 5, 7), x(5, 1, 3), order(15), ends), (), about)
