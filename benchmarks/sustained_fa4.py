"""One Hopper GPU: sustained rates of FlashAttention-4 on a hot device, beside cuDNN's attention in the same rounds.

    python benchmarks/sustained_fa4.py --date 2026-11-23 > benchmarks/results/sustained_fa4_h200.json

As `sustained.py`: large products run before each op. The FLOPs are those of the causal half. The record has microseconds of
forward and backward: medians over rounds. The package's functions write into tensors that are there before.
"""

from __future__ import annotations

import argparse
import json
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch
from sustained import ATTENTION, Op, attention, hot, product

MORE = [  # batch, heads, KV heads, sequence, head size
    (2, 32, 8, 8192, 128), (4, 32, 4, 4096, 128), (1, 32, 8, 16384, 64), (1, 32, 8, 32768, 64), (1, 32, 8, 8192, 64),
    (4, 32, 8, 2048, 64), (1, 32, 8, 131072, 128),
]  # fmt: skip


def fa4(batch: int, heads: int, kv_heads: int, length: int, size: int) -> tuple[Op, Op]:
    """Forward and backward of causal attention."""
    library: Any = import_module("flash_attn.cute.interface")
    q, k, v, out, g = (torch.randn(batch, length, h, size, device="cuda", dtype=torch.bfloat16)
                       for h in (heads, kv_heads, kv_heads, heads, heads))  # fmt: skip
    log_sum = torch.empty(batch, heads, length, device="cuda")
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    about = {"softmax_scale": size**-0.5, "causal": True}

    def forward() -> None:
        library._flash_attn_fwd(q, k, v, **about, return_lse=True, out=out, lse=log_sum)

    def backward() -> None:
        library._flash_attn_bwd(q, k, v, out, g, log_sum, **about, dq=dq, dk=dk, dv=dv)

    forward()
    return forward, backward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--date", required=True, help="for the record")
    parser.add_argument("--commit", default="")
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds of all rounds")
    args = parser.parse_args()
    shapes = [*ATTENTION, *MORE]
    pairs = [fa4(*shape) for shape in shapes] + [attention(*shape) for shape in shapes[:-1]]
    found = hot([op for pair in pairs for op in pair], product("bf16", 1, 8192, 8192, 8192), args.seconds)
    rows = [[*shape, found[2 * i], found[2 * i + 1]] for i, shape in enumerate([*shapes, *shapes[:-1]])]
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda,
             "flash-attn-4": version("flash-attn-4"), "cudnn": torch.backends.cudnn.version(), "date": args.date,
             "commit": args.commit}  # fmt: skip
    print(json.dumps(about | {"fa4": rows[: len(shapes)], "cudnn_attention": rows[len(shapes) :]}))


if __name__ == "__main__":
    main()
