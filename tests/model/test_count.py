"""Counts of parameters against Hugging Face's models, closed formulas, and the record of every layer."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from config.make_hf_counts import counted
from penteract.config import catalog
from penteract.config.hf import model_from_hf
from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.config.model import ModelSpec, MoESpec
from penteract.config.resolve.presets import TINY, TINY_MOE
from penteract.model.count import ParameterCounts, count, parameters
from penteract.model.decoder import record

HF = json.loads((Path(__file__).parents[1] / "config" / "hf_counts.json").read_text())["counts"]
GPT_PADDING = 50_304 - 50_257  # rows of the table that are no token


def _plain(m: ModelSpec) -> ModelSpec:
    """Without the blocks that predict further, which Hugging Face's models do not have."""
    return replace(m, mtp_layers=0)


@pytest.mark.parametrize("name", catalog.names())
def test_the_catalogue_counts_as_hugging_face_does(name: str) -> None:
    found = catalog.entry(name)
    padding = GPT_PADDING * found.model.hidden_size if name.startswith("gpt") else 0
    assert parameters(_plain(found.model)).total - padding == HF[name]["parameters"] == found.parameters


@pytest.mark.parametrize("name", catalog.names())
def test_blocks_that_predict_further_count_as_published(name: str) -> None:
    model = catalog.model(name)
    ahead = parameters(model).total - parameters(_plain(model)).total
    assert ahead == HF[name]["mtp_layers"]
    assert (ahead > 0) == (name == "deepseek-v3")


@pytest.mark.parametrize("name", ["llama-3.2-1b", "gpt2", "qwen3-30b-a3b", "deepseek-v2-lite", "deepseek-v3"])
def test_one_layer_of_each_kind_stands_for_all(name: str) -> None:
    model = catalog.model(name)
    assert parameters(model) == count(record(model, Mesh(Layout()), 0, 1), model, Counter())


@pytest.mark.parametrize(
    "moe", [TINY_MOE.moe, MoESpec(experts=4, top_k=3, ffn_size=8, every=3, dense_layers=(2,), balance="bias")]
)
def test_mixed_layers_are_told_apart(moe: MoESpec) -> None:
    model = replace(TINY, layers=7, moe=moe)
    assert parameters(model) == count(record(model, Mesh(Layout()), 0, 1), model, Counter())


@pytest.mark.parametrize(
    "name", [n for n in catalog.names() if n.startswith(("llama", "mistral-7b", "mistral-large", "qwen3-8b"))]
)
def test_llamas_closed_form(name: str) -> None:
    """The Playbook's N = (1|2)·V·D + L·(3·D·F + (2 + 2·K/H)·D²), with the norms that it leaves out."""
    m = catalog.model(name)
    assert m.heads * m.head_size == m.hidden_size
    layer = 3 * m.hidden_size * m.ffn_size + 2 * m.hidden_size**2 * (m.heads + m.kv_heads) // m.heads
    norms = (2 * m.layers + 1) * m.hidden_size
    tables = (1 if m.tied else 2) * m.vocab_size * m.hidden_size
    expected = tables + m.layers * layer + norms + m.qk_norm * 2 * m.layers * m.head_size
    matmul = m.layers * layer + m.vocab_size * m.hidden_size
    table = m.vocab_size * m.hidden_size
    assert parameters(m) == ParameterCounts(total=expected, active=expected, embedding=table, matmul=matmul)


@pytest.mark.parametrize("name", [n for n in catalog.names() if n.startswith("gpt")])
def test_gpts_closed_form(name: str) -> None:
    """N = V·D + L·(12·D² + 13·D) + 2·D, and the table of positions."""
    m = catalog.model(name)
    tables, width = (m.vocab_size + m.max_positions) * m.hidden_size, m.hidden_size
    expected = tables + m.layers * (12 * width**2 + 13 * width) + 2 * width
    matmul = m.layers * 12 * width**2 + m.vocab_size * width
    assert parameters(m) == ParameterCounts(total=expected, active=expected, embedding=tables, matmul=matmul)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("mixtral-8x7b", 12.9), ("mixtral-8x22b", 39.2), ("qwen3-30b-a3b", 3.4), ("qwen3-235b-a22b", 22.2),
     ("deepseek-v2", 21.4), ("deepseek-v3", 37.6)],
)  # fmt: skip
def test_what_one_token_visits(name: str, billions: float) -> None:
    """As their authors say it, to a tenth of a billion: 12.9, 39, 3.3, 22, 21 and 37."""
    m = _plain(catalog.model(name))
    found = parameters(m)
    assert m.moe is not None
    experts = sum(m.has_experts(layer) for layer in range(m.layers)) * 3 * m.hidden_size * m.moe.ffn_size
    assert found.total - found.active == (m.moe.experts - m.moe.top_k) * experts
    assert round(found.active / 1e9, 1) == billions


@pytest.mark.alone
def test_deep_models_are_counted_at_once() -> None:
    model = catalog.model("llama-3.1-405b")
    parameters(model)
    started = time.process_time()
    for _ in range(10):
        parameters(model)
    assert (time.process_time() - started) / 10 < 0.01


LLAMA: dict[str, Any] = {
    "hidden_act": "silu", "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 40, "vocab_size": 101, "max_position_embeddings": 64, "rope_theta": 1e4,
}  # fmt: skip
MOE: dict[str, Any] = LLAMA | {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT: dict[str, Any] = MOE | {
    "num_key_value_heads": 4, "kv_lora_rank": 20, "q_lora_rank": 28, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6,
    "v_head_dim": 14, "n_routed_experts": 6, "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 2,
    "topk_group": 1,
}  # fmt: skip
GPT: dict[str, Any] = {
    "model_type": "gpt2", "n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 16, "vocab_size": 101,
}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama"} | LLAMA,
        {"model_type": "llama", "head_dim": 10, "attention_bias": True, "mlp_bias": True} | LLAMA,
        {"model_type": "llama"} | LLAMA | {"tie_word_embeddings": True},
        {"model_type": "mistral"} | LLAMA,
        {"model_type": "qwen2"} | LLAMA,
        {"model_type": "qwen3", "head_dim": 14} | LLAMA,
        {"model_type": "mixtral", "num_local_experts": 5} | MOE,
        {"model_type": "qwen3_moe", "num_experts": 5, "mlp_only_layers": [1], "head_dim": 12} | MOE,
        {"model_type": "qwen3_moe", "num_experts": 5, "decoder_sparse_step": 2, "head_dim": 12} | MOE,
        GPT,
        GPT | {"n_layer": 1, "n_inner": 7, "n_positions": 9},
        {"model_type": "deepseek_v2"} | LATENT,
        {"model_type": "deepseek_v2"} | LATENT | {"q_lora_rank": None, "attention_bias": True},
        {"model_type": "deepseek_v3"} | LATENT | {"attention_bias": True},
    ],
    ids=lambda config: str(config["model_type"]),
)  # fmt: skip
def test_small_models_count_as_transformers_builds_them(config: dict[str, Any]) -> None:
    assert parameters(model_from_hf(config)).total == counted(config)
