"""Calls of fused attention, each beside what the reference kernel gives; on a CPU or a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from penteract.config.layout import AttentionKernel, Layout
from penteract.config.mesh import Mesh
from penteract.engine.dtypes import dtype_of
from penteract.engine.kernels.kernel import Env, TorchKernel
from penteract.ops.spec import Spec
from penteract.ops.tape import Site
from penteract.parallel.context import token_indices

DOCUMENTS = ([0], [0, 1, 7, 8, 19], [0, 12])  # first tokens, in 24ths of a sequence
NAMES = ("o", "log_sum", "q_gradient", "k_gradient", "v_gradient")


@dataclass(frozen=True)
class Case:
    """One call of `attention` on rank `rank`. `documents`: sequences that are cut into some; else each is one."""

    kernel: AttentionKernel = "flash"
    batch: int = 1
    heads: tuple[int, int] = (2, 2)
    size: int = 8
    documents: bool = True
    window: int = 0
    layout: Layout = field(default_factory=Layout)
    rank: int = 0
    tokens: int = 24

    def __str__(self) -> str:
        split = f", rank {self.rank} of {self.layout.cp} by {self.layout.cp_method}" if self.layout.cp > 1 else ""
        documents = ", documents" * self.documents + f", window {self.window}" * bool(self.window)
        return f"{self.kernel}: {self.tokens} x {self.batch}, heads {self.heads} of {self.size}{documents}{split}"

    @property
    def plan(self) -> Layout:
        return replace(self.layout, attention=self.kernel)

    def start(self) -> torch.Tensor:
        """Each token's first visible one, [S, B]."""
        out = torch.zeros(self.tokens, self.batch, dtype=torch.int64)
        for b in range(self.batch if self.documents else 0):
            for part in DOCUMENTS[(b + 1) % 3]:
                out[part * self.tokens // 24 :, b] = part * self.tokens // 24
        return out

    def orders(self) -> tuple[list[int], list[int]]:
        """Which tokens the rows of q are, and the keys."""
        cp = self.layout.cp
        every = [i for r in range(cp) for i in token_indices(self.tokens, cp, r)]
        return every if self.layout.cp_method == "ulysses" else token_indices(self.tokens, cp, self.rank), every


def _cases(tokens: int, size: int) -> list[Case]:
    gather = [Layout(cp=2), Layout(cp=4)]
    by_group, in_order = Layout(cp=2, cp_method="ulysses"), Layout(determinism="bitwise")
    more = {"tokens": tokens, "size": size}
    return [
        Case(**more),
        Case(documents=False, **more),
        Case(batch=3, **more),
        Case(batch=3, heads=(6, 2), **more),
        Case(batch=2, heads=(4, 1), window=5, **more),
        Case(window=2, **more),
        Case(window=tokens // 3, documents=False, **more),
        *(Case(layout=lay, rank=r, batch=2, heads=(4, 2), **more) for lay in gather for r in range(lay.cp)),
        *(Case(layout=gather[0], rank=r, window=4, **more) for r in range(2)),
        Case(layout=by_group, rank=1, batch=3, heads=(4, 2), **more),
        Case("cudnn", documents=False, **more),
        Case("cudnn", documents=False, heads=(6, 2), **more),
        Case("cudnn", documents=False, batch=3, heads=(6, 2), **more),
        Case("cudnn", documents=False, batch=2, **more),
        Case("cudnn", documents=False, layout=by_group, batch=2, **more),
        Case("fa4", documents=False, **more),
        Case("fa4", documents=False, heads=(6, 2), **more),
        Case("fa4", documents=False, batch=3, heads=(6, 2), **more),
        Case("fa4", documents=False, batch=2, window=5, **more),
        Case("fa4", documents=False, layout=by_group, batch=2, heads=(4, 2), **more),
        Case("fa4", documents=False, layout=in_order, **more),
        Case("fa4", documents=False, layout=in_order, batch=3, heads=(6, 2), **more),
        Case("fa4_documents", **more),
        Case("fa4_documents", layout=in_order, batch=3, heads=(6, 2), **more),
        Case("fa4_documents", batch=3, heads=(6, 2), **more),
        Case("fa4_documents", batch=2, heads=(4, 1), window=5, **more),
        *(
            Case("fa4_documents", layout=lay, rank=r, batch=2, heads=(4, 2), **more)
            for lay in gather
            for r in range(lay.cp)
        ),
        Case("fa4_documents", layout=by_group, rank=1, batch=3, heads=(4, 2), **more),
    ]


SMALL = [*_cases(24, 8), Case(tokens=1), *(Case(layout=Layout(cp=3), rank=r, batch=3) for r in range(3))]
LARGE = [*_cases(1000, 64), *_cases(4096, 128)]


@dataclass
class Trial:
    """A case's tensors: random, rounded to `rounded`, in the dtypes of `precision`."""

    case: Case
    precision: str
    rounded: str = "fp64"
    device: str = "cpu"

    def __post_init__(self) -> None:
        case, generator = self.case, torch.Generator().manual_seed(3)
        own, every = case.orders()
        (heads, kv), b, size, start = case.heads, case.batch, case.size, case.start()
        whole = torch.randn(case.tokens, b, (2 * heads + 2 * kv) * size, generator=generator, dtype=torch.float64)
        whole = whole.to(dtype_of("compute", self.rounded)).to(dtype_of("compute", self.precision)).to(self.device)
        q, g, k, v = whole.split([n * size for n in (heads, heads, kv, kv)], -1)
        index = torch.arange(case.tokens)
        numbers = [x.to(self.device) for x in (index[own], start[own], index[every])]
        self.ins = [q[own].contiguous(), *(x[every].contiguous() for x in (k, v)), *numbers]
        self.gradient = g[own].contiguous()
        specs = tuple(Spec(tuple(x.shape), "index" if x.dtype == torch.int64 else "compute") for x in self.ins)
        outs = (specs[0], Spec((b, heads, len(own)), "stat"))
        attrs = {"head_size": size, "value_size": size, "scale": 1.3 * size**-0.5, "window": case.window}
        self.site = Site("attention", specs, outs, (), (), attrs)
        self.env = Env(Mesh(case.plan), case.rank, dtype_of("stat", self.precision))
        self.outs, self.slopes = [self.poison(s) for s in outs], [self.poison(s) for s in specs[:3]]

    def pack(self) -> None:
        """q, k and v become views of one register [s, B, (H + 2·K)·C], and so do their gradients: equal rows only."""
        widths = [x.shape[-1] for x in self.ins[:3]]
        self.ins[:3] = torch.cat(self.ins[:3], -1).split(widths, -1)
        self.slopes = list(torch.cat(self.slopes, -1).split(widths, -1))

    def poison(self, spec: Spec) -> torch.Tensor:
        """A register before its first write."""
        return torch.full(spec.shape, float("nan"), dtype=dtype_of(spec.role, self.precision), device=self.device)  # type: ignore[arg-type]

    def forward(self, kernel: TorchKernel) -> None:
        kernel.forward(self.env, self.site, self.ins, [], self.outs)

    def backward(self, kernel: TorchKernel) -> None:
        assert kernel.input_gradient is not None
        kernel.input_gradient(self.env, self.site, [*self.ins, *self.outs, self.gradient], [], self.slopes)

    def run(self, kernel: TorchKernel) -> list[torch.Tensor]:
        """In the order of NAMES."""
        self.forward(kernel)
        self.backward(kernel)
        return [*self.outs, *self.slopes]
