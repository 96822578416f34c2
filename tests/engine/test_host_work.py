"""What the host does for a step of FP8 on a GPU is bounded: torch's ops, launches of Triton, and calls of Python.

A device without numbers has the GPU's place and its kernels, whose launches do nothing. Bounds are of one more layer,
so what a step does once is not in them.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import penteract
from penteract.config.layout import FUSIONS, Layout
from penteract.config.model import ModelSpec
from penteract.config.precision.policy import RECIPES
from penteract.config.run import Precision, RunSpec
from penteract.engine.data.blank import Blank
from penteract.engine.device import launches
from penteract.engine.kernels.registry import TargetElsewhere, kernels
from penteract.engine.rank.rank import Rank
from penteract.engine.session.stand_ins import stand_ins
from penteract.engine.session.trainer import Place, Trainer
from penteract.measure.rehearse.findings import Findings
from penteract.measure.rehearse.rank_rehearsal import META
from penteract.measure.rehearse.wires import RehearsedDevice, WireLog

TRITON = pytest.importorskip("triton.runtime")
MODEL = ModelSpec(
    layers=1, hidden_size=64, heads=4, kv_heads=2, head_size=16, ffn_size=128, vocab_size=256, initial_std=0.02
)
LENGTH = 32
OWN = f"{Path(penteract.__file__).parent}/"
ANY_DEVICE, ANY_STREAM = (lambda: 0), (lambda device: 0)


class Ops(TorchDispatchMode):
    """Counts torch's ops by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Counter[str]()

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[str(f)] += 1
        return f(*args, **(kwargs or {}))


@dataclass
class Work:
    """Of a step, by name; `functions`: Python's in this package."""

    ops: Counter[str] = field(default_factory=Counter[str])
    launches: Counter[str] = field(default_factory=Counter[str])
    asked: Counter[str] = field(default_factory=Counter[str])  # launches for which the JIT was asked
    functions: Counter[str] = field(default_factory=Counter[str])
    handed: list[Any] = field(default_factory=list[Any])  # of each launch in order: kernel, grid, arguments

    def launch(self, kernel: Any, grid: tuple[int, ...], values: Iterable[Any]) -> None:
        name, addresses = kernel.fn.__name__, [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in values]
        self.launches[name] += 1
        self.handed.append((name, (*grid, 1, 1)[:3], addresses))

    def __sub__(self, other: Work) -> Work:
        return Work(
            self.ops - other.ops, self.launches - other.launches, self.asked - other.asked,
            self.functions - other.functions,
        )  # fmt: skip


def trainer(precision: str, layers: int) -> Trainer:
    fuse = tuple(f for f in FUSIONS if f != "fp8" or precision != "bf16")
    run = RunSpec(
        model=replace(MODEL, layers=layers), sequence_length=LENGTH, precision=Precision.of(RECIPES[precision]),
        layout=Layout(elementwise="triton", fuse=fuse, recompute=("*",), loss="chunked"),
    )  # fmt: skip
    place = Place(
        RehearsedDevice(WireLog(Findings(0))), TargetElsewhere("cuda", "H200"),
        lambda p: kernels(p, torch.device("cuda")), lambda *_: None,
    )  # fmt: skip
    return Trainer.on(run, Rank(0, 1, META, None), place)


@cache
def of_steps(precision: str, layers: int, *, known: bool = True) -> Work:
    """Of a step whose calls are bound: ops are counted in one, functions in the next. Kernels are as if compiled, by a
    Triton that is `known` or not."""
    found, samples = Work(), Blank(LENGTH)
    driver = SimpleNamespace(get_current_device=ANY_DEVICE, get_current_stream=ANY_STREAM)
    hooks = SimpleNamespace(launch_enter_hook=None, launch_exit_hook=None)
    about = SimpleNamespace(
        runtime=SimpleNamespace(driver=SimpleNamespace(active=driver)), knobs=SimpleNamespace(runtime=hooks)
    )

    def launch(self: Any, *about: Any, grid: tuple[int, ...], **named: Any) -> Any:
        compiled, every = MagicMock(), dict(zip(self.arg_names, about, strict=False)) | named
        found.launch(self, grid, [every[name] for name in self.arg_names])
        found.asked[self.fn.__name__] += 1
        compiled.metadata.target.backend = "cuda"
        compiled.run = lambda *handed: found.launch(self, handed[:3], handed[9:])
        return compiled

    def called(frame: Any, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(OWN):  # a checkout may have the package's name too
            found.functions[f"{file.removeprefix(OWN)}:{frame.f_code.co_qualname}"] += 1

    with (
        stand_ins(), torch.no_grad(), patch.object(TRITON.jit.JITFunction, "run", launch),
        patch.object(TRITON.interpreter.InterpretedFunction, "run", launch),
        patch.object(TRITON.interpreter.InterpretedFunction, "constexprs", (), create=True),
        patch.object(launches, "_triton", lambda: about), patch.object(launches, "was_read", lambda: known),
    ):  # fmt: skip
        one = trainer(precision, layers)
        for number in (1, 2):
            one.start(number, samples, 0)  # type: ignore[arg-type]
        found.launches.clear()
        found.asked.clear()
        found.handed.clear()
        with Ops() as ops:
            one.start(3, samples, 0)  # type: ignore[arg-type]
        made = Work(ops.found, Counter(found.launches), Counter(found.asked), handed=list(found.handed))
        before = sys.getprofile()
        sys.setprofile(called)
        try:
            one.start(4, samples, 0)  # type: ignore[arg-type]
        finally:
            sys.setprofile(before)
    return replace(made, functions=found.functions)


def of_a_layer(precision: str) -> Work:
    return of_steps(precision, 3) - of_steps(precision, 2)


def test_a_step_of_fp8_asks_torch_for_no_view_of_another_dtype() -> None:
    ops = of_a_layer("fp8_tensorwise").ops
    assert not {"aten.view.dtype", "aten.detach.default"} & set(ops)
    # Attention is torch's own, the same in both. Each product transposes an operand, and most make data for it. Norms
    # clear the place of their largest value, and no pass looks for it.
    assert ops.total() <= of_a_layer("bf16").ops.total() + 28
    assert ops["aten.empty.memory_format"] + ops["aten.t.default"] <= 40


def test_casts_of_a_layer_are_as_many_as_its_operands() -> None:
    """8 in forward, of 4 inputs and 4 weights, twice as it is recomputed; 4 gradients, and 4 weights whose scale is
    known. The largest of an input of `down` is found by SwiGLU, those of norms by the norms, those of weights by the
    update, that of the gradient of `o` by the backward of a norm."""
    found = of_a_layer("fp8_tensorwise")
    assert found.launches["_quantise_tile"] == 2 * 8 + 4 + 4
    assert found.launches["_largest"] == 2 * 1 + 3


def test_nothing_is_cleared_for_one_cast() -> None:
    """All that casts look for their largest values in is cleared once a step; a layer adds what SwiGLU and
    two norms write, in forward and as it is recomputed, and what the backward of one norm does."""
    found, steps = of_a_layer("fp8_tensorwise").ops, [of_steps("fp8_tensorwise", n).ops for n in (2, 3)]
    assert not {"aten.zeros.default", "aten.zeros_like.default"} & set(found)
    assert found["aten.zero_.default"] == 2 * 3 + 1
    assert [step["aten.zeros.default"] for step in steps] == [1, 1]  # of the sum of squares


@pytest.mark.parametrize("precision", ["bf16", "fp8_tensorwise"])
def test_later_steps_ask_the_jit_for_nothing(precision: str) -> None:
    found = of_steps(precision, 2)
    assert not found.asked and found.launches.total() > 30


@pytest.mark.parametrize("precision", ["bf16", "fp8_tensorwise"])
def test_launches_of_later_steps_are_those_that_the_jit_would_make(precision: str) -> None:
    """Kernels, grids, addresses, numbers and constants, in their order: tensors without numbers have addresses in their
    memory."""
    bound, plain = of_steps(precision, 2), of_steps(precision, 2, known=False)
    assert plain.asked == plain.launches == bound.launches
    assert bound.handed == plain.handed


def test_calls_of_python_are_bounded() -> None:
    assert of_a_layer("bf16").functions.total() <= 165
    assert of_a_layer("fp8_tensorwise").functions.total() <= 392
