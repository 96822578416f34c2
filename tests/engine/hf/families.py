"""A tiny transformers model of each family, in float64 throughout or in float32, with every weight away from zero."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

_SIZES: dict[str, Any] = {
    "vocab_size": 272, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e3, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
_LATENT = _SIZES | {
    "num_key_value_heads": 4, "kv_lora_rank": 10, "q_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8,
    "v_head_dim": 10, "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, "beta_fast": 3.0, "beta_slow": 1.0, "mscale": 0.8,
    "mscale_all_dim": 0.7, "original_max_position_embeddings": 16,
}  # fmt: skip
CONFIGS: Mapping[str, dict[str, Any]] = {
    "llama": _SIZES | {"rope_parameters": _LLAMA3, "attention_bias": True, "mlp_bias": True},
    "mistral": _SIZES | {"sliding_window": 5, "head_dim": 6, "tie_word_embeddings": True},
    "qwen2": _SIZES | {"num_key_value_heads": 4},
    "qwen3": _SIZES | {"head_dim": 12, "tie_word_embeddings": True},
    "mixtral": _SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": _SIZES | {
        "head_dim": 8, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [0],
        "norm_topk_prob": True,
    },
    "deepseek_v2": _LATENT | {"n_shared_experts": 2, "q_lora_rank": None, "topk_method": "group_limited_greedy"},
    "deepseek_v3": _LATENT | {
        "n_shared_experts": 1, "num_nextn_predict_layers": 1, "rope_parameters": _YARN, "norm_topk_prob": True,
    },
    "gpt2": {"vocab_size": 272, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 24, "n_inner": 48,
             "bos_token_id": None, "eos_token_id": None},
}  # fmt: skip
FAMILIES = tuple(CONFIGS)
PLAIN = {"attn_implementation": "eager", "experts_implementation": "eager"}
TOKENS = torch.randint(0, 272, (20,), generator=torch.Generator().manual_seed(3)).tolist()


@contextmanager
def exact() -> Iterator[None]:
    """Transformers norms, rotates and routes in float32 whatever the weights are: here in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    names = [
        (torch, "float32", torch.float64),
        (torch, "float", torch.float64),
        (torch.Tensor, "float", torch.Tensor.double),
    ]
    patches = [patch.object(*name) for name in names]
    for p in patches:
        p.start()
    try:
        yield
    finally:
        for p in patches:
            p.stop()
        torch.set_default_dtype(before)


def transformers() -> Any:
    """Loaded where it is used, as it takes a second, and every shard collects all tests; it says nothing of its own."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def built(family: str) -> Any:
    """A model in the default type, with random weights."""
    torch.manual_seed(FAMILIES.index(family))
    config = transformers().AutoConfig.for_model(family, **CONFIGS[family])
    model = transformers().AutoModelForCausalLM.from_config(config, **PLAIN).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(float("norm" in name or "ln_" in name) * (weight.dim() == 1), 0.3)
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.normal_(0, 0.1)
    return model


def logits(model: Any) -> torch.Tensor:
    """[S, V] of TOKENS."""
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0]


def save(folder: Path, family: str) -> torch.Tensor:
    """Save the family's model, and give its logits."""
    model = built(family)
    model.save_pretrained(folder)
    return logits(model)


def load(folder: Path, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """A model as transformers loads it, and what it has to say about it."""
    return transformers().AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True, **PLAIN)
