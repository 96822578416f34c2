"""Experts' products by groups: one kernel for all experts of a rank. Rows of a group begin and end where `offsets` say,
on the device, so that nobody waits for a count.

    rows   a [R, k], b [X, k, n] -> [R, n]: the rows of each expert times its matrix
    sums   a [m, R], b [R, n] -> [X, m, n]: products over the rows of each expert, zeros for one without rows
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import pairwise
from typing import Any, Protocol

import torch

from penteract.config.rules.kernel_limits import HOPPER
from penteract.engine.kernels.kernel import Apart, Env, LaunchReached, Tensors, TorchKernel, WithoutGpu, put
from penteract.ops.tape import Site

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # a, b, offsets -> rows, or sums
Tile = tuple[int, int, bool]  # rows, columns, whether two of them take turns


class Groups(Protocol):
    """Products by groups: rows of a and b belong to experts, from `offsets` [X + 1] on."""

    def rows(self, a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor, add: bool) -> None:
        """a [R, k], b [X, k, n] -> `out` [R, n]: each row times the matrix of its expert, written or added."""
        ...

    def sums(self, a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, into: torch.Tensor, add: bool) -> None:
        """a [R, m], b [R, n] -> `into` [X, m, n], a view of a bucket: the sum over each expert's rows, written or
        added."""
        ...


def expert_products(groups: Groups) -> TorchKernel:
    """The kernel of `expert_linear`, over what multiplies. Without any rows nothing is launched."""

    def forward(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
        x, offsets = ins
        if len(x):
            groups.rows(x, weights[0].transpose(1, 2), offsets, outs[0], False)

    def input_gradient(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
        offsets, g = ins
        if len(g):
            groups.rows(g, weights[0], offsets, outs[0], False)

    def weight_gradient(env: Env, site: Site, ins: Tensors, into: Tensors, add: bool) -> None:
        x, offsets, g = ins
        if len(x):
            groups.sums(g.t(), x, offsets, into[0], add)
        elif not add:
            into[0].zero_()

    return TorchKernel(forward, input_gradient, weight_gradient)


def expert_pair_products(groups: Groups) -> TorchKernel:
    """The kernel of `expert_pair`, over what multiplies."""
    single = expert_products(groups)
    assert single.input_gradient is not None and single.weight_gradient is not None
    of_rows, of_weights = single.input_gradient, single.weight_gradient

    def forward(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
        for w, out in zip(weights, outs, strict=True):
            single.forward(env, site, ins, [w], [out])

    def input_gradient(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
        offsets, first, second = ins
        of_rows(env, site, [offsets, first], weights[:1], outs)
        if len(second):
            groups.rows(second, weights[1], offsets, outs[0], True)

    def weight_gradient(env: Env, site: Site, ins: Tensors, into: Tensors, add: bool) -> None:
        x, offsets, *gradients = ins
        for g, each in zip(gradients, into, strict=True):
            of_weights(env, site, [x, offsets, g], [each], add)

    return TorchKernel(forward, input_gradient, weight_gradient)


@dataclass(frozen=True, slots=True)
class MadeBeside:
    """A product that makes its result by itself, with zeros for experts without rows: it is copied to where it
    belongs."""

    product: Product

    def rows(self, a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor, add: bool) -> None:
        """Copied to `out`."""
        put(out, self.product(a, b, offsets), add)

    def sums(self, a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, into: torch.Tensor, add: bool) -> None:
        """Copied `into` the bucket, or added to it."""
        put(into, self.product(a, b, offsets), add)


def by_torch(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """torch's own, of bf16 on a GPU."""
    return torch._grouped_mm(a, b, offs=offsets[1:])  # pyright: ignore[reportPrivateImportUsage]


def emulated(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The same one by one, in any dtype: a CPU may look at the offsets."""
    ends = offsets.tolist()
    groups = [slice(begin, end) for begin, end in pairwise(ends)]
    if b.dim() == 3:
        made = a.new_empty(len(a), b.shape[2])
        for rows, matrix in zip(groups, b, strict=True):
            if rows.stop > rows.start:
                torch.mm(a[rows], matrix, out=made[rows])
        return made
    made = a.new_empty(len(groups), len(a), b.shape[1])
    for rows, one in zip(groups, made, strict=True):
        if rows.stop > rows.start:
            torch.mm(a[:, rows], b[rows], out=one)
        else:
            one.zero_()
    return made


# ---- quack -----------------------------------------------------------------------------------------------------------


@cache
def library() -> Any:
    """The package, imported when a run needs it: that takes seconds."""
    return import_module("quack.gemm_interface")


def _load() -> None:
    """Import the package."""
    library()
    config(PLAIN_TILE)


def quack_without_gpu(load: Callable[[], None]) -> WithoutGpu:
    """How the package compiles for Hopper where there is none; `load` imports it."""

    def folder() -> str:
        load()
        return str(import_module("quack.cache").get_cache_path())

    arch = "{}{}".format(*HOPPER)
    return WithoutGpu({"QUACK_ARCH": arch, "CUTE_DSL_ARCH": f"sm_{arch}a"}, folder, _end_when_compiled)


def _end_when_compiled(apart: Apart) -> None:
    """Once a kernel is compiled, the package asks the GPU how many blocks run at once: that ends a call."""
    import_module("cutlass").utils.HardwareInfo = _needs_gpu


def _needs_gpu(*about: Any) -> Any:
    raise LaunchReached


# Tiles go to whichever block is free, by a counter of four bytes that the package allocates and clears for each call.
# With a fixed share each, blocks that a collective keeps from starting would do all of theirs after it. Sums stay the
# same.
DYNAMIC = True


@cache
def config(tile: Tile) -> Any:
    """A configuration of its products; that tiles go to whichever block is free is said with each call."""
    rows, columns, turns = tile
    return import_module("quack.gemm_config").GemmConfig(
        tile_m=rows, tile_n=columns, pingpong=turns, cluster_m=2, cluster_n=1, is_dynamic_persistent=False,
        device_capacity=9,
    )  # fmt: skip


PLAIN_TILE: Tile = (128, 192, True)  # the package's own choice on Hopper, and the fastest where a product adds


def tile_of(columns: int) -> Tile:
    """For results of so many columns: the package's own choice on Hopper; another, where only that leaves no rest."""
    return (128, 256, False) if columns % 192 and columns % 256 == 0 else PLAIN_TILE


@dataclass(frozen=True, slots=True)
class Quack:
    """The products of package quack, written or added to where they belong, fp32 too."""

    load: Callable[[], Any] = library
    configure: Callable[[Tile], Any] = config
    tile: Callable[[int], Tile] = tile_of

    def rows(self, a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor, add: bool) -> None:
        """Written into `out`, or added to it: a tile reads what it then overwrites."""
        how = self.configure(PLAIN_TILE if add else self.tile(out.shape[1]))
        self.load().gemm_tuned.fn(
            a, b, out, out if add else None, config=how, cu_seqlens_m=offsets, dynamic_scheduler=DYNAMIC
        )

    def sums(self, a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, into: torch.Tensor, add: bool) -> None:
        """Written `into` the bucket, or added by its stores."""
        how = self.configure(self.tile(into.shape[2]))
        self.load().gemm_tuned.fn(
            a, b, into, config=how, cu_seqlens_k=offsets, add_to_output=add, dynamic_scheduler=DYNAMIC
        )


WITHOUT_GPU = {"QUACK": quack_without_gpu(_load)}
PACKAGES = {"QUACK": _load}  # imported before a run's first step
EMULATED = {"expert_linear": expert_products(MadeBeside(emulated))}
QUACK = {"expert_linear": expert_products(Quack()), "expert_pair": expert_pair_products(Quack())}
