"""Declarations of FlashAttention-4 (package flash-attn-4), which writes into the registers that it is given.

On Hopper its kernels are those of FlashAttention-3 (Shah et al. 2024, 2407.08608), compiled at first use. What they
allocate is read off their source, for compute capability 9.0 and heads up to 128.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penteract.config.rules.kernel_limits import most_documents
from penteract.ops.declarations.declaration import FLOAT, Attrs, FusedKernel, Shape
from penteract.ops.declarations.fused_attention.flash import INT, made_lists, query_tokens
from penteract.ops.declarations.fused_attention.fused import FusedAttention
from penteract.ops.spec import Widths

KEY_BLOCK = 128  # keys of a tile, in backward
SEARCHED = 256  # sequences of a call above which it makes lists to find a tile's


def _up(n: int, block: int) -> int:
    return -(-n // block) * block


def query_block(head_size: int, *, forward: bool) -> int:
    """Query rows of a tile under a causal mask or a window."""
    if forward:
        return 192 if head_size <= 96 else 128
    return 128 if head_size <= 64 else 64


class _Heads(NamedTuple):
    """Heads of queries and of keys; their size, and as the sums of backward have it."""

    queries: int
    keys: int
    size: int

    @property
    def padded(self) -> int:
        return _up(self.size, 32)

    @staticmethod
    def of(ins: Sequence[Shape], attrs: Attrs) -> _Heads:
        size = attrs["head_size"]
        return _Heads(ins[0][2] // size, ins[1][2] // size, size)


def _sums(heads: _Heads, queries: int, keys: int) -> int:
    """Bytes of backward's fp32 sums, of so many rows: dq, o times its gradient, log-sum-exp to base 2; and where query
    heads share keys, dk and dv."""
    shared = 2 * heads.keys * keys * heads.padded if heads.keys < heads.queries else 0
    return (heads.queries * queries * (heads.padded + 2) + shared) * FLOAT


class Fa4(FusedAttention):
    """What both ways to call it have in common."""

    speed: FusedKernel = "fa4"

    def reordered(self, phase: str, ins: Sequence[Shape], attrs: Attrs, widths: Widths) -> int:
        """Bytes of what is made in the order of the sequence, because registers lie otherwise: results of rows where
        heads were dealt, gradients of keys and values where these are many ranks'."""
        (s, b, width), (t, _, kv_width), compute = ins[0], ins[1], widths["compute"]
        o = s * b * width // attrs["head_size"] * attrs["value_size"] * compute
        if phase == "forward":
            return self.ulysses * (o + b * width // attrs["head_size"] * s * FLOAT)
        shared = t * b * (kv_width + ins[2][2]) * compute if self.ulysses or s < t else 0
        return self.ulysses * s * b * width * compute + shared


class Fa4Attention(Fa4):
    """All sequences in one call."""

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        made = self.restored(phase, ins, attrs, widths) + self.reordered(phase, ins, attrs, widths)
        if phase == "forward":
            return made
        (s, b, _), t, heads = ins[0], ins[1][0], _Heads.of(ins, attrs)
        rows = _up(s, query_block(heads.size, forward=False))
        return made + b * _sums(heads, rows, _up(t, KEY_BLOCK))


class Fa4Documents(Fa4):
    """One call a sequence and chunk of queries, over the documents in it."""

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        (s, b, _), t, heads = ins[0], ins[1][0], _Heads.of(ins, attrs)
        n = query_tokens(s, t)
        made, lists = made_lists(n)
        restored = self.restored(phase, ins, attrs, widths) + self.ulysses * s * b * widths["index"]  # starts too
        one = [(rows, 1, width) for rows, _, width in ins[:3]]  # of one sequence
        called = lists + self.reordered(phase, one, attrs, widths) + self._searched(phase, n, heads)
        if phase == "forward":
            return restored + max(made, called)
        log_sum = heads.queries * n * FLOAT  # its copy: of a chunk, or where a sequence's does not lie at 16 bytes
        moved = n < s or (b > 1 and heads.queries * s % 4)
        block, ends = query_block(heads.size, forward=False), most_documents(n) + 2
        rows, keys = ((m + ends * by - 1) // by * by for m, by in ((n, block), (t, KEY_BLOCK)))
        return restored + max(made, called + (log_sum if moved else 0) + _sums(heads, rows, keys))

    def _searched(self, phase: str, n: int, heads: _Heads) -> int:
        """Bytes of the lists in which tiles find their document, where documents may be many."""
        count = most_documents(n) + 1
        if count <= SEARCHED:
            return 0
        if phase != "forward":
            return 2 * (count + 1) * INT
        block, together = query_block(heads.size, forward=True), heads.queries // heads.keys
        return (count + 1 + (n * together + count * (block - 1)) // block + 1) * INT
