"""Small Hugging Face folders with random weights, written by safetensors' own writer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from penteract.config.hf.write_config import config_of
from penteract.config.model import LatentSpec, ModelSpec, MoESpec
from penteract.model.hf_names import by_theirs, hf_names

_SIZES: dict[str, Any] = {
    "layers": 2, "hidden_size": 32, "heads": 4, "kv_heads": 2, "head_size": 8, "ffn_size": 48, "vocab_size": 272,
}  # fmt: skip
_MOE = MoESpec(experts=4, top_k=2, ffn_size=48)
MODELS: Mapping[str, ModelSpec] = {
    "llama": ModelSpec(**_SIZES),
    "mixtral": ModelSpec(**_SIZES, moe=_MOE),
    "gpt2": ModelSpec(
        **_SIZES | {"kv_heads": 4}, activation="gelu", norm="layer", positions="learned", max_positions=24,
        qkv_bias=True, output_bias=True, mlp_bias=True, tied=True,
    ),
    "deepseek_v3": ModelSpec(
        **_SIZES | {"kv_heads": 4, "head_size": 14},
        latent=LatentSpec(kv_rank=10, plain_size=6, rope_size=8, value_size=10, query_rank=12),
        moe=MoESpec(experts=4, top_k=2, ffn_size=24, shared_ffn_size=24, score="sigmoid", balance="bias"),
        mtp_layers=1,
    ),
}  # fmt: skip


def tensors_of(family: str) -> dict[str, torch.Tensor]:
    """Random tensors of the family's model, by its names."""
    g = torch.Generator().manual_seed(1)
    return {n: torch.randn(t.shape, generator=g) for n, t in by_theirs(hf_names(MODELS[family], family)).items()}


def write(at: Path, family: str = "llama", tensors: Mapping[str, torch.Tensor] | None = None, files: int = 1) -> Path:
    """A folder of `files` files."""
    at.mkdir(parents=True)
    (at / "config.json").write_text(json.dumps(config_of(MODELS[family])))
    held = dict(tensors if tensors is not None else tensors_of(family))
    if files == 1:
        save_file(held, at / "model.safetensors")
        return at
    names = [f"model-{i + 1:05d}-of-{files:05d}.safetensors" for i in range(files)]
    where = {n: names[i * files // len(held)] for i, n in enumerate(held)}
    for file in names:
        save_file({n: t for n, t in held.items() if where[n] == file}, at / file)
    index = {"metadata": {"total_size": 0}, "weight_map": where}
    (at / "model.safetensors.index.json").write_text(json.dumps(index))
    return at
