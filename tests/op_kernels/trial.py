"""One trial of a kernel: called as the executor calls it, and held against its formula and its declaration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from op_kernels.case import Case, In
from op_kernels.formulas.table import FORMULAS
from op_kernels.formulas.truth import Room, Rows, Truth
from op_kernels.fp8 import counted
from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.config.precision.policy import RECIPES
from penteract.engine.device.storages import Storages
from penteract.engine.device.zeros import Zeros
from penteract.engine.dtypes import dtype_of
from penteract.engine.kernels.kernel import Env, TorchKernel
from penteract.engine.kernels.moe.experts import Splits
from penteract.engine.kernels.quantised.fp8_linear import TORCH, Fp8Kernels
from penteract.engine.kernels.reference import REFERENCE
from penteract.ops.declarations import OPS, OpDeclaration
from penteract.ops.spec import Spec
from penteract.ops.tape import Phase, Site
from tolerances import PARITY

# Rounding of the inputs is shared with the formula, so what is left is that of the kernel's own steps: of single
# precision a few ulp (1e-7) of a sum's largest term; of bfloat16 (4e-3 an ulp) a handful of roundings.
TOLERANCE = {"fp64": PARITY, "fp32": 1e-5, "bf16": 4e-2, "bf16_pure": 4e-2, "fp16": 5e-3}

# What emulates products of data has workspace of its own, which no GPU has.
QUIET = Fp8Kernels(TORCH, counted).table()

INTEGERS = ("index", "offset", "fp8")


def check(
    case: Case, precision: str, kernel: OpDeclaration | None = None, torch_kernel: TorchKernel | None = None
) -> list[str]:
    """All differences between what is declared or known of an op and what its kernel does."""
    trial = Trial(
        case,
        precision,
        kernel or OPS[case.op_name].declaration,
        torch_kernel or QUIET.get(case.op_name) or REFERENCE[case.op_name],
    )
    trial.run()
    return trial.differences


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """Of tensors with NaN, which is not equal to itself."""
    return x.contiguous().view(-1).view(torch.uint8)


def others(there: Rows, rows: int) -> list[int]:
    """The rows of a tensor that are not there."""
    return list(range(there, rows)) if isinstance(there, int) else sorted({*range(rows)} - {*there})


@dataclass
class Trial:
    case: Case
    precision: str
    kernel: OpDeclaration
    torch_kernel: TorchKernel
    differences: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(len(self.case.what))
        case, stat = self.case, dtype_of("stat", self.precision)
        specs = tuple(Spec(i.shape, i.role) for i in case.ins)
        outs, extras = self.kernel.results(specs, case.weights, case.attrs)
        names = tuple(f"w{i}" for i in range(len(case.weights)))
        self.site = Site(case.op_name, specs, (*outs, *extras), names, case.weights, case.attrs)
        self.results = len(outs)
        experts = case.attrs.get("experts", 5)
        self.env = Env(
            Mesh(Layout(tp=case.tp, dp=case.ep, ep=case.ep)), case.rank, stat,
            scale={"term": torch.tensor(0.7, dtype=stat)}, losses={"term": torch.tensor(0.5, dtype=stat)},
            biases={"steer": torch.linspace(-1, 1, experts, dtype=stat)},
            tokens_per_expert={"steer": torch.full((experts,), 7)}, zeros=Zeros(1, torch.device("cpu")),
            overflow=torch.zeros((), dtype=stat),
        )  # fmt: skip
        self.values = [self.draw(i) for i in case.ins]
        self.weights = [self.draw(In("compute", w)) for w in case.weights]
        if case.attrs.get("known_weights"):
            largest = max(w.abs().max().item() for w in self.weights)
            self.env.largest_weights[names[0]] = torch.tensor([largest])
        self.gradients = [self.draw(self.site.outs[i]) for i in self.kernel.gradients(case.attrs)]
        if self.kernel.forks:
            self.gradients.append(self.draw(self.site.ins[0]))  # of its first in's other reader
        self.truth, self.wanted = self._truth()
        for i, g in zip(self.kernel.gradients(case.attrs), self.gradients, strict=False):
            if (there := self.truth.rows.get(f"out{i}")) is not None:
                g[others(there, len(g))] = torch.nan  # it was made of rows that were not there either

    # ---- making ----------------------------------------------------------------------------------------------

    def draw(self, what: In | Spec) -> Any:
        value = what.value if isinstance(what, In) else None
        if what.role == "host":
            return value
        if value is None:
            value = torch.randn(what.shape, generator=self.generator, dtype=torch.float64)  # type: ignore[arg-type]
        return value.to(dtype_of(what.role, self.precision))

    def poisoned(self, spec: Spec) -> Any:
        """A register before its first write."""
        if spec.role == "host":
            return None
        dtype = dtype_of(spec.role, self.precision)
        poison = float("nan") if dtype.is_floating_point else min(2**30, torch.iinfo(dtype).max)
        return torch.full(spec.shape, poison, dtype=dtype)  # type: ignore[arg-type]

    def bytes(self, spec: Spec) -> int:
        return spec.numel() * RECIPES[self.precision].widths[spec.role]

    def _truth(self) -> tuple[Truth, list[torch.Tensor]]:
        """What the formula gives, and the gradients of the differentiable ins, then of the weights."""
        case = self.case
        ins, weights, beside, gradients = (
            [
                v.to(torch.float64, copy=True) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
                for v in values
            ]
            for values in (self.values, self.weights, [self.draw(i) for i in case.beside], self.gradients)
        )
        leaves = [ins[i] for i in self.kernel.differentiable] + weights
        for leaf in leaves:
            leaf.requires_grad_()
        axis = case.attrs.get("axis") or ("ep" if case.ep > 1 else "")
        index = self.env.index(axis) if axis else 0
        room = Room(case.attrs, index, beside, self.env.scale["term"].double(), self.env.biases["steer"].double(),
                    gradients, dtype_of("compute", self.precision))  # fmt: skip
        truth = FORMULAS[case.op_name](room, ins, weights)
        if truth.objective is None:
            outs = zip(self.kernel.gradients(case.attrs), gradients, strict=True)
            truth.objective = sum(((truth.outs[i] * g).sum() for i, g in outs if leaves), torch.zeros(()))
        if not truth.objective.requires_grad:
            return truth, []
        return truth, list(torch.autograd.grad(truth.objective, leaves, materialize_grads=True, allow_unused=True))

    # ---- running ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        with Storages() as alive:
            kept = self._forward()
            declared = sum(self.bytes(self._spec(name)) for name in kept)
            if alive.now != declared:
                self.differences.append(f"kept: declared {declared} bytes, alive {alive.now}")
            for name, part in self.truth.kept.items():
                kept[name].copy_(part)
            self._backward(kept)

    def _forward(self) -> dict[str, Any]:
        """-> what is declared to be kept, by name. All else is dropped."""
        ins = [v.clone() if isinstance(v, torch.Tensor) else v for v in self.values]
        outs = [self.poisoned(s) for s in self.site.outs]
        self._call("forward", self.torch_kernel.forward, ins, self.weights, outs)
        for i, (spec, got, want) in enumerate(zip(self.site.outs, outs, self.truth.outs, strict=True)):
            self._compare(f"out{i}", got, want, spec)
        for i, (got, was) in enumerate(zip(ins, self.values, strict=True)):
            if i in self.kernel.overwrites:
                self._compare(f"in{i} overwritten", got, self.truth.overwritten[i], self.site.ins[i])
            elif isinstance(was, torch.Tensor) and not torch.equal(_bytes(got), _bytes(was)):
                self.differences.append(f"in{i} was written")
        for kind, want in self.truth.state.items():
            (got,) = getattr(self.env, kind).values()
            self._compare(kind, got, want, Spec(tuple(want.shape), "stat" if kind == "losses" else "index"))
        assert self.env.overflow is not None
        if bool(self.env.overflow.isnan()) != self.truth.overflows:
            self.differences.append(f"overflow is {self.env.overflow.item()}")
        everything = {f"in{i}": v for i, v in enumerate(ins)}
        everything |= {f"out{i}": v for i, v in enumerate(outs[: self.results])}
        everything |= {f"extra{i}": v for i, v in enumerate(outs[self.results :])}
        return {name: everything[name] for name in {*self.kernel.input_keeps, *self.kernel.weight_keeps}}

    def _spec(self, name: str) -> Spec:
        kind, i = name[:-1], int(name[-1])
        offset = self.results if kind == "extra" else 0
        return self.site.ins[i] if kind == "in" else self.site.outs[offset + i]

    def _backward(self, kept: dict[str, Any]) -> None:
        sources = self.gradients
        differentiable = self.kernel.differentiable
        if self.kernel.passes_gradient:
            for i in differentiable:
                self._compare(f"gradient of in{i}", sources[0], self.wanted[i], self.site.ins[i])
        elif self.torch_kernel.input_gradient is not None:
            made = [self.poisoned(self.site.ins[i]) for i in differentiable]
            carry = [self.poisoned(s) for s in self.kernel.carry(self.site.ins, self.case.attrs)]
            ins = [*(kept[k] for k in self.kernel.input_keeps), *sources]
            if self.case.attrs.get("known_gradient"):
                ins.append(sources[0].abs().max().view(1).to(self.env.stat))
            self._call("input_gradient", self.torch_kernel.input_gradient, ins, self.weights, [*made, *carry])
            for i, got, want in zip(differentiable, made, self.wanted, strict=False):
                self._compare(f"gradient of in{i}", got, want, self.site.ins[i])
            sources = carry or sources
            if self.case.attrs.get("largest_gradient"):
                self._compare("largest gradient", carry.pop(), made[0].abs().max().view(1).double(), Spec((1,), "stat"))
        if self.torch_kernel.weight_gradient is not None:
            self._weight_gradients([*(kept[k] for k in self.kernel.weight_keeps), *sources])

    def _weight_gradients(self, ins: list[Any]) -> None:
        """Written over poison, then added to what was written; neither touches its neighbours in the bucket."""
        assert self.torch_kernel.weight_gradient is not None
        sizes = [torch.Size(w).numel() for w in self.case.weights]
        bucket = torch.full((sum(sizes) + len(sizes) + 1,), float("nan"), dtype=dtype_of("gradient", self.precision))
        ends = [sum(sizes[:i]) + i for i in range(len(sizes) + 1)]
        views = zip(ends, sizes, self.case.weights, strict=False)
        into = [bucket[at + 1 : at + 1 + n].view(shape) for at, n, shape in views]
        for times, add in ((1, False), (2, True)):
            self._call("weight_gradient", self.torch_kernel.weight_gradient, ins, into, add)
            for i, got in enumerate(into):
                want = self.wanted[len(self.kernel.differentiable) + i] * times
                self._compare(f"gradient of w{i}, {add=}", got, want, Spec(self.case.weights[i], "stat"))
        if not bucket[ends].isnan().all():
            self.differences.append("a weight gradient is written beside its view")

    # ---- comparing -------------------------------------------------------------------------------------------

    def _call(self, phase: Phase, f: Callable[..., None], *arguments: Any) -> None:
        shapes = [i.shape for i in self.case.ins]
        about = (phase, shapes, self.case.weights, self.case.attrs)
        with FlopCounterMode(display=False) as flops, Storages() as storages:
            try:
                f(self.env, self.site, *arguments)
            except Exception as e:
                self.differences.append(f"{phase} fails: {e}")
                return
        pairs = {
            "FLOPs": (self.kernel.flops(*about), flops.get_total_flops()),
            "workspace": (self.kernel.workspace(*about, RECIPES[self.precision].widths), storages.peak),
            "left behind": (0, storages.now),
        }
        for what, (declared, seen) in pairs.items():
            if declared != seen:
                self.differences.append(f"{phase} {what}: declared {declared}, seen {seen}")

    def _compare(self, name: str, got: Any, want: Any, spec: Spec) -> None:
        if spec.role == "host":
            assert isinstance(got, Splits)
            if (got.sent, got.received, got.table, got.rows) != want:
                self.differences.append(f"{name}: {got} is not {want}")
            return
        if spec.shape != tuple(want.shape) or (spec.role in INTEGERS) == want.is_floating_point():
            self.differences.append(f"{name}: declared {spec}, is {tuple(want.shape)} of {want.dtype}")
        elif spec.role in INTEGERS:
            if not torch.equal(got.to(want.dtype), want):
                self.differences.append(f"{name}: {got.tolist()} is not {want.tolist()}")
        elif (pair := self._came(name, got, want))[1].numel():
            got, want = pair
            finite = want.isfinite()
            error = torch.where(finite, got.double() - want, (got != want).double())
            worst = (error.abs().max() / torch.where(finite, want.abs(), 0).max().clamp(min=1)).item()
            if not worst <= TOLERANCE[self.precision]:
                self.differences.append(f"{name}: off by {worst:.1e}")

    def _came(self, name: str, got: torch.Tensor, want: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both without rows that did not come: there a kernel that counts rows leaves what was."""
        if (there := self.truth.rows.get(name)) is None:
            return got, want
        if self.kernel.counts_rows and not got[others(there, len(got))].isnan().all():
            self.differences.append(f"{name}: rows that did not come are written")
        here = list(range(there)) if isinstance(there, int) else there
        return got[here], want[here]
