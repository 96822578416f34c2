"""What the kernels of plain torch move is what its calls are seen to read and write, one kernel for each call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from math import prod
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from op_kernels.case import Case, In, given
from op_kernels.cases import CASES
from op_kernels.trial import Trial
from penteract.config.precision.policy import RECIPES
from penteract.engine.device.storages import tensors_of
from penteract.engine.kernels.reference import REFERENCE
from penteract.ops.declarations import OPS, OpDeclaration
from penteract.ops.declarations.declaration import CallShapes
from penteract.ops.declarations.dense import RmsNorm
from penteract.ops.declarations.traffic import Kernel

# Each register once, which is what pointwise ones of them do; what stands beside products, and what sizes on the host
# cut, is not proved here.
AS_A_WHOLE = {"linear", "logits", "attention", "merged_linear", "quantise", "fp8_linear", "fp8_glu", "merged_glu",
"glu_linear", "packed_attention", "normed_attention", "router", "expert_linear", "expert_pair", "split_sizes", "rows",
              "join_rows", "gelu", "add"}  # fmt: skip
SILENT = {"view", "unsqueeze", "t", "alias", "split", "split_with_sizes", "empty", "empty_like", "expand", "permute",
          "select", "slice", "unbind", "movedim"}  # fmt: skip
OVERWRITE = {"copy_", "zero_"}
TYPED = {"lt", "ge", "gt", "masked_fill_", "gelu_backward"}
IN_ORDER = {"sum", "mean", "amax", "linalg_vector_norm", "cat", "index_select", "sort", "arange"}

WIDEST = 8  # bytes of a number

Seen = tuple[int, int]  # bytes, elements that are walked


class Traffic(TorchDispatchMode):
    """Of each call that runs a kernel: the bytes that it reads and writes, by its tensors and its schema."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, Seen]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name in SILENT:
            return out
        read, written = list[torch.Tensor](), list[torch.Tensor]()
        for at, argument in enumerate(func._schema.arguments):
            given = args[at] if at < len(args) else (kwargs or {}).get(argument.name)
            for x in tensors_of(given):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    written.append(x)
                    if not argument.kwarg_only and name not in OVERWRITE:
                        read.append(x)
                else:
                    read.append(x)
        written = written or tensors_of(out)
        self.seen.append((name, _moved(name, read, written)))
        return out


def _moved(name: str, read: list[torch.Tensor], written: list[torch.Tensor]) -> Seen:
    """Where places are told by a tensor, as many elements as are told are read and written."""
    match name, read:
        case "index_select", [table, index]:
            return _bytes(index) + 2 * written[0].numel() * table.itemsize, 0
        case "index_add_", [into, index, x]:
            return _bytes(index) + _bytes(x) + 2 * x.numel() * into.itemsize, x.numel()
        case (("index_put_" | "index_copy_"), [into, index, x]):
            n = index.numel() * prod(into.shape[1:])  # x may be a row for several places
            return _bytes(index) + _bytes(x) + n * into.itemsize, n
        case "scatter_", [into, index]:  # a number is added
            return _bytes(index) + 2 * index.numel() * into.itemsize, index.numel()
        case "scatter_add_", [into, index, x]:
            return _bytes(index) + _bytes(x) + 2 * index.numel() * into.itemsize, index.numel()
        case (("gather" | "index"), [x, index]):
            return _bytes(index) + index.numel() * (x.itemsize + written[0].itemsize), index.numel()
        case _:
            pass
    every = [*read, *written]
    return sum(map(_bytes, every)), 0 if name in IN_ORDER or _alike(name, every) else max(x.numel() for x in every)


def _bytes(x: torch.Tensor) -> int:
    """Repeated elements lie in memory once."""
    n = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        n *= size if stride else 1
    return n * x.itemsize


def _alike(name: str, every: list[torch.Tensor]) -> bool:
    """Whether all are whole, in one order and dtype. fp32 is narrowed to 16 bits without more ado."""
    n = max(x.numel() for x in every)
    if any(x.numel() != n or not x.is_contiguous() for x in every):
        return False
    dtypes = [x.dtype for x in every]
    narrow = name == "copy_" and dtypes in ([torch.float32, torch.bfloat16], [torch.float32, torch.float16])
    return name in TYPED or narrow or len(set(dtypes)) == 1


class Watched(Trial):
    """A trial of which the calls of every phase are seen, and not their values."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.calls: dict[str, list[tuple[str, Seen]]] = {}

    def _call(self, phase: Any, f: Any, *arguments: Any) -> None:
        with Traffic() as traffic:
            f(self.env, self.site, *arguments)
        self.calls[phase] = traffic.seen  # of a weight gradient, the second: it is added


def differences(case: Case, precision: str, kernel: OpDeclaration) -> Iterator[str]:
    trial = Watched(case, precision, OPS[case.op_name].declaration, REFERENCE[case.op_name])
    trial.run()
    for phase, calls in trial.calls.items():
        about = (phase, [i.shape for i in case.ins], case.weights, case.attrs)
        declared = kernel.traffic(*about, RECIPES[precision].widths)
        assert declared is not None
        seen = [moved for _, moved in calls]
        if all(float(k.times).is_integer() for k in declared):
            whole = Counter[Seen]()
            for k in declared:
                whole[k[:2]] += int(k.times)
            if whole != Counter(seen):
                yield f"{phase}: {whole - Counter(seen)} is not seen, {Counter(seen) - whole} not declared"
            continue
        for at, less in enumerate((WIDEST, 0)):  # a number that each of several reads is read by the last as a whole
            said = sum(Fraction(k.times).limit_denominator(1000) * k[at] for k in declared)
            found = sum(moved[at] for moved in seen)
            if not said <= found <= said + less:
                yield f"{phase}: declared {said}, seen {found}"


OF_KERNELS = [case for case in CASES if case.op_name not in AS_A_WHOLE]


@pytest.mark.parametrize("precision", ["bf16", "bf16_pure", "fp32", "fp64"])
@pytest.mark.parametrize("case", OF_KERNELS, ids=str)
def test_kernels_move_what_is_declared(case: Case, precision: str) -> None:
    assert list(differences(case, precision, OPS[case.op_name].declaration)) == []


def test_chunks_are_sorted_in_as_many_calls_however_many_they_are() -> None:
    calls = list[int]()
    for experts in (2, 64):
        sorts = Case(
            "sort_chunks",
            "",
            (In("compute", (experts * 4, 3)), given([2] * 2 * experts)),
            (),
            {"ranks": 2, "inverse": False},
        )
        trial = Watched(sorts, "bf16", OPS["sort_chunks"].declaration, REFERENCE["sort_chunks"])
        trial.run()
        calls.append(len(trial.calls["forward"]))
    assert calls == [12, 12]


def test_every_op_declares_its_kernels_or_is_one() -> None:
    own = {op_name for op_name, op in OPS.items() if type(op.declaration).traffic is not OpDeclaration.traffic}
    assert own == set(OPS) - AS_A_WHOLE


# ---- the test can fail -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [Kernel(8), Kernel(0, 1), Kernel(0)])
def test_a_byte_an_element_or_a_kernel_too_many_is_seen(change: Kernel) -> None:
    class More(RmsNorm):
        def traffic(self, *about: Any) -> Any:
            return (*super().traffic(*about), change)

    assert list(differences(next(c for c in CASES if c.op_name == "rms_norm"), "bf16", More()))


# ---- what a call costs -------------------------------------------------------------------------------------------


class Told:
    """Rates that note what they are asked, and take a second a byte."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def moved(self, amount: int, walked: int = 0) -> float:
        self.asked.append((amount, walked))
        return float(amount)


def test_a_call_costs_the_sum_of_its_kernels() -> None:
    rates: Any = Told()
    call, widths = (
        CallShapes("forward", [(6, 2, 10), (6, 2), (6, 2)], (), {"axis": "", "at_once": 5}),
        RECIPES["bf16"].widths,
    )
    kernel = OPS["exp_sum"].declaration
    kernels = kernel.traffic(*call.of_op, widths)
    assert kernels is not None
    _, seconds = kernel.cost(rates, call, widths, list)
    assert rates.asked == [k[:2] for k in kernels]
    assert seconds == pytest.approx(sum(k.times * k.moved for k in kernels))


@pytest.mark.parametrize("name", ["linear", "expert_linear"])
def test_a_weight_gradient_that_adds_reads_its_bucket(name: str) -> None:
    widths, weights = RECIPES["bf16"].widths, [(6, 10)] if name == "linear" else [(3, 6, 10)]
    call = CallShapes("weight_gradient", [(12, 10), (3,)], weights, {})
    written = call._replace(adds=False).in_bucket(widths)
    assert written == sum(map(prod, weights)) * widths["gradient"] and call.in_bucket(widths) == 2 * written
    took = [cost_of(name, one, widths) for one in (call, call._replace(adds=False))]
    assert took[0] - took[1] == written


def cost_of(name: str, call: CallShapes, widths: Any) -> float:
    """Bytes of all but its products."""
    rates: Any = Told()
    rates.product = lambda p: 0.0
    return OPS[name].declaration.cost(rates, call, widths, list)[1]


def test_what_declares_no_kernels_reads_and_writes_its_registers_once() -> None:
    rates: Any = Told()
    call, widths = CallShapes("forward", [], (), {}), RECIPES["bf16"].widths
    assert OPS["add"].declaration.cost(rates, call, widths, lambda: [3, 4, 5]) == ("pointwise", 12.0)
    assert rates.asked == [(12, 0)]
