"""Muon: orthogonalised momentum for every matrix between hidden states, and AdamW for all other parameters.

Jordan 2024 (kellerjordan.github.io/posts/muon) for the iteration; Liu 2025 (2502.16982) §2.2, eq. 4, for the scale
0.2·√max(rows, columns). With it an update has the root mean square of AdamW's, so one learning rate and one decay serve
both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from penteract.config.precision.policy import Policy
from penteract.engine.comm.comm import Comm
from penteract.engine.dtypes import DTYPES
from penteract.engine.optim.optimizer import AdamW, Factors
from penteract.engine.state.state import Flat
from penteract.parallel.data import Bucket
from penteract.parallel.matrix import Matrix
from penteract.step import muon, update

_LEAST = 1e-7  # a smaller norm counts as this


class FusedPasses(Protocol):
    """What a fused kernel does before and after matrices are made orthogonal: `engine/optim/matrix_update.py`."""

    def update_momentum(self, flat: Flat, into: torch.Tensor, factors: Factors) -> None:
        """As `Muon.update_momentum`."""
        ...

    def apply(
        self, flat: Flat, direction: torch.Tensor, factors: Factors, rate: torch.Tensor, step: torch.Tensor,
        nonfinite: torch.Tensor,
    ) -> None:  # fmt: skip
        """As `Muon.apply`; `rate`, `step` and `nonfinite` are those of `AdamW`."""
        ...


@dataclass(slots=True, kw_only=True)
class Muon(AdamW):
    """Updates buckets of matrices by Muon, the others by AdamW. Ranks that hold a bucket divide its matrices among
    them. `passes`: fused ones over a shard, used instead of torch ops on slices."""

    comm: Comm
    policy: Policy
    passes: FusedPasses | None = None

    def update(self, flat: Flat, factors: Factors) -> None:
        """Update a shard's parameters. For a bucket of matrices this is a collective of all ranks that hold parts of
        it."""
        b = flat.bucket
        if not b.optimizer_kind.by_matrix:
            return AdamW.update(self, flat, factors)
        whole = torch.empty(b.size, dtype=DTYPES[self.policy.products], device=flat.master.device)
        own = whole[flat.shard.start : flat.shard.stop] if b.shards > 1 else whole
        self.update_momentum(flat, own, factors)
        if b.shards > 1:
            self.comm.finish(self.comm.start("all_gather", b.shard_ranks, own, whole, {}))
        self._orthogonalise_own(b, whole)
        if b.shards > 1:  # in place: the rest of the buffer is not used afterwards
            self.comm.finish(self.comm.start("reduce_scatter", b.shard_ranks, whole, own, {}))
        else:
            self.comm.finish(self.comm.sum(b.replicate_ranks, whole))
        self.apply(flat, own, factors)
        return None

    def update_momentum(self, flat: Flat, into: torch.Tensor, factors: Factors) -> None:
        """Update the momentum; the values to orthogonalise go `into`."""
        if self.passes is not None:
            return self.passes.update_momentum(flat, into, factors)
        for part in update.parts(len(into)):
            self._update_slice_of_momentum(flat, part, into[part], factors)
        return None

    def apply(self, flat: Flat, direction: torch.Tensor, factors: Factors) -> None:
        """Apply weight decay, and one step along `direction`."""
        if self.passes is not None:
            return self.passes.apply(flat, direction, factors, self.rate, self.step, self.nonfinite)
        for part in update.parts(len(direction)):
            self._apply_slice(flat, part, direction[part], factors)
        return flat.copy_from_master()

    def _update_slice_of_momentum(self, flat: Flat, part: slice, into: torch.Tensor, factors: Factors) -> None:
        dtype, weight = factors.good.dtype, self.spec.muon_momentum
        g = flat.own_gradient[part].to(dtype)
        g.nan_to_num_(0.0, 0.0, 0.0).mul_(factors.gradient)
        momentum = flat.read("momentum", part, dtype).lerp_(g, factors.good * (1 - weight))
        if not self.spec.muon_nesterov:
            into.copy_(momentum)
        elif into.dtype == dtype:
            torch.lerp(g, momentum, weight, out=into)
        else:
            into.copy_(g.lerp(momentum, weight))
        del g
        flat.write("momentum", part, momentum)

    def _orthogonalise_own(self, b: Bucket, whole: torch.Tensor) -> None:
        """Orthogonalise and scale this rank's matrices in `whole` [size]; the other matrices become zeros."""
        mine = muon.own(b, self.comm.rank)
        workspace = torch.empty(muon.workspace_elements(b), dtype=whole.dtype, device=whole.device)
        for m in mine:
            self._orthogonalise(b, m, whole[m.slice.start : m.slice.stop].view(m.local), workspace)
        for m in {*b.matrices}.difference(mine):
            whole[m.slice.start : m.slice.stop].zero_()

    def _orthogonalise(self, b: Bucket, m: Matrix, own: torch.Tensor, workspace: torch.Tensor) -> None:
        """Orthogonalise one matrix. `own`: this rank's slice of it. Its peers have the other slices and do the same."""
        scale, n = 0.2 * max(m.shape) ** 0.5, m.shape[0] * m.shape[1]
        if m.cut < 0:
            x, spare, rest = own, workspace[:n], workspace[n:]
        else:
            gathered, spare, rest = workspace[:n], workspace[n : 2 * n], workspace[2 * n :]
            self.comm.finish(self.comm.start("all_gather", b.peers, own.reshape(-1), gathered, {}))
            x = gathered.view(m.shape)
            if m.cut == 1:
                x, spare = spare.view(m.shape), gathered
                x.view(m.shape[0], m.peers, -1).copy_(gathered.view(m.peers, *m.local).movedim(0, 1))
        made = orthogonal(x, spare, rest, b.optimizer_kind.steps)
        if m.cut >= 0:
            made = made.narrow(m.cut, b.peers.index(self.comm.rank) * m.local[m.cut], m.local[m.cut])
        torch.mul(made, scale, out=own)

    def _apply_slice(self, flat: Flat, part: slice, direction: torch.Tensor, factors: Factors) -> None:
        dtype = factors.good.dtype
        wide, master = direction.to(dtype), flat.read("master", part, dtype)
        if flat.bucket.decay:
            master.mul_(factors.decay)
        master.sub_(wide.mul_(factors.good * self.rate.to(dtype)))
        del wide
        self._put(flat, part, master)


def orthogonal(x: torch.Tensor, spare: torch.Tensor, workspace: torch.Tensor, steps: int) -> torch.Tensor:
    """x [R, C] -> approximately the nearest matrix with orthonormal rows or columns: singular values between 0.7 and
    1.2.

    The iteration is a quintic in x, so singular vectors stay. x is lost; spare [R·C]; workspace [2·min(R, C)²].
    """
    wide = x.mT if x.shape[0] > x.shape[1] else x
    short, (a, b, c) = wide.shape[0], muon.QUINTIC
    other, (gram, square) = spare.view(wide.shape), workspace[: 2 * short * short].view(2, short, short)
    x.div_(torch.linalg.vector_norm(x, dtype=_widest(x)).clamp_(min=_LEAST))
    for _ in range(steps):
        torch.mm(wide, wide.mT, out=gram)
        torch.addmm(gram, gram, gram, beta=b, alpha=c, out=square)
        torch.addmm(wide, square, wide, beta=a, out=other)
        wide, other = other, wide
    return wide.mT if x.shape[0] > x.shape[1] else wide


def _widest(x: torch.Tensor) -> torch.dtype:
    """The dtype in which squares are summed."""
    return torch.promote_types(x.dtype, torch.float32)
