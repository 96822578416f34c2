"""The table: what each op is tried on. Sizes are small, uneven, and different from one another."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from draws import in_turn
from op_kernels.case import Case, draw, given, of_fp8, positive, stat, x
from op_kernels.expert_cases import experts
from penteract.config.model import RopeScaling
from penteract.config.precision.fp8 import Fp8


def _fp8() -> list[Case]:
    fp8, other = Fp8(kind="tensorwise"), Fp8(kind="tensorwise", gradient="e4m3", powers=True)
    rope = {"head_size": 8, "plain_size": 0, "theta": 1e4, "scaling": None, "rotary_columns": 16}
    return [
        Case("quantise", "rows", (x(5, 3, 7),), (), {"fp8": fp8}),
        Case("quantise", "powers of two", (x(4, 2, 6),), (), {"fp8": other}),
        Case("fp8_linear", "one", of_fp8((3, 2), 5), ((7, 5),), {"fp8": fp8, "features": 7}),
        Case("fp8_linear", "two, powers of two", of_fp8((5, 2), 6), ((7, 6), (4, 6)), {"fp8": other, "features": 11}),
        Case("fp8_linear", "known gradient", of_fp8((3, 2), 5), ((7, 5),),
             {"fp8": fp8, "features": 7, "known_gradient": True}),
        Case("fp8_linear", "known weights", of_fp8((3, 2), 5), ((7, 5), (4, 5)),
             {"fp8": fp8, "features": 11, "known_weights": True}),
        Case("fp8_glu", "known weights", of_fp8((5, 2), 6), ((7, 6), (7, 6)),
             {"fp8": fp8, "features": 14, "known_weights": True}),
        Case("fp8_linear", "heads that turn", (*of_fp8((5, 2), 6), draw(90, 5, 2)), ((8, 6), (8, 6), (16, 6)),
             {"fp8": fp8, "features": 32, **rope}),
        Case("quantise", "known", (x(5, 3, 7), given([9.0], "stat")), (), {"fp8": fp8}),
        Case("fp8_glu", "rows", of_fp8((5, 2), 6), ((7, 6), (7, 6)), {"fp8": fp8, "features": 14}),
    ]  # fmt: skip


def _dense() -> list[Case]:
    scaling = RopeScaling(factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_positions=32)
    yarn = RopeScaling(kind="yarn", factor=40.0, original_positions=256, attention_factor=1.2)
    sudden = replace(yarn, original_positions=5, slow_rotations=0.9, fast_rotations=1.1)
    linear = RopeScaling(kind="linear", factor=4.0)
    rope = {"head_size": 8, "plain_size": 0, "theta": 1e4, "scaling": None}
    return [
        Case("embedding", "repeated ids, whole table", (given([[1, 1], [4, 1], [0, 4]]),), ((5, 4),), {"axis": ""}),
        Case("embedding", "one shard of one", (draw(6, 3, 2),), ((6, 4),), {"axis": "tp"}),
        Case("embedding", "first shard", (draw(12, 5, 2),), ((6, 3),), {"axis": "tp"}, tp=2),
        Case("embedding", "second shard", (draw(12, 5, 2),), ((6, 3),), {"axis": "tp"}, tp=2, rank=1),
        Case("embedding", "no id here", (given([[0, 1, 1]]),), ((4, 3),), {"axis": "tp"}, tp=2, rank=1),
        Case("linear", "matrix", (x(3, 2, 5),), ((7, 5),)),
        Case("linear", "with bias", (x(3, 2, 5),), ((4, 5), (4,))),
        Case("linear", "narrow with bias", (x(9, 1),), ((64, 1), (64,))),
        Case("add_bias", "rows", (x(3, 2, 5),), ((5,),)),
        Case("rms_norm", "rows", (x(3, 2, 6),), ((6,),), {"epsilon": 1e-5}),
        Case("rms_norm", "heads", (x(3, 2, 12),), ((4,),), {"epsilon": 1e-2}),
        Case("rms_norm", "one row", (x(1, 1, 8),), ((8,),), {"epsilon": 1e-5}),
        Case("rms_norm", "largest", (x(3, 2, 6),), ((6,),), {"epsilon": 1e-5, "largest": True}),
        Case("layer_norm", "rows", (x(3, 2, 6),), ((6,), (6,)), {"epsilon": 1e-5}),
        Case("layer_norm", "one row", (x(1, 1, 9),), ((9,), (9,)), {"epsilon": 1e-1}),
        Case("rope", "many heads", (x(5, 2, 6 * 8), draw(90, 5, 2)), (), rope),
        Case("rope", "one head", (x(5, 2, 8), draw(90, 5, 2)), (), rope),
        Case("rope", "one token", (x(1, 1, 8), given([[3]])), (), rope | {"scaling": scaling}),
        Case("rope", "two features", (x(2, 3, 2), draw(9, 2, 3)), (), rope | {"head_size": 2}),
        Case("rope", "stretched", (x(5, 2, 2 * 16), draw(900, 5, 2)), (), rope | {"head_size": 16, "scaling": scaling}),
        Case("rope", "a part of each head", (x(5, 2, 3 * 8), draw(90, 5, 2)), (), rope | {"plain_size": 2}),
        Case("rope", "a small part", (x(1, 1, 2 * 8), draw(90, 1, 1)), (), rope | {"plain_size": 6}),
        Case("rope", "yarn", (x(5, 2, 2 * 16), draw(900, 5, 2)), (), rope | {"head_size": 16, "scaling": yarn}),
        Case("rope", "yarn, one token", (x(1, 1, 16), given([[700]])), (), rope | {"head_size": 16, "scaling": yarn}),
        Case("rope", "yarn, no ramp", (x(1, 1, 4), given([[70]])), (), rope | {"head_size": 4, "scaling": sudden}),
        Case("rope", "linear", (x(3, 1, 8), draw(90, 3, 1)), (), rope | {"scaling": linear}),
        Case("fork_norm", "rows", (x(3, 2, 6),), ((6,),), {"epsilon": 1e-5}),
        Case("fork_norm", "one row", (x(1, 1, 8),), ((8,),), {"epsilon": 1e-2}),
        Case("add_norm", "rows", (x(3, 2, 6), x(3, 2, 6)), ((6,),), {"epsilon": 1e-5}),
        Case("fork_norm", "largest gradient", (x(3, 2, 6),), ((6,),), {"epsilon": 1e-5, "largest_gradient": True}),
        Case("fork_norm", "largest", (x(3, 2, 6),), ((6,),), {"epsilon": 1e-5, "largest": True}),
        Case("add_norm", "largest", (x(3, 2, 6), x(3, 2, 6)), ((6,),), {"epsilon": 1e-5, "largest": True}),
        Case("add_norm", "one row", (x(1, 1, 8), x(1, 1, 8)), ((8,),), {"epsilon": 1e-2}),
        Case("merged_linear", "two", (x(3, 2, 5),), ((7, 5), (7, 5))),
        Case(
            "merged_linear",
            "three, rotated",
            (x(5, 2, 6), draw(90, 5, 2)),
            ((16, 6), (8, 6), (8, 6)),
            rope | {"rotary_columns": 24},
        ),
        Case(
            "merged_linear",
            "parts rotated",
            (x(5, 1, 6), draw(90, 5, 1)),
            ((8, 6), (8, 6), (8, 6)),
            rope | {"rotary_columns": 16, "plain_size": 2, "scaling": scaling},
        ),
        Case("packed_swiglu", "rows", (x(4, 2, 10),)),
        Case("merged_glu", "rows", (x(4, 2, 6),), ((5, 6), (5, 6)), {"features": 10}),
        Case("glu_linear", "rows", (x(4, 2, 6),), ((5, 6), (5, 6), (7, 5)), {"features": 10}),
        Case("swiglu", "rows", (x(4, 2, 5), x(4, 2, 5))),
        Case("gelu", "rows", (x(4, 2, 5),)),
        Case("add", "rows", (x(4, 2, 5), x(4, 2, 5))),
        Case("split", "uneven", (x(3, 2, 7),), (), {"first": 5}),
        Case("split", "one token", (x(1, 1, 2),), (), {"first": 1}),
        Case("join", "uneven", (x(3, 2, 2), x(3, 2, 5))),
        Case("join", "one token", (x(1, 1, 1), x(1, 1, 1))),
        Case("repeat_heads", "twice", (x(3, 2, 2 * 4),), (), {"times": 2, "head_size": 4}),
        Case("repeat_heads", "thrice, one head", (x(3, 1, 4),), (), {"times": 3, "head_size": 4}),
        Case("sum_shares", "two ranks", (x(6, 2, 4), x(6, 2, 4)), (), {"axis": "tp", "shares": 2}, tp=2, rank=1),
        Case("sum_shares", "four ranks", (x(8, 1, 3), x(8, 1, 3)), (), {"axis": "tp", "shares": 4}, tp=4, rank=2),
        Case("pack_heads", "two ranks", (x(3, 2, 2 * 4),), (), {"ranks": 2}),
        Case("pack_heads", "four ranks, one sequence", (x(2, 1, 4),), (), {"ranks": 4}),
        Case("unpack_heads", "two ranks", (x(6, 2, 4),), (), {"ranks": 2}),
        Case("unpack_heads", "four ranks, one sequence", (x(8, 1, 1),), (), {"ranks": 4}),
    ]


def _attend(what: str, s: int, b: int, heads: tuple[int, int], **more: Any) -> Case:
    """Own tokens at `at`, keys at `keys`, documents that begin at `start` (one row a token)."""
    c, (h, kv) = 4, heads
    e = more.get("value", c)  # a value's width
    at, keys = more.get("at", range(s)), more.get("keys", range(s))
    start = torch.zeros(s, b, dtype=torch.int64) if "start" not in more else torch.tensor(more["start"])
    ins = (x(s, b, h * c), x(len(keys), b, kv * c), x(len(keys), b, kv * e), given(at), given(start), given(keys))
    beside = ()
    if rest := more.get("rest"):
        beside = (x(len(rest), b, kv * c), x(len(rest), b, kv * e), given(rest))
    attrs = {"head_size": c, "value_size": e, "scale": more.get("scale", c**-0.5), "window": more.get("window", 0)}
    return Case("attention", what, ins, (), attrs, beside=beside)


def _packed(what: str, s: int, b: int, heads: tuple[int, int], **more: Any) -> Case:
    """The same of own tokens alone, with query, key and value side by side."""
    plain = _attend(what, s, b, heads, **more)
    widths = tuple(i.shape[-1] for i in plain.ins[:3])
    turned = {"rotary_columns": sum(widths[:2]), "plain_size": 0, "theta": 1e4, "scaling": more.get("scaling")}
    ins = (x(s, b, sum(widths)), draw(90, s, b), *plain.ins[3:])
    return replace(plain, op_name="packed_attention", ins=ins, attrs={**plain.attrs, **turned, "widths": widths})


def _normed(what: str, s: int, b: int, heads: tuple[int, int], **more: Any) -> Case:
    """The same before query and key heads are normalised and turned."""
    plain = _packed(what, s, b, heads, **more)
    weights = ((plain.attrs["head_size"],),) * 2
    return replace(plain, op_name="normed_attention", weights=weights, attrs={**plain.attrs, "epsilon": 1e-5})


def _attention() -> list[Case]:
    documents = [[0, 0], [0, 0], [2, 0], [2, 3], [2, 3], [5, 3]]
    some = given([[[0.3, -math.inf, 1.0], [2.0, 0.1, -math.inf]]], "stat")  # [B, H, s]
    return [
        _attend("causal", 5, 2, (2, 2)),
        _attend("one head", 4, 1, (1, 1)),
        _attend("grouped", 4, 2, (6, 2)),
        _attend("one KV head", 3, 2, (4, 1)),
        _attend("long", 33, 1, (2, 1)),
        _attend("documents", 6, 2, (2, 2), start=documents),
        _attend("grouped documents", 6, 2, (4, 2), start=documents),
        _attend("window", 6, 1, (2, 2), window=3),
        _attend("window in documents", 6, 2, (4, 2), window=2, start=documents),
        _attend("one token, more keys", 1, 2, (4, 2), at=[5], keys=range(6)),
        _attend("zigzag over all keys", 4, 1, (2, 1), at=[0, 1, 6, 7], keys=[0, 1, 6, 7, 2, 3, 4, 5]),
        _attend("a part: half of the rows see nothing", 4, 2, (4, 2), at=[0, 1, 6, 7], keys=[2, 3, 4, 5],
                rest=[0, 1, 6, 7]),
        _attend("a part: nothing is seen", 2, 1, (2, 2), at=[0, 1], keys=[2, 3], rest=[0, 1]),
        _attend("a part in a window", 4, 1, (2, 1), at=[2, 3, 4, 5], keys=[0, 1], rest=[2, 3, 4, 5], window=3),
        _attend("narrow values", 5, 2, (2, 2), value=3),
        _attend("wide values, another scale", 6, 2, (2, 2), value=7, scale=1.3, start=documents),
        _attend("grouped narrow values", 6, 2, (4, 2), value=2, window=3),
        _attend("grouped wide values", 4, 1, (6, 2), value=9, scale=0.2),
        _attend("wide values, one token", 1, 2, (4, 2), value=33, at=[5], keys=range(6)),
        _attend("a part with wide values", 4, 2, (2, 2), value=6, at=[0, 1, 6, 7], keys=[2, 3, 4, 5],
                rest=[0, 1, 6, 7]),
        _packed("causal", 5, 2, (2, 2)),
        _packed("grouped documents", 6, 2, (4, 2), start=documents),
        _packed("one token", 1, 1, (2, 1)),
        _packed("window, yarn", 6, 1, (2, 1), window=3, scaling=RopeScaling(kind="yarn", factor=40.0,
                original_positions=256, attention_factor=1.2)),
        _normed("causal", 5, 2, (2, 2)),
        _normed("grouped documents", 4, 2, (4, 2), start=documents[:4]),
        _normed("one token", 1, 1, (2, 1)),
        _normed("many heads", 2, 1, (16, 16)),
        _normed("window, yarn", 6, 1, (2, 1), window=3, scaling=RopeScaling(kind="yarn", factor=40.0,
                original_positions=256, attention_factor=1.2)),
        Case("unfold_heads", "heads", (x(4, 2, 3 * (5 + 4)), x(4, 2, 2)), (), {"plain_size": 5, "value_size": 4}),
        Case("unfold_heads", "one head", (x(3, 1, 3), x(3, 1, 4)), (), {"plain_size": 1, "value_size": 2}),
        Case("merge_attention", "two parts", (x(4, 2, 3 * 4), stat(2, 3, 4), x(4, 2, 3 * 4), stat(2, 3, 4))),
        Case("merge_attention", "rows that a part does not see", (x(3, 1, 2 * 4), stat(1, 2, 3), x(3, 1, 2 * 4), some)),
    ]  # fmt: skip


def _loss() -> list[Case]:
    targets = given([[0, 5], [-1, 3], [9, -1], [6, 2]])  # of a vocabulary of ten; two ignored
    large = given(torch.full((4, 2), 6.0), "stat")  # above what a few unit logits sum to
    out = [
        Case("row_max", "rows", (x(4, 2, 7),)),
        Case("negative_log_likelihood", "some ignored", (positive(2, 4, 2), stat(4, 2), targets)),
        Case("negative_log_likelihood", "one token", (positive(2, 1, 1), stat(1, 1), given([[3]]))),
        Case("negative_log_likelihood", "with z-loss", (positive(2, 4, 2), stat(4, 2), targets), (), {"z": 0.3}),
        Case("loss", "alone", (stat(),), (), {"name": "term", "scale": "term", "copies": 1}),
        Case("loss", "of four copies", (stat(),), (), {"name": "term", "scale": "term", "copies": 4}),
        Case("rows", "in the middle", (x(7, 2, 3),), (), {"begin": 2, "count": 4}),
        Case("rows", "of indices, the last", (draw(9, 5, 2),), (), {"begin": 4, "count": 1}),
        Case("join_rows", "three", (x(3, 2, 5), x(3, 2, 5), x(1, 2, 5))),
        Case("logits", "all columns together", (x(3, 2, 5),), ((7, 5),), {"columns": 8}),
        Case("logits", "three columns at a time", (x(3, 2, 5),), ((7, 5),), {"columns": 3}),
    ]
    for what, more in (("", {}), (", with z-loss", {"z": 0.3}), (", some at a time", {"at_once": 3})):
        out.append(Case("loss_and_gradient", f"two ignored{what}", (x(4, 2, 10), targets, stat()), (),
                        {"axis": "tp", **more}))  # fmt: skip
    for op_name, beside in (("exp_sum", ()), ("cross_entropy_gradient", (stat(),)), ("logits_gradient", (stat(),))):
        for what, tp, rank in (("whole", 1, 0), ("first shard", 2, 0), ("second shard", 2, 1)):
            row = stat(4, 2) if op_name == "exp_sum" else large
            ins = (x(4, 2, 10 // tp), row, targets, *beside)
            out.append(Case(op_name, what, ins, (), {"axis": "tp"}, tp, rank))
            out.append(
                Case(op_name, f"{what}, three tokens at a time", ins, (), {"axis": "tp", "at_once": 3}, tp, rank)
            )
            if beside:
                out.append(Case(op_name, f"{what}, with z-loss", ins, (), {"axis": "tp", "z": 0.3}, tp, rank))
                about = {"axis": "tp", "z": 0.3, "at_once": 5}
                out.append(Case(op_name, f"{what}, with z-loss, five tokens at a time", ins, (), about, tp, rank))
    ignored = given([[-1, -1]])
    out.append(Case("exp_sum", "all ignored", (x(1, 2, 4), stat(1, 2), ignored), (), {"axis": "tp"}))
    return out


CASES: list[Case] = [*_dense(), *_fp8(), *_attention(), *_loss(), *experts()]


def of_all_ops(cases: Iterable[Case], *precisions: str) -> list[Any]:
    """Cases with precisions: each with the first and another, and one of each op with all."""
    return in_turn(cases, precisions, lambda case: case.op_name)
