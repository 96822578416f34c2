"""Where does the memory of an 8B model go? A handful of layouts on 8 GPUs of 80 GiB, priced without torch.

Every number is counted from the program that the engine would walk. tp, pp and ep cut what is trained; zero=1 cuts the
optimizer's state over data and context ranks too; fused attention never makes the scores, plain torch makes them whole.

    python examples/05_an_8b_model.py
"""

from __future__ import annotations

import sys
from dataclasses import replace

from penteract import Cluster, Estimate, Layout, estimate
from penteract.config import catalog

S = 8192
MODEL = catalog.model("llama-3.1-8b")
NODE = Cluster(name="8 GPUs of 80 GiB", gpus=8, memory_gib=80)
BASE = Layout(gradient_accumulation_steps=8, attention="flash")
LAYOUTS = {
    "dp=8": replace(BASE, dp=8, gradient_accumulation_steps=1),
    "dp=8 zero=1": replace(BASE, dp=8, zero=1, gradient_accumulation_steps=1),
    "dp=4 tp=2": replace(BASE, dp=4, tp=2, gradient_accumulation_steps=2),
    "dp=4 tp=2 zero=1": replace(BASE, dp=4, tp=2, zero=1, gradient_accumulation_steps=2),
    "dp=2 tp=4": replace(BASE, dp=2, tp=4, gradient_accumulation_steps=4),
    "tp=8": replace(BASE, tp=8),
    "tp=4 cp=2": replace(BASE, tp=4, cp=2),
    "tp=4 pp=2": replace(BASE, tp=4, pp=2),
    "tp=2 pp=4": replace(BASE, tp=2, pp=4),
    "tp=2 pp=4, recomputed": replace(BASE, tp=2, pp=4, recompute=("*",)),
    "tp=8, plain torch": replace(BASE, tp=8, attention="reference"),
}


def peak_at(e: Estimate) -> str:
    """The line of the program during which the fullest rank is fullest."""
    return max(e.by_pp_rank, key=lambda s: s.allocated).peak_at


def main() -> None:
    kinds = ("parameters", "gradients", "optimizer", "activations", "workspace")
    print(f"{MODEL.name}, bf16, 8 sequences of {S} tokens a step, on {NODE.name}; GiB on the fullest rank")
    print(f"{'':22}" + "".join(f"{kind:>13}" for kind in kinds) + f"{'all':>9}  fits  fullest at")
    found: dict[str, Estimate] = {}
    for name, layout in LAYOUTS.items():
        e = found[name] = estimate(MODEL, layout, NODE, sequence_length=S, precision="bf16")
        row = "".join(f"{e.memory_gib[kind]:13.2f}" for kind in kinds)
        print(f"{name:22}{row}{e.allocated_gib:9.2f}  {'yes' if e.fits else 'no':4}  {peak_at(e)}")

    assert {e.tokens for e in found.values()} == {8 * S}, "every layout trains on the same batch"
    assert not found["dp=8"].fits, "16 bytes a parameter of state alone are more than one GPU has"
    assert found["tp=8"].fits
    assert found["tp=2 pp=4, recomputed"].memory_gib["activations"] < found["tp=2 pp=4"].memory_gib["activations"]
    sharded, whole_state = found["dp=8 zero=1"].memory_gib, found["dp=8"].memory_gib
    assert sharded["optimizer"] < 0.13 * whole_state["optimizer"], "an eighth of the state each"
    assert found["tp=8, plain torch"].memory_gib["workspace"] > found["tp=8"].memory_gib["workspace"]
    whole = {e.flops for name, e in found.items() if "recomputed" not in name}
    assert len(whole) == 1, "how work is cut changes none of it"
    assert "torch" not in sys.modules


if __name__ == "__main__":
    main()
