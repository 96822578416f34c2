"""The tensor names of each Hugging Face family, and which of its tensors are not needed.

Names are those of published files, where every expert has its own tensors; `{i}` is a layer and `{x}` an expert.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penteract.config.model import ModelSpec


@dataclass(frozen=True, slots=True)
class Rotary:
    """The row order of rotated dims in Hugging Face files.

    Rows come in groups of `group`. The first `plain` of a group are ordered as ours. The rest are rotated in pairs: the
    two rows of a pair are adjacent in their files, and half a head apart in ours.
    """

    group: int
    plain: int

    def order(self, rows: int) -> list[int]:
        """Our row r is their row order[r], for any whole number of groups."""
        pairs = (self.group - self.plain) // 2
        one = [*range(self.plain), *(self.plain + 2 * i + half for half in (0, 1) for i in range(pairs))]
        return [at + r for at in range(0, rows, self.group) for r in one]


@dataclass(frozen=True, slots=True)
class HfLocation:
    """Where one of our tensors is stored: in tensor `name`, from row `first` of `rows` (0: it is the whole tensor)."""

    name: str
    transposed: bool = False
    first: int = 0
    rows: int = 0
    rotary: Rotary | None = None


Places = Mapping[str, HfLocation]  # by our name, without its layer


@dataclass(frozen=True, slots=True)
class HfFamily:
    """`prefix` begins the names of all tensors but the head; files of the network without its head lack it.

    `unused`: names of tensors that some files hold but a decoder does not need. `copies`: further copies of a table.
    """

    places: Callable[[ModelSpec], Places]
    prefix: str = "model."
    unused: re.Pattern[str] = re.compile(r".*\.rotary_emb\.inv_freq")
    copies: Callable[[ModelSpec], Mapping[str, tuple[str, ...]]] = lambda m: {}


_LLAMA: Mapping[str, str] = {
    "attention.q": "self_attn.q_proj", "attention.k": "self_attn.k_proj", "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj", "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm",
    "norm1": "input_layernorm", "norm2": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
}  # fmt: skip
_TABLES: Places = {
    "embedding.weight": HfLocation("model.embed_tokens.weight"),
    "norm.weight": HfLocation("model.norm.weight"),
    "head.weight": HfLocation("lm_head.weight"),
}


def _llama(m: ModelSpec) -> Places:
    named = _LLAMA.items()
    return {
        **_TABLES,
        **{
            f"{ours}.{kind}": HfLocation(f"model.layers.{{i}}.{n}.{kind}")
            for ours, n in named
            for kind in ("weight", "bias")
        },
    }


def _experts(part: str, gate: str, up: str, down: str) -> Places:
    """The experts in `part` of a layer, given the names of their three matrices."""
    each = {"gate": gate, "up": up, "down": down}
    return {
        "moe.router.weight": HfLocation(f"model.layers.{{i}}.{part}.gate.weight"),
        **{
            f"moe.experts.{ours}": HfLocation(f"model.layers.{{i}}.{part}.experts.{{x}}.{theirs}.weight")
            for ours, theirs in each.items()
        },
    }


def _mixtral(m: ModelSpec) -> Places:
    return {**_llama(m), **_experts("block_sparse_moe", "w1", "w3", "w2")}


def _qwen3_moe(m: ModelSpec) -> Places:
    return {**_llama(m), **_experts("mlp", "gate_proj", "up_proj", "down_proj")}


def _deepseek(m: ModelSpec) -> Places:
    """Rotated rows are interleaved pairs: in every head's queries, and in the one key that all heads share."""
    named = {"q": "q_proj", "q_down": "q_a_proj", "q_norm": "q_a_layernorm", "q_up": "q_b_proj",
             "kv_down": "kv_a_proj_with_mqa", "kv_norm": "kv_a_layernorm", "kv_up": "kv_b_proj"}  # fmt: skip
    rotary: dict[str, Rotary] = {}
    if m.latent is not None:
        heads = Rotary(m.head_size, m.latent.plain_size)
        key = Rotary(m.latent.kv_rank + m.latent.rope_size, m.latent.kv_rank)
        rotary = {"q": heads, "q_up": heads, "kv_down": key}
    return {
        **_llama(m),
        **_experts("mlp", "gate_proj", "up_proj", "down_proj"),
        "moe.balance/bias": HfLocation("model.layers.{i}.mlp.gate.e_score_correction_bias"),
        **{
            f"moe.shared.{n}.{kind}": HfLocation(f"model.layers.{{i}}.mlp.shared_experts.{n}_proj.{kind}")
            for n in ("gate", "up", "down")
            for kind in ("weight", "bias")
        },
        **{
            f"attention.{ours}.weight": HfLocation(f"model.layers.{{i}}.self_attn.{n}.weight", rotary=rotary.get(ours))
            for ours, n in named.items()
        },
    }


def _deepseek_v3(m: ModelSpec) -> Places:
    """MTP depths are layers after the last."""
    ahead = {
        "embedding_norm": "enorm",
        "hidden_norm": "hnorm",
        "projection": "eh_proj",
        "head_norm": "shared_head.norm",
    }
    named = {f"{ours}.weight": HfLocation(f"model.layers.{{i}}.{theirs}.weight") for ours, theirs in ahead.items()}
    return {**_deepseek(m), **named}


def _deepseek_v3_copies(m: ModelSpec) -> Mapping[str, tuple[str, ...]]:
    """Each MTP depth holds a copy of the model's embedding and head."""
    behind = range(m.layers, m.layers + m.mtp_layers)
    heads = tuple(f"model.layers.{i}.shared_head.head.weight" for i in behind)
    tables = tuple(f"model.layers.{i}.embed_tokens.weight" for i in behind)
    return {"embedding.weight": tables + heads} if m.tied else {"embedding.weight": tables, "head.weight": heads}


def _gpt2(m: ModelSpec) -> Places:
    """Linear layers are transposed; queries, keys and values are one layer."""
    tops = {"embedding": "wte", "positions": "wpe", "norm": "ln_f"}
    inner = {"norm1": "ln_1", "norm2": "ln_2", "attention.o": "attn.c_proj", "mlp.up": "mlp.c_fc",
             "mlp.down": "mlp.c_proj"}  # fmt: skip
    found: dict[str, HfLocation] = {}
    for kind in ("weight", "bias"):
        found |= {f"{ours}.{kind}": HfLocation(f"transformer.{theirs}.{kind}") for ours, theirs in tops.items()}
        for ours, theirs in inner.items():
            found[f"{ours}.{kind}"] = HfLocation(f"transformer.h.{{i}}.{theirs}.{kind}", transposed="ln_" not in theirs)
        for n, ours in enumerate("qkv"):
            found[f"attention.{ours}.{kind}"] = HfLocation(
                f"transformer.h.{{i}}.attn.c_attn.{kind}", transposed=True, first=n * m.hidden_size,
                rows=3 * m.hidden_size,
            )  # fmt: skip
    return found


FAMILIES: Mapping[str, HfFamily] = {
    "llama": HfFamily(_llama),
    "mistral": HfFamily(_llama),
    "qwen2": HfFamily(_llama),
    "qwen3": HfFamily(_llama),
    "mixtral": HfFamily(_mixtral),
    "qwen3_moe": HfFamily(_qwen3_moe),
    "deepseek_v2": HfFamily(_deepseek),
    "deepseek_v3": HfFamily(_deepseek_v3, copies=_deepseek_v3_copies),
    "gpt2": HfFamily(_gpt2, prefix="transformer.", unused=re.compile(r".*\.attn\.(masked_)?bias")),
}
