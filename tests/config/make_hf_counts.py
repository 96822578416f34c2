"""Count the catalogue's parameters with Hugging Face's own models: `PYTHONPATH=tests python -m spec.make_hf_counts`.

Writes hf_counts.json beside this file. Each config of published.py becomes a model on the meta device, which has shapes
and no memory, and its parameters are counted, tied ones once. Needs transformers; the counts were made with the version
that the file names.

transformers does not build the blocks that predict further. For them `mtp_layers` holds a count by their published
description (DeepSeek-V3 2412.19437 §2.2): two norms, a projection from twice the width, a block of the model's last
kind, and no table or head of their own; the block is counted as the difference between two depths. The norm before
the shared head is each block's own in the published weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from config.published import PUBLISHED


def counted(config: dict[str, Any]) -> int:
    """Parameters of the model that transformers builds for a config.json."""
    fields = {k: v for k, v in config.items() if k not in ("model_type", "quantization_config")}
    hf = transformers.AutoConfig.for_model(config["model_type"], **fields)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(hf)
    return sum(p.numel() for p in model.parameters())


def mtp_layers(config: dict[str, Any]) -> int:
    """Parameters of the blocks that predict further, by formula and by the difference of two depths."""
    depths, width, layers = config.get("num_nextn_predict_layers", 0), config.get("hidden_size", 0), "num_hidden_layers"
    if not depths:
        return 0
    block = counted(config) - counted(config | {layers: config[layers] - 1})
    return depths * (block + 2 * width * width + 3 * width)


def main() -> None:
    counts = {name: {"parameters": counted(c), "mtp_layers": mtp_layers(c)} for name, c in sorted(PUBLISHED.items())}
    out = Path(__file__).with_name("hf_counts.json")
    out.write_text(json.dumps({"transformers": transformers.__version__, "counts": counts}, indent=1) + "\n")


if __name__ == "__main__":
    main()
