"""The time of pointwise kernels whose tensors differ in memory layout, by size: medians from profiles of whole steps.

    python benchmarks/walked_kernels.py step_profile.json > benchmarks/results/walked_kernels_h200.json

The argument is what `benchmarks/step_profile.py` wrote for Llama-3-8B: all kernels of each case, with the part of the step
that launched them. Used are products of a bf16 tensor with an fp32 tensor that is broadcast along it: the first of two such
kernels of `forward rms_norm` (x·scale), and two of the six of `forward rope` (the first of each half). The cases are data
and tensor parallelism, in which least else runs during compute.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from provenance import provenance

KERNEL = "void at::native::elementwise_kernel<128, 4"
CASES = {"zero1": 1, "tp": 2}  # the number of ranks over which tokens or features of a layer are sharded
WIDTH, KV_WIDTH = 4096, 1024


def products(kernels: list[list[Any]], tokens: int, ranks: int) -> Iterator[tuple[int, float]]:
    """(elements, µs) of each kernel. With r ranks, a norm has 1/r of the tokens. RoPE has 1/r of the heads, first of q, then
    of k."""
    launched = defaultdict[str, list[float]](list)
    for _, part, name, _, us in kernels:
        if name.startswith(KERNEL):
            launched[part.partition(" (")[0]].append(us)
    yield from ((tokens * WIDTH // ranks, us) for us in launched["forward rms_norm"][::2])
    for at, us in enumerate(launched["forward rope"][::3]):
        yield tokens * (KV_WIDTH if at // 2 % 2 else WIDTH) // 2 // ranks, us


def main() -> None:
    """Print the record."""
    profiles: Mapping[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    by_size = defaultdict[int, list[float]](list)
    for case, ranks in CASES.items():
        for profile in profiles["cases"][case]["profile"]:
            for elements, us in products(profile["kernels"], profiles["sequence_length"], ranks):
                by_size[elements].append(us)
    points = [[n, round(statistics.median(by_size[n]), 2), len(by_size[n])] for n in sorted(by_size)]
    about = {key: profiles[key] for key in ("device", "torch", "date")}
    print(json.dumps({**provenance("python benchmarks/walked_kernels.py step_profile.json"), **about,
                      "walked: elements, µs, kernels": points}, ensure_ascii=False))  # fmt: skip


if __name__ == "__main__":
    main()
