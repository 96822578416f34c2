"""Declarations of FlashAttention-4 (package flash-attn-4), which writes its results into the given registers.

On Hopper its kernels are those of FlashAttention-3 (Shah et al. 2024, 2407.08608), compiled at first use. The workspace
here follows from the allocations in their source, for compute capability 9.0 and head sizes up to 128. All sizes are in
bytes, unless a name says otherwise.

Shapes: queries [s, b, heads · head size], keys and values [t, b, …]; `t` is larger than `s` where a context rank has
gathered the keys of all ranks. A call's own order of tokens is that of the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penteract.config.rules.kernel_limits import most_documents
from penteract.ops.declarations.declaration import FLOAT, Attrs, CallShapes, FusedKernel, Registers, Shape, WorkRates
from penteract.ops.declarations.fused_attention.flash import INT, made_lists, query_tokens
from penteract.ops.declarations.fused_attention.fused import FusedAttention
from penteract.ops.spec import Widths
from penteract.units import Seconds

KEY_BLOCK = 128  # keys of a tile of backward's kernel
LISTED_ABOVE = 256  # a call of more documents than this makes lists in which each tile finds its document


def _round_up(n: int, block: int) -> int:
    """The least multiple of `block` that is at least `n`."""
    return -(-n // block) * block


def query_block(head_size: int, *, forward: bool) -> int:
    """Query tokens of a kernel's tile under a causal mask or a window."""
    if forward:
        return 192 if head_size <= 96 else 128
    return 128 if head_size <= 64 else 64


class _Heads(NamedTuple):
    """How many heads queries and keys have on this rank, and their size. `padded`: their size in the sums of
    backward."""

    queries: int
    keys: int
    size: int

    @property
    def padded(self) -> int:
        return _round_up(self.size, 32)

    @staticmethod
    def of(ins: Sequence[Shape], attrs: Attrs) -> _Heads:
        size = attrs["head_size"]
        return _Heads(ins[0][2] // size, ins[1][2] // size, size)


def _backward_sums(heads: _Heads, queries: int, keys: int) -> int:
    """Bytes of what backward accumulates in fp32, for one sequence of so many query and key tokens, padded to tiles:
    the gradient of q, the row sums of o times its gradient, and the log-sum-exp to base 2. With grouped queries, the
    gradients of k and v too."""
    shared = 2 * heads.keys * keys * heads.padded if heads.keys < heads.queries else 0
    return (heads.queries * queries * (heads.padded + 2) + shared) * FLOAT


class Fa4(FusedAttention):
    """What the declarations with and without documents have in common."""

    speed: FusedKernel = "fa4"
    # Of backward, to what it takes otherwise: 1.04 to 1.17 alone, and 1.02 to 1.09 in a step (`same_bits_h200.json`).
    slower_in_order = 1.05

    def cost(self, rates: WorkRates, call: CallShapes, widths: Widths, registers: Registers) -> tuple[str, Seconds]:
        part, seconds = super().cost(rates, call, widths, registers)
        return part, seconds * (self.slower_in_order if self.in_order and call.phase != "forward" else 1.0)

    def turns(self, heads: _Heads, sequences: int, queries: int, keys: int) -> int:
        """Bytes of what says whose turn it is to add, where backward adds in order: a number for each tile of queries
        of each head, and with grouped queries two for each tile of keys, for its gradients of k and of v. `queries`,
        `keys`: tokens of a sequence."""
        if not self.in_order:
            return 0
        of_keys = 4 * heads.keys * _round_up(keys, KEY_BLOCK) // KEY_BLOCK if heads.keys < heads.queries else 0
        block = query_block(heads.size, forward=False)
        return sequences * (heads.queries * _round_up(queries, block) // block + of_keys) * INT

    def reordered(self, phase: str, ins: Sequence[Shape], attrs: Attrs, widths: Widths) -> int:
        """Bytes of results that the kernel writes to temporaries in sequence order, because their registers have
        another order. With Ulysses: o and log-sum-exp in forward, the gradient of q in backward. With Ulysses or
        gathered keys: the gradients of k and v."""
        (s, b, width), (t, _, kv_width), compute = ins[0], ins[1], widths["compute"]
        o = s * b * width // attrs["head_size"] * attrs["value_size"] * compute
        if phase == "forward":
            return self.ulysses * (o + b * width // attrs["head_size"] * s * FLOAT)
        shared = t * b * (kv_width + ins[2][2]) * compute if self.ulysses or s < t else 0
        return self.ulysses * s * b * width * compute + shared


class Fa4Attention(Fa4):
    """Attention without documents: one call for all sequences of the micro-batch."""

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        copies = self.restored(phase, ins, attrs, widths) + self.reordered(phase, ins, attrs, widths)
        if phase == "forward":
            return copies
        (s, b, _), t, heads = ins[0], ins[1][0], _Heads.of(ins, attrs)
        rows = _round_up(s, query_block(heads.size, forward=False))
        return copies + b * _backward_sums(heads, rows, _round_up(t, KEY_BLOCK)) + self.turns(heads, b, s, t)


class Fa4Documents(Fa4):
    """Attention within packed documents: one call for each sequence, and of a context rank for each of its chunks of
    queries. The call gets the ends of the documents in it."""

    # Of what whole sequences take, as prices know no documents: in a step 1.04 where eight share one, 1.12 where four.
    slower_in_order = 1.1

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        (s, b, _), t, heads = ins[0], ins[1][0], _Heads.of(ins, attrs)
        n = query_tokens(s, t)
        making, lists = made_lists(n)  # at the peak while the ends of documents are computed, and of the ends
        starts = self.ulysses * s * b * widths["index"]  # where documents start, in sequence order
        restored = self.restored(phase, ins, attrs, widths) + starts
        one = [(rows, 1, width) for rows, _, width in ins[:3]]  # shapes of one sequence
        calling = lists + self.reordered(phase, one, attrs, widths) + self._document_lists(phase, n, heads)
        if phase == "forward":
            return restored + max(making, calling)
        # The log-sum-exp is copied if it is that of a chunk, or if a sequence's is not aligned to 16 bytes.
        log_sum = heads.queries * n * FLOAT
        copied = n < s or (b > 1 and heads.queries * s % 4)
        block, ends = query_block(heads.size, forward=False), most_documents(n) + 2
        rows, keys = ((m + ends * by - 1) // by * by for m, by in ((n, block), (t, KEY_BLOCK)))
        calling += (log_sum if copied else 0) + self.turns(heads, most_documents(n) + 1, n, t)
        return restored + max(making, calling + _backward_sums(heads, rows, keys))

    def _document_lists(self, phase: str, n: int, heads: _Heads) -> int:
        """Bytes of the lists in which tiles find their document, where `n` query tokens may hold so many that the call
        makes them."""
        count = most_documents(n) + 1
        if count <= LISTED_ABOVE:
            return 0
        if phase != "forward":
            return 2 * (count + 1) * INT
        block, queries_per_key = query_block(heads.size, forward=True), heads.queries // heads.keys
        return (count + 1 + (n * queries_per_key + count * (block - 1)) // block + 1) * INT
