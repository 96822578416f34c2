"""Published decoders, by their published shapes."""

from __future__ import annotations

from penteract.spec.model import ModelSpec, MoESpec, RopeScaling

LLAMA_3_2_1B = ModelSpec(
    name="llama-3.2-1b", layers=16, hidden_size=2048, heads=32, kv_heads=8, head_size=64, ffn_size=8192,
    vocab_size=128_256, tied=True, rope_theta=500_000.0, rope_scaling=RopeScaling(factor=32.0), max_positions=131_072,
)  # fmt: skip

LLAMA_3_1_8B = ModelSpec(
    name="llama-3.1-8b", layers=32, hidden_size=4096, heads=32, kv_heads=8, head_size=128, ffn_size=14_336,
    vocab_size=128_256, rope_theta=500_000.0, rope_scaling=RopeScaling(factor=8.0), max_positions=131_072,
)  # fmt: skip

QWEN3_0_6B = ModelSpec(
    name="qwen3-0.6b", layers=28, hidden_size=1024, heads=16, kv_heads=8, head_size=128, ffn_size=3072,
    vocab_size=151_936, norm_epsilon=1e-6, rope_theta=1e6, max_positions=40_960, qk_norm=True, tied=True,
)  # fmt: skip

# The first release: later ones drop the sliding window and widen the vocabulary.
MISTRAL_7B = ModelSpec(
    name="mistral-7b", layers=32, hidden_size=4096, heads=32, kv_heads=8, head_size=128, ffn_size=14_336,
    vocab_size=32_000, rope_theta=10_000.0, max_positions=32_768, sliding_window=4096,
)  # fmt: skip

MIXTRAL_8X7B = ModelSpec(
    name="mixtral-8x7b", layers=32, hidden_size=4096, heads=32, kv_heads=8, head_size=128, ffn_size=14_336,
    vocab_size=32_000, rope_theta=1e6, max_positions=32_768,
    moe=MoESpec(experts=8, top_k=2, ffn_size=14_336, balance_coefficient=0.02),
)  # fmt: skip

QWEN3_30B_A3B = ModelSpec(
    name="qwen3-30b-a3b", layers=48, hidden_size=2048, heads=32, kv_heads=4, head_size=128, ffn_size=6144,
    vocab_size=151_936, norm_epsilon=1e-6, rope_theta=1e6, max_positions=40_960, qk_norm=True,
    moe=MoESpec(experts=128, top_k=8, ffn_size=768, balance_coefficient=0.001),
)  # fmt: skip

# 50,257 tokens, padded so that the table splits over any power of two up to 128.
GPT2 = ModelSpec(
    name="gpt2", layers=12, hidden_size=768, heads=12, kv_heads=12, head_size=64, ffn_size=3072, vocab_size=50_304,
    activation="gelu", norm="layer", positions="learned", max_positions=1024,
    qkv_bias=True, output_bias=True, mlp_bias=True, tied=True,
)  # fmt: skip
