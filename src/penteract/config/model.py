"""WHAT is trained: a decoder's sizes and choices, as a frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class MoESpec:
    """The mixture of experts of a block.

    `ffn_size` is one expert's F; shared experts are one MLP of `shared_ffn_size`, used by every token.
    `balance`: "loss" adds the per-sequence balance loss with `balance_coefficient`
    (DeepSeek-V3 2412.19437 eq. 17-20); "bias" balances without a loss: it updates a bias of the
    choice by `bias_rate` a step (2408.15664); "none" does neither.
    """

    experts: int
    top_k: int
    ffn_size: int
    shared_ffn_size: int = 0
    every: int = 1  # layer i has experts when (i + 1) % every == 0
    dense_layers: tuple[int, ...] = ()  # layers that stay dense whatever `every` says
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize_weights: bool = True  # the k chosen weights sum to one
    balance: Literal["loss", "bias", "none"] = "loss"
    balance_coefficient: float = 0.01
    bias_rate: float = 0.001
    weight_scale: float = 1.0  # of the chosen weights, after they are normalised
    groups: int = (
        1  # experts form groups, and a token chooses among those of its best `top_groups` (DeepSeek-V2 §2.1.2)
    )
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"  # a group's score: that of its best expert, or the sum of its best two


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek-V2 2405.04434 §2.1): keys and values are computed from one small latent.

    `head_size` of the model is `plain_size + rope_size`: the part of a head without positions, and the rotated part,
    whose key all heads share. `value_size`: of a head. `query_rank` 0: queries are projected without a latent.
    """

    kv_rank: int
    plain_size: int
    rope_size: int
    value_size: int
    query_rank: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """How rotary wavelengths are stretched.

    "llama3" (Llama 3.1): long ones are divided by `factor`, short ones stay, with a smooth band between.
    "yarn" (2309.00071): the band is given in rotations over `original_positions`, `fast_rotations` to `slow_rotations`;
    `attention_factor` multiplies cosines and sines, and `softmax_factor` the scale of attention's scores.
    "linear": all are divided by `factor`.
    """

    factor: float
    kind: Literal["llama3", "yarn", "linear"] = "llama3"
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_positions: int = 8192
    fast_rotations: float = 32.0
    slow_rotations: float = 1.0
    attention_factor: float = 1.0
    softmax_factor: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A decoder-only transformer, dense or with experts.

    Legend of dims: D hidden_size, H heads, K kv_heads, C head_size, F ffn_size, V vocab_size.
    """

    name: str = "custom"
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_size: int
    ffn_size: int
    vocab_size: int
    activation: Literal["swiglu", "gelu"] = "swiglu"
    norm: Literal["rms", "layer"] = "rms"
    norm_epsilon: float = 1e-5
    positions: Literal["rope", "learned"] = "rope"
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    max_positions: int = 8192  # rows of a learned table; with rope, only informative
    sliding_window: int = 0  # 0: the whole document
    qkv_bias: bool = False
    output_bias: bool = False  # of attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool = False  # the head is the embedding table
    initial_std: float = 0.02
    moe: MoESpec | None = None
    latent: LatentSpec | None = None  # instead of projected keys and values
    mtp_layers: int = 0  # depths of multi-token prediction (DeepSeek-V3 §2.2): each a block that sees one token further
    mtp_loss_coefficient: float = 0.3  # of the mean of their losses
    z_loss_coefficient: float = 0.0  # of each token's squared log-sum-exp of logits, added to the loss; 0: none

    @property
    def residual_std(self) -> float:
        """Initial deviation of projections into the residual stream, whose variance then does not grow with depth
        (GPT-2).
        """
        return self.initial_std / (2 * self.layers) ** 0.5

    def has_experts(self, layer: int) -> bool:
        """Whether `layer` (0-based) is a mixture of experts."""
        moe = self.moe
        return moe is not None and layer not in moe.dense_layers and (layer + 1) % moe.every == 0
