"""Muon: the momentum of every matrix between hidden states is made orthogonal, and AdamW moves all else.

Jordan 2024 (kellerjordan.github.io/posts/muon) for the iteration; Liu 2025 (2502.16982) §2.2, eq. 4, for the scale
0.2·√max(rows, columns), with which an update's root mean square is AdamW's, so that one rate and one decay serve both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penteract.config.precision.policy import Policy
from penteract.engine.comm.comm import Comm
from penteract.engine.dtypes import DTYPES
from penteract.engine.executor.state import Flat
from penteract.engine.optim.optimizer import AdamW, Factors
from penteract.parallel.data import Bucket
from penteract.parallel.matrix import Matrix
from penteract.step import muon, update

_LEAST = 1e-7  # a smaller norm counts as this


@dataclass(slots=True, kw_only=True)
class Muon(AdamW):
    """Buckets of matrices by Muon, the others by AdamW. Ranks that hold a bucket share the work on its matrices."""

    comm: Comm
    policy: Policy

    def update(self, flat: Flat, factors: Factors) -> None:
        """One step of a shard's parameters. Of a bucket of matrices it is a collective of all who have some of them."""
        b = flat.bucket
        if not b.optimizer_kind.by_matrix:
            return AdamW.update(self, flat, factors)
        whole = torch.empty(b.size, dtype=DTYPES[self.policy.products], device=flat.master.device)
        own = whole[flat.shard.start : flat.shard.stop] if b.shards > 1 else whole
        parts = list(update.parts(len(own)))
        for part in parts:
            self._average(flat, part, own[part], factors)
        if b.shards > 1:
            self.comm.finish(self.comm.start("all_gather", b.shard_ranks, own, whole, {}))
        self._deal(b, whole)
        if b.shards > 1:  # in place: the rest of the buffer is of no use then
            self.comm.finish(self.comm.start("reduce_scatter", b.shard_ranks, whole, own, {}))
        else:
            self.comm.finish(self.comm.sum(b.replicate_ranks, whole))
        for part in parts:
            self._apply(flat, part, own[part], factors)
        flat.follow()
        return None

    def _average(self, flat: Flat, part: slice, into: torch.Tensor, factors: Factors) -> None:
        """Elements of the momentum move on; what is to be made orthogonal goes `into`."""
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

    def _deal(self, b: Bucket, whole: torch.Tensor) -> None:
        """This rank's matrices in `whole` [size], made orthogonal and scaled; zeros in place of the others'."""
        mine = muon.own(b, self.comm.rank)
        room = torch.empty(muon.workspace_elements(b), dtype=whole.dtype, device=whole.device)
        for m in mine:
            self._one(b, m, whole[m.slice.start : m.slice.stop].view(m.local), room)
        for m in {*b.matrices}.difference(mine):
            whole[m.slice.start : m.slice.stop].zero_()

    def _one(self, b: Bucket, m: Matrix, own: torch.Tensor, room: torch.Tensor) -> None:
        """`own`: the rank's slice of one matrix. Its peers have the others, and do the same at the same time."""
        scale, n = 0.2 * max(m.shape) ** 0.5, m.shape[0] * m.shape[1]
        if m.cut < 0:
            x, spare, rest = own, room[:n], room[n:]
        else:
            landing, spare, rest = room[:n], room[n : 2 * n], room[2 * n :]
            self.comm.finish(self.comm.start("all_gather", b.peers, own.reshape(-1), landing, {}))
            x = landing.view(m.shape)
            if m.cut == 1:
                x, spare = spare.view(m.shape), landing
                x.view(m.shape[0], m.peers, -1).copy_(landing.view(m.peers, *m.local).movedim(0, 1))
        made = orthogonal(x, spare, rest, b.optimizer_kind.steps)
        if m.cut >= 0:
            made = made.narrow(m.cut, b.peers.index(self.comm.rank) * m.local[m.cut], m.local[m.cut])
        torch.mul(made, scale, out=own)

    def _apply(self, flat: Flat, part: slice, moved: torch.Tensor, factors: Factors) -> None:
        """Decay, and one step along `moved`."""
        dtype = factors.good.dtype
        wide, master = moved.to(dtype), flat.master[part].to(dtype)
        if flat.bucket.decay:
            master.mul_(factors.decay)
        master.sub_(wide.mul_(factors.good * self.rate.to(dtype)))
        del wide
        self._put(flat, part, master)


def orthogonal(x: torch.Tensor, spare: torch.Tensor, room: torch.Tensor, steps: int) -> torch.Tensor:
    """x [R, C] -> near its nearest matrix with orthogonal rows or columns: singular values between 0.7 and 1.2.

    A quintic of x, so singular vectors stay. x is lost; spare [R·C]; room [2·min(R, C)²].
    """
    wide = x.mT if x.shape[0] > x.shape[1] else x
    short, (a, b, c) = wide.shape[0], muon.QUINTIC
    other, (gram, square) = spare.view(wide.shape), room[: 2 * short * short].view(2, short, short)
    x.div_(torch.linalg.vector_norm(x, dtype=_widest(x)).clamp_(min=_LEAST))
    for _ in range(steps):
        torch.mm(wide, wide.mT, out=gram)
        torch.addmm(gram, gram, gram, beta=b, alpha=c, out=square)
        torch.addmm(wide, square, wide, beta=a, out=other)
        wide, other = other, wide
    return wide.mT if x.shape[0] > x.shape[1] else wide


def _widest(x: torch.Tensor) -> torch.dtype:
    """In which squares add up."""
    return torch.promote_types(x.dtype, torch.float32)
