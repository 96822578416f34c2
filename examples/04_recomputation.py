"""What to keep and what to make again: the price of each choice of `recompute`. No torch.

Recomputing is an edit of the tape, made before anything walks it, so it is priced exactly like the rest: what is made
again appears as forward work inside backward, and as traffic where a collective has to be repeated.

    python examples/04_recomputation.py
"""

from __future__ import annotations

import sys
from dataclasses import replace

from penteract import Layout
from penteract.config import catalog
from penteract.readings.price import Price, price
from penteract.step.program import compile_step
from penteract.units import show_bytes

S = 8192
WHOLE = catalog.model("llama-3.2-1b")
MODEL = replace(WHOLE, layers=4)  # a stage of the model: enough to see, quick to price
CHOICES: dict[str, tuple[str, ...]] = {
    "nothing": (),
    # The default: gather tokens again for the weight gradients, and keep a shard of them.
    "tp_all_gather": ("tp_all_gather",),
    "+ swiglu": ("tp_all_gather", "swiglu"),  # cheap to make, as large as the ffn
    "+ swiglu, norms": ("tp_all_gather", "swiglu", "rms_norm"),
    "+ attention": ("tp_all_gather", "swiglu", "rms_norm", "rope", "attention"),
    "a whole layer": ("*",),  # keep each layer's input alone
}


def priced(recompute: tuple[str, ...]) -> Price:
    """Rank 0 of tp=4."""
    return price(compile_step(MODEL, Layout(tp=4, recompute=recompute), S, precision="bf16"))


def main() -> None:
    prices = {name: priced(recompute) for name, recompute in CHOICES.items()}
    base = prices["nothing"]
    print(f"4 layers of {WHOLE.name}, {S} tokens, tp=4, bf16: one rank")
    print(f"{'recomputed':22}{'saved':>11}{'peak':>12}{'extra FLOPs':>13}{'extra comm':>12}")
    kept, work, wire = {}, {}, {}
    for name, p in prices.items():
        kept[name] = max(size for _, size in p.kept)
        work[name] = p.total_flops / base.total_flops - 1
        wire[name] = sum(p.wires.values()) / sum(base.wires.values()) - 1
        print(f"{name:22}{show_bytes(kept[name]):>11}{show_bytes(p.peak):>12}{work[name]:>13.1%}{wire[name]:>12.1%}")

    shrinking = list(kept.values())
    assert shrinking == sorted(shrinking, reverse=True) and len(set(shrinking)) == len(shrinking), "each saves less"
    gathered = "tp_all_gather"
    assert work[gathered] == 0 and wire[gathered] > 0, "recomputing a gather costs traffic, which hides under backward"
    assert work["+ swiglu, norms"] == 0, "only FLOPs of matrix products count: these ops have none"
    assert work["+ attention"] > 0
    assert "torch" not in sys.modules


if __name__ == "__main__":
    main()
