"""Where does the memory of an 8B model go? A handful of layouts on 8 GPUs of 80 GiB, priced without torch.

Every number is counted from the program that the engine would walk, with its reference bodies: their attention makes
the scores in full. Optimizer state is whole on each data rank: only tp, pp and ep cut it.

    python examples/05_an_8b_model.py
"""

from __future__ import annotations

import sys
from dataclasses import replace

from penteract import Cluster, Estimate, Layout, estimate
from penteract.spec.catalog.models import LLAMA_3_1_8B

S = 8192
NODE = Cluster(name="8 GPUs of 80 GiB", gpus=8, memory_gib=80)
BASE = Layout(gradient_accumulation_steps=8)
LAYOUTS = {
    "dp=8": replace(BASE, dp=8, gradient_accumulation_steps=1),
    "dp=4 tp=2": replace(BASE, dp=4, tp=2, gradient_accumulation_steps=2),
    "dp=2 tp=4": replace(BASE, dp=2, tp=4, gradient_accumulation_steps=4),
    "tp=8": replace(BASE, tp=8),
    "tp=4 cp=2": replace(BASE, tp=4, cp=2),
    "tp=4 pp=2": replace(BASE, tp=4, pp=2),
    "tp=2 pp=4": replace(BASE, tp=2, pp=4),
    "tp=2 pp=4, remade": replace(BASE, tp=2, pp=4, remake=("*",)),
}


def peak_at(e: Estimate) -> str:
    """The line of the program during which the fullest rank is fullest."""
    return max(e.stages, key=lambda s: s.allocated).peak_at


def main() -> None:
    kinds = ("parameters", "gradients", "optimizer", "activations")
    print(f"{LLAMA_3_1_8B.name}, bf16, 8 sequences of {S} tokens a step, on {NODE.name}; GiB on the fullest rank")
    print(f"{'':20}" + "".join(f"{kind:>13}" for kind in kinds) + f"{'all':>9}  fits  fullest at")
    found: dict[str, Estimate] = {}
    for name, layout in LAYOUTS.items():
        e = found[name] = estimate(LLAMA_3_1_8B, layout, NODE, sequence_length=S, precision="bf16")
        row = "".join(f"{e.memory_gib[kind]:13.2f}" for kind in kinds)
        print(f"{name:20}{row}{e.allocated_gib:9.2f}  {'yes' if e.fits else 'no':4}  {peak_at(e)}")

    assert {e.tokens for e in found.values()} == {8 * S}, "every layout trains on the same batch"
    assert not found["dp=8"].fits, "16 bytes a parameter of state alone are more than one GPU has"
    assert found["tp=8"].fits
    assert found["tp=2 pp=4, remade"].memory_gib["activations"] < found["tp=2 pp=4"].memory_gib["activations"]
    whole = {e.flops for name, e in found.items() if "remade" not in name}
    assert len(whole) == 1, "how work is cut changes none of it"
    assert "torch" not in sys.modules


if __name__ == "__main__":
    main()
