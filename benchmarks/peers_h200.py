"""Plans of layouts that were measured with Megatron-LM on one node of eight H200s.

    python benchmarks/peers_h200.py > benchmarks/results/peers_h200.json

Measured: Megatron-LM core_v0.16.1 with TransformerEngine 2.11, bf16, ZeRO-1 with fp32 gradients, no recomputation, torch
2.11, November 2026; medians of ten steps (four with a pipeline). Memory and traffic are predicted for this program, which
keeps other activations and uses other buckets. Pointwise ops are planned as one kernel each, as in Megatron-LM. So this
compares the model of time. Nothing is fitted to these rows, but GEMM and attention rates come from the same kind of node.
It takes about a second and needs no GPU.
"""

from __future__ import annotations

import json
from dataclasses import replace
from statistics import median

from provenance import provenance

from penteract import Layout
from penteract.config.catalog import model
from penteract.config.hardware import cluster
from penteract.measure.report.one_kernel_ops import fused, with_other_host
from penteract.planner.ask import as_text
from penteract.readings.estimator import Estimator
from penteract.units import gib

MEASURED_WITH = "Megatron-LM core_v0.16.1, TransformerEngine 2.11, torch 2.11, one node of 8 H200, November 2026"
LLAMA = model("llama-3.1-8b")
SMALL = replace(model("llama-3.2-1b"), name="1.5B", tied=False, layers=16)
EXPERTS = replace(model("qwen3-30b-a3b"), name="10.6B of 128 experts", layers=16)

# name, model, sequence length, layout, measured tokens/s/GPU, measured GiB allocated on the fullest rank
ROWS = (
    ("dp8", LLAMA, 8192, Layout(dp=8), 9875, 93.8),
    ("dp8, 1.5B", SMALL, 4096, Layout(dp=8, micro_batch_size=8), 60_769, 56.4),
    ("tp2 dp4", LLAMA, 8192, Layout(dp=4, tp=2, micro_batch_size=2), 9441, 70.9),
    ("tp4 dp2", LLAMA, 8192, Layout(dp=2, tp=4, micro_batch_size=2, gradient_accumulation_steps=2), 8416, 41.2),
    ("pp2 dp4", LLAMA, 8192, Layout(dp=4, pp=2, gradient_accumulation_steps=8), 9298, 68.6),
    ("ep8 dp8", EXPERTS, 4096, Layout(dp=8, ep=8, micro_batch_size=4), 24_223, 63.4),
)


def main() -> None:
    """Print the record."""
    rows: list[dict[str, object]] = []
    pairs: list[tuple[float, int]] = []
    for name, spec, length, layout, measured, memory in ROWS:
        layout = replace(layout, zero=1, attention="cudnn")
        estimator = Estimator(spec, with_other_host(cluster("8xH200")), sequence_length=length)
        with fused():
            estimate = estimator.estimate(layout)
            time = estimator.time(estimate)
        predicted = layout.global_batch_size * length / time.seconds / layout.world
        pairs.append((predicted, measured))
        rows.append({
            "row": name, "model": spec.name, "sequence_length": length, "layout": as_text(layout, Layout()),
            "gradient_accumulation_steps": layout.gradient_accumulation_steps, "attention": layout.attention,
            "measured_tokens_per_s_per_gpu": measured, "predicted": round(predicted), "ratio": round(predicted / measured, 3),
            "measured_gib": memory, "predicted_gib": round(gib(estimate.allocated), 1), "limited_by": time.limited_by,
            "parts_ms": {part: round(1e3 * s, 1) for part, s in time.parts.items() if s > 1e-6},
        })  # fmt: skip
    errors = sorted(abs(predicted / measured - 1) for predicted, measured in pairs)
    record = {
        **provenance("python benchmarks/peers_h200.py"), "measured_with": MEASURED_WITH,
        "median_off": round(median(errors), 3), "largest_off": round(errors[-1], 3), "rows": rows,
    }  # fmt: skip
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
