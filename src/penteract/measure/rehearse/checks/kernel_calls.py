"""The kernels of a rehearsal: those that the registry chooses, each run once for each call of the program.

On a device without numbers torch computes shapes and strides, and refuses what it cannot multiply. Kernels in Triton
are run up to their launch. What a library computes is not run: it allocates as declared. A call that was run once is
known: it makes and frees the same bytes every time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from penteract.engine.kernels.kernel import Env, TorchKernel
from penteract.engine.kernels.moe.experts import Splits
from penteract.engine.kernels.moe.routing import Routing
from penteract.measure.rehearse.findings import Findings, Stop
from penteract.measure.rehearse.ledger import WORKSPACE, Ledger
from penteract.measure.rehearse.wires import WireLog
from penteract.ops.declarations import implementation
from penteract.ops.declarations.forms import TensorForm
from penteract.ops.declarations.registry import Implementation
from penteract.ops.spec import room
from penteract.ops.tape import Phase, Site
from penteract.step.program import Program

TABLES = "tables"  # the owner of what a kernel makes once and keeps: angles, codebooks
PHASES: tuple[Phase, ...] = ("forward", "input_gradient", "weight_gradient")


class KernelCall(NamedTuple):
    """One kind of call: its kernel, and the forms of what it reads and writes."""

    op: str
    phase: str
    kernel: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


class MeasuredCall(NamedTuple):
    """`workspace`: bytes that a call makes and frees."""

    kind: KernelCall
    workspace: int


@dataclass(slots=True)
class KernelCounter:
    """Wraps the kernels of one program, and counts their calls by kind."""

    p: Program
    device: str  # its type
    ledger: Ledger
    findings: Findings
    log: WireLog
    routing: Routing
    counts: dict[KernelCall, int] = field(default_factory=dict[KernelCall, int])
    workspaces: dict[KernelCall, int] = field(default_factory=dict[KernelCall, int])
    _measured: dict[tuple[Any, ...], MeasuredCall] = field(default_factory=dict[tuple[Any, ...], MeasuredCall])

    def of(self, kernels: Mapping[str, TorchKernel]) -> dict[str, TorchKernel]:
        """These kernels, wrapped."""
        return {name: self._wrapped(kernel) for name, kernel in kernels.items()}

    def _wrapped(self, kernel: TorchKernel) -> TorchKernel:
        made = [self._phase(phase, f) if (f := getattr(kernel, phase)) else None for phase in PHASES]
        return TorchKernel(*made)  # type: ignore[arg-type]

    def _phase(self, phase: Phase, kernel: Callable[..., None]) -> Callable[..., None]:
        def run(env: Env, site: Site, *about: Any) -> None:
            if site.op_name == "split_sizes":
                about[2][0] = self.routing.splits(site)
                return
            key = (id(site), phase, *about[3:], *self._routed(site, about[0]))
            measured = self._measured.get(key)
            if measured is None:
                started = len(self.log.events)
                measured = self._run(phase, kernel, env, site, *about)
                if len(self.log.events) == started:  # one that agrees with other ranks does so every time
                    self._measured[key] = measured
            else:
                self.ledger.pass_by(measured.workspace)
            self.counts[measured.kind] = self.counts.get(measured.kind, 0) + 1

        return run

    def _routed(self, site: Site, ins: Any) -> tuple[int, ...]:
        """The rows of registers of routed size, and of each expert."""
        found = list[int]()
        for spec, x in zip(site.ins, ins, strict=False):
            if isinstance(x, Splits):
                found += x.rows
            elif isinstance(x, torch.Tensor) and not all(isinstance(d, int) for d in spec.shape):
                found.append(len(x))
        return tuple(found)

    def _run(self, phase: Phase, kernel: Callable[..., None], env: Env, site: Site, *about: Any) -> MeasuredCall:
        one, _ = implementation(site, self.p.layout)
        tensors = [x for part in about[:3] if isinstance(part, list) for x in part if isinstance(x, torch.Tensor)]
        kind = self._kind(phase, one, site, about)
        if why := one.takes([form(x) for x in tensors]):
            self.findings.add(
                "KERNEL", f"'{one.name}' of {site.op_name} refuses: {why}", str(site), once=f"{one.name} {why}"
            )
        declared = self._declared(phase, site)
        before, first = self.ledger.watch(), self.ledger.made
        with self.ledger.under(WORKSPACE):
            if self.device in one.library:
                torch.empty(declared, dtype=torch.uint8, device="meta")
            else:
                self._try(kernel, one, site, tensors, env, *about)
            if self.ledger.now > before:  # it has made a table: once more, as every later call finds it
                self.ledger.relabel_new(first, TABLES)
                before = self.ledger.watch()
                self._try(kernel, one, site, tensors, env, *about)
        workspace = self.ledger.high - before
        if workspace > declared and not one.emulated(self.device):
            what = f"'{one.name}' of {site.op_name} allocates {workspace:,} bytes in its {phase}, not the {declared:,} "
            what += "that it declares"
            self.findings.add("WORKSPACE", what, str(site), once=f"{one.name} {site.op_name} {phase}")
        self.workspaces[kind] = max(workspace, self.workspaces.get(kind, 0))
        return MeasuredCall(kind, workspace)

    def _try(self, kernel: Callable[..., None], one: Implementation, site: Site, tensors: list[torch.Tensor],
             env: Env, *about: Any) -> None:  # fmt: skip
        """Run a kernel; what it raises is a refusal of its arguments."""
        try:
            kernel(env, site, *about)
        except Stop:
            raise
        except (RuntimeError, ValueError, AssertionError, TypeError, IndexError, NotImplementedError) as error:
            why = " ".join(str(error).split())[:240] or type(error).__name__
            forms = ", ".join(form(x).text() for x in tensors)
            self.findings.add("KERNEL", f"'{one.name}' of {site.op_name} refuses {forms}: {why}", str(site),
                              once=f"{one.name} {site.op_name} {why}")  # fmt: skip

    def _kind(self, phase: Phase, one: Implementation, site: Site, about: tuple[Any, ...]) -> KernelCall:
        ins, last = about[0], about[1] if phase == "weight_gradient" else about[2]
        reads, writes = (tuple(form(x).text() for x in xs if isinstance(x, torch.Tensor)) for xs in (ins, last))
        return KernelCall(site.op_name, phase, one.name, reads, writes)

    def _declared(self, phase: Phase, site: Site) -> int:
        """Bytes of workspace that the implementation declares."""
        _, declaration = implementation(site, self.p.layout)
        ins = [tuple(room(d, self.routing.rows) for d in s.shape) for s in site.ins]
        return declaration.workspace(phase, ins, site.weights, site.attrs, self.p.widths)


def form(x: torch.Tensor) -> TensorForm:
    """How a tensor lies."""
    kind = str(x.dtype).removeprefix("torch.")
    return TensorForm(tuple(x.shape), tuple(x.stride()), int(x.storage_offset()), x.element_size(), kind)
