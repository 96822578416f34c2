"""Declaration of torch's FlashAttention-2 (Dao 2023, 2307.08691), which takes documents that share a sequence."""

from __future__ import annotations

from collections.abc import Sequence

from penteract.config.rules.kernel_limits import most_documents
from penteract.ops.declarations.declaration import BOOL, FLOAT, Attrs, FusedKernel, Shape
from penteract.ops.declarations.fused_attention.fused import RANDOM, STATE, FusedAttention
from penteract.ops.spec import Widths

INT = 4  # bytes of the end offset of a document
BLOCK = 128  # rows of padding between documents in the kernel's sums


def made_lists(n: int) -> tuple[int, int]:
    """Bytes of making the two lists of where the documents of n query tokens end, at worst; and of both."""
    count = most_documents(n)
    ends = (count + 2) * INT
    return max(2 * ends, ends + (n - 1) * INT + max((n - 1) * BOOL, count * INT)), 2 * ends


def query_tokens(s: int, t: int) -> int:
    """Query tokens of one call. A context rank with gathered keys makes one call for each of its two chunks."""
    return s if s == t else s // 2


class FlashAttention(FusedAttention):
    """One call for each sequence and chunk of queries."""

    speed: FusedKernel = "flash"

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        (s, b, width), (t, _, kv_width), size = ins[0], ins[1], attrs["head_size"]
        heads, n, compute = width // size, query_tokens(s, t), widths["compute"]
        made, lists = made_lists(n)
        restored = self.restored(phase, ins, attrs, widths) + self.ulysses * s * b * widths["index"]  # starts too
        out, log_sum = n * heads * attrs["value_size"] * compute, n * heads * FLOAT
        if phase == "forward":
            return restored + max(made, lists + out + log_sum + RANDOM)
        apart = n + BLOCK * (most_documents(n) + 1)
        sums = apart * heads * (-size % 32 + size + 1) * FLOAT  # of dq, and of o times its gradient
        results = (n * width + t * (kv_width + ins[2][2])) * compute
        shared = t * (width + heads * attrs["value_size"]) * compute if kv_width < width else 0  # by query head
        part = (log_sum if n < s else 0) + (2 * out if b > 1 else 0)  # of several sequences, o and its gradient too
        return restored + max(made, lists + part + STATE + results + sums + shared)
