"""Texts of the command line that count tokens: the length of a sequence, and the batch of a step."""

from __future__ import annotations

import re

from penteract.errors import BadInput
from penteract.units import parse_count


def parse_length(text: str) -> int:
    """The tokens of a sequence, from `8192` or `8Ki`. Raises BadInput, for `8k` too: to many that is
    8192."""
    if thousands := re.fullmatch(r"\s*(\d{1,9})[kK]\s*", text, re.ASCII):
        number = int(thousands[1])
        raise BadInput("VALUE", "two lengths go by that", where="--seq", found=text,
                       allowed=f"{number}Ki ({number * 2**10} tokens), {number * 1000}",
                       fix=f"--seq {number}Ki")  # fmt: skip
    try:
        return parse_count(text)
    except ValueError:
        raise BadInput("VALUE", "no length of a sequence", where="--seq", found=text[:40],
                       allowed="tokens: 8192, or 8Ki", fix="--seq 8192") from None  # fmt: skip


def parse_batch(text: str, sequence_length: int) -> int:
    """The sequences of a step, from `1Mi` (tokens) or `128seqs`. Raises BadInput with the nearest batches."""
    number, sequences = text.strip(), False
    for unit in ("seqs", "sequences", "seq"):
        if number.endswith(unit):
            number, sequences = number.removesuffix(unit), True
            break
    try:
        count = parse_count(number)
    except ValueError:
        raise BadInput(
            "BATCH", "not a batch", where="--batch", found=text, allowed="tokens (1Mi) or sequences (128seqs)",
            fix="--batch 1Mi",
        ) from None  # fmt: skip
    if count < 1:
        raise BadInput("BATCH", "an empty batch", where="--batch", found=text, fix="--batch 1Mi")
    if sequences:
        return count
    if count % sequence_length:
        below = count // sequence_length
        if not below:  # who writes a bare number may mean sequences
            one = f"{sequence_length}" if number[-1:].isalpha() else f"{count}seqs"
            raise BadInput("BATCH", f"less than a sequence of {sequence_length} tokens", where="--batch", found=count,
                           allowed=f"{sequence_length} tokens, or sequences", fix=f"--batch {one}")  # fmt: skip
        near = [n * sequence_length for n in (below, below + 1) if n]
        fix = f"--batch {_binary(number, sequence_length)}{near[0] // sequence_length}seqs"
        raise BadInput(
            "BATCH", f"no whole number of sequences of {sequence_length} tokens", where="--batch", found=count,
            allowed=", ".join(map(str, near)), fix=fix,
        )  # fmt: skip
    return count // sequence_length


def _binary(number: str, sequence_length: int) -> str:
    """`1Mi (2^20), or ` for `1M`, where that is a whole number of sequences."""
    power = {"k": 10, "M": 20, "G": 30}.get(number[-1])
    if power is None or parse_count(f"{number}i") % sequence_length:
        return ""
    count = number[:-1].strip()
    return f"{number}i ({f'{count}·' * (count != '1')}2^{power}), or "
