"""What config.json says of each model of the catalogue, in Hugging Face's words: what shapes and positions need.

GPT-3 has no such file; its table (2005.14165, Table 2.1) is written as GPT-2's file would say it.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


def _llama(width: int, layers: int, heads: int, kv_heads: int, ffn: int, **more: Any) -> Config:
    return {
        "model_type": "llama", "hidden_act": "silu", "hidden_size": width, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": ffn,
        "rms_norm_eps": 1e-05, "initializer_range": 0.02, "attention_bias": False, "tie_word_embeddings": False,
    } | more  # fmt: skip


LLAMA_2: Config = {"vocab_size": 32000, "max_position_embeddings": 4096, "rope_scaling": None}
LLAMA_3: Config = {"vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0, "rope_scaling": None}
LLAMA_3_1: Config = LLAMA_3 | {
    "max_position_embeddings": 131072, "mlp_bias": False,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
}  # fmt: skip
LLAMA_3_2: Config = LLAMA_3_1 | {
    "tie_word_embeddings": True, "rope_scaling": LLAMA_3_1["rope_scaling"] | {"factor": 32.0},
}  # fmt: skip

MISTRAL: Config = {"model_type": "mistral", "sliding_window": None, "rope_theta": 1000000.0}
MISTRAL_7B: Config = MISTRAL | {"vocab_size": 32000, "max_position_embeddings": 32768}
MIXTRAL: Config = MISTRAL | {
    "model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
    "output_router_logits": False,
}  # fmt: skip

QWEN: Config = {
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "use_sliding_window": False, "sliding_window": None,
    "rope_scaling": None,
}  # fmt: skip
QWEN2: Config = QWEN | {
    "model_type": "qwen2", "vocab_size": 152064, "max_position_embeddings": 131072, "sliding_window": 131072,
    "max_window_layers": 28,
}  # fmt: skip
QWEN2_SMALL: Config = QWEN2 | {"vocab_size": 151936, "tie_word_embeddings": True}
QWEN3: Config = QWEN | {
    "model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 40960,
}  # fmt: skip
QWEN3_MOE: Config = QWEN3 | {
    "model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "router_aux_loss_coef": 0.001,
}  # fmt: skip


def _deepseek(scale: float, **more: Any) -> Config:
    return {
        "rms_norm_eps": 1e-06, "max_position_embeddings": 163840, "rope_theta": 10000, "moe_layer_freq": 1,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "aux_loss_alpha": 0.001, "seq_aux": True, "ep_size": 1,
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": scale, "mscale_all_dim": scale,
                         "original_max_position_embeddings": 4096, "type": "yarn"},
    } | more  # fmt: skip


DEEPSEEK_V2: Config = _deepseek(
    0.707, model_type="deepseek_v2", vocab_size=102400, scoring_func="softmax", norm_topk_prob=False,
    num_experts_per_tok=6, n_shared_experts=2, first_k_dense_replace=1,
)  # fmt: skip
DEEPSEEK_V3: Config = _deepseek(
    1.0, model_type="deepseek_v3", vocab_size=129280, scoring_func="sigmoid", norm_topk_prob=True,
    topk_method="noaux_tc", num_experts_per_tok=8, n_shared_experts=1, n_routed_experts=256, n_group=8, topk_group=4,
    moe_intermediate_size=2048, routed_scaling_factor=2.5, first_k_dense_replace=3, q_lora_rank=1536,
    num_nextn_predict_layers=1, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]},
)  # fmt: skip


def _gpt(width: int, layers: int, heads: int, positions: int = 1024) -> Config:
    return {
        "model_type": "gpt2", "activation_function": "gelu_new", "n_embd": width, "n_layer": layers, "n_head": heads,
        "n_positions": positions, "n_ctx": positions, "vocab_size": 50257, "layer_norm_epsilon": 1e-05,
        "initializer_range": 0.02, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
    }  # fmt: skip


PUBLISHED: dict[str, Config] = {
    "llama-2-7b": _llama(4096, 32, 32, 32, 11008, **LLAMA_2),
    "llama-2-13b": _llama(5120, 40, 40, 40, 13824, **LLAMA_2),
    "llama-2-70b": _llama(8192, 80, 64, 8, 28672, **LLAMA_2),
    "llama-3-8b": _llama(4096, 32, 32, 8, 14336, **LLAMA_3),
    "llama-3-70b": _llama(8192, 80, 64, 8, 28672, **LLAMA_3),
    "llama-3.1-8b": _llama(4096, 32, 32, 8, 14336, **LLAMA_3_1),
    "llama-3.1-70b": _llama(8192, 80, 64, 8, 28672, **LLAMA_3_1),
    "llama-3.1-405b": _llama(16384, 126, 128, 8, 53248, **LLAMA_3_1),
    "llama-3.2-1b": _llama(2048, 16, 32, 8, 8192, **LLAMA_3_2, head_dim=64),
    "llama-3.2-3b": _llama(3072, 28, 24, 8, 8192, **LLAMA_3_2, head_dim=128),
    "mistral-7b-v0.1": _llama(
        4096, 32, 32, 8, 14336, **MISTRAL_7B | {"sliding_window": 4096, "rope_theta": 10000.0}
    ),
    "mistral-7b-v0.3": _llama(4096, 32, 32, 8, 14336, **MISTRAL_7B | {"vocab_size": 32768}),
    "mistral-nemo-12b": _llama(
        5120, 40, 32, 8, 14336, **MISTRAL, head_dim=128, vocab_size=131072, max_position_embeddings=128000
    ),
    "mistral-large-2-123b": _llama(
        12288, 88, 96, 8, 28672, **MISTRAL, head_dim=128, vocab_size=32768, max_position_embeddings=131072
    ),
    "mixtral-8x7b": _llama(
        4096, 32, 32, 8, 14336, **MIXTRAL, max_position_embeddings=32768, router_aux_loss_coef=0.02
    ),
    "mixtral-8x22b": _llama(
        6144, 56, 48, 8, 16384, **MIXTRAL, max_position_embeddings=65536, router_aux_loss_coef=0.001
    ),
    "qwen2.5-0.5b": _llama(896, 24, 14, 2, 4864, **QWEN2_SMALL | {"max_position_embeddings": 32768}),
    "qwen2.5-1.5b": _llama(1536, 28, 12, 2, 8960, **QWEN2_SMALL),
    "qwen2.5-3b": _llama(2048, 36, 16, 2, 11008, **QWEN2_SMALL | {"max_position_embeddings": 32768}),
    "qwen2.5-7b": _llama(3584, 28, 28, 4, 18944, **QWEN2),
    "qwen2.5-14b": _llama(5120, 48, 40, 8, 13824, **QWEN2 | {"rms_norm_eps": 1e-05}),
    "qwen2.5-32b": _llama(5120, 64, 40, 8, 27648, **QWEN2 | {"rms_norm_eps": 1e-05}),
    "qwen2.5-72b": _llama(8192, 80, 64, 8, 29568, **QWEN2 | {"rms_norm_eps": 1e-05}),
    "qwen3-0.6b": _llama(1024, 28, 16, 8, 3072, **QWEN3 | {"tie_word_embeddings": True}),
    "qwen3-1.7b": _llama(2048, 28, 16, 8, 6144, **QWEN3 | {"tie_word_embeddings": True}),
    "qwen3-4b": _llama(2560, 36, 32, 8, 9728, **QWEN3 | {"tie_word_embeddings": True}),
    "qwen3-8b": _llama(4096, 36, 32, 8, 12288, **QWEN3),
    "qwen3-14b": _llama(5120, 40, 40, 8, 17408, **QWEN3),
    "qwen3-32b": _llama(5120, 64, 64, 8, 25600, **QWEN3),
    "qwen3-30b-a3b": _llama(2048, 48, 32, 4, 6144, **QWEN3_MOE, moe_intermediate_size=768),
    "qwen3-235b-a22b": _llama(4096, 94, 64, 4, 12288, **QWEN3_MOE, moe_intermediate_size=1536),
    "deepseek-v2-lite": _llama(
        2048, 27, 16, 16, 10944, **DEEPSEEK_V2, q_lora_rank=None, n_routed_experts=64, moe_intermediate_size=1408,
        topk_method="greedy", n_group=1, topk_group=1, routed_scaling_factor=1.0,
    ),
    "deepseek-v2": _llama(
        5120, 60, 128, 128, 12288, **DEEPSEEK_V2, q_lora_rank=1536, n_routed_experts=160, moe_intermediate_size=1536,
        topk_method="group_limited_greedy", n_group=8, topk_group=3, routed_scaling_factor=16.0,
    ),
    "deepseek-v3": _llama(7168, 61, 128, 128, 18432, **DEEPSEEK_V3),
    "gpt2": _gpt(768, 12, 12),
    "gpt2-medium": _gpt(1024, 24, 16),
    "gpt2-large": _gpt(1280, 36, 20),
    "gpt2-xl": _gpt(1600, 48, 25),
    "gpt3-125m": _gpt(768, 12, 12, 2048),
    "gpt3-350m": _gpt(1024, 24, 16, 2048),
    "gpt3-760m": _gpt(1536, 24, 16, 2048),
    "gpt3-1.3b": _gpt(2048, 24, 16, 2048),
    "gpt3-2.7b": _gpt(2560, 32, 32, 2048),
    "gpt3-6.7b": _gpt(4096, 32, 32, 2048),
    "gpt3-13b": _gpt(5120, 40, 40, 2048),
    "gpt3-175b": _gpt(12288, 96, 96, 2048),
}  # fmt: skip
