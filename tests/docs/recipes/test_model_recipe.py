"""The recipe for a model is followed: a published shape, and a family of Hugging Face."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from engine.hf import families, forward
from penteract.api import plan
from penteract.config import catalog, hf
from penteract.config.hf import write_config
from penteract.config.hf.families import sizes
from penteract.config.hf.fields import Fields
from penteract.config.layout import Layout
from penteract.config.model import ModelSpec
from penteract.config.resolve.presets import preset
from penteract.engine.comm.groups import ProcessGroups
from penteract.engine.hf.folder import open_folder
from penteract.errors import BadInput
from penteract.model import hf_families
from penteract.model.count import parameters
from penteract.model.hf_families import HfFamily, HfLocation

YI = """
[[series]] # 2403.04652
kv_heads = 4
head_size = 128
vocab_size = 64_000
max_positions = 4096
rope_theta = 5e6
norm_epsilon = 1e-5

[series.models."yi-6b"]
source = "01-ai/Yi-6B"
parameters = 6_061_035_520
layers = 32
hidden_size = 4096
heads = 32
ffn_size = 11_008
"""


def test_a_published_model_is_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a new family: a file, and no list that names it."""
    before = catalog.names()
    folder = tmp_path / "models"
    shutil.copytree(catalog.FOLDER, folder)
    (folder / "yi.toml").write_text(YI)
    monkeypatch.setattr(catalog, "FOLDER", folder)
    entry = catalog.entry("01-ai/Yi-6B")
    assert set(catalog.names()) == {*before, "yi-6b"}
    assert parameters(entry.model).total == entry.parameters
    assert preset("yi-6b").model == entry.model
    assert plan("yi-6b", "8xH100", sequence_length=4096, batch="64seqs").best.layout.world == 8
    with pytest.raises(BadInput, match="use yi-6b"):
        catalog.entry("yi-7b")


def phi3(f: Fields) -> ModelSpec:
    return ModelSpec(**sizes(f), sliding_window=f.get("sliding_window", "model.sliding_window", 0))


def to_phi3(m: ModelSpec) -> dict[str, Any]:
    return write_config.WRITERS["mistral"][1](m)


def places_of_phi3(m: ModelSpec) -> dict[str, HfLocation]:
    """As Llama; queries, keys and values are one matrix, and so are gate and up."""
    found = dict(hf_families.FAMILIES["llama"].places(m))
    q, kv = m.heads * m.head_size, m.kv_heads * m.head_size
    qkv, gate_up = ("self_attn.qkv_proj", q + 2 * kv), ("mlp.gate_up_proj", 2 * m.ffn_size)
    fused = [("attention.q", 0, *qkv), ("attention.k", q, *qkv), ("attention.v", q + kv, *qkv),
             ("mlp.gate", 0, *gate_up), ("mlp.up", m.ffn_size, *gate_up)]  # fmt: skip
    for ours, first, theirs, rows in fused:
        found[f"{ours}.weight"] = HfLocation(f"model.layers.{{i}}.{theirs}.weight", first=first, rows=rows)
    return found


@pytest.fixture
def phi3_known() -> Iterator[None]:
    with (
        patch.dict(hf.READERS, {"phi3": phi3}),
        patch.dict(hf_families.FAMILIES, {"phi3": HfFamily(places_of_phi3)}),
        patch.dict(write_config.WRITERS, {"phi3": ("Phi3ForCausalLM", to_phi3)}),
    ):
        yield


@pytest.mark.usefixtures("phi3_known")
def test_a_family_of_hugging_face_is_a_reader_names_and_a_writer(tmp_path: Path) -> None:
    """Logits of a folder that transformers wrote are those that transformers computes."""
    about = {"vocab_size": 272, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
             "sliding_window": 5}  # fmt: skip
    with families.exact():
        torch.manual_seed(1)
        config = families.transformers().AutoConfig.for_model("phi3", **about)
        theirs = families.transformers().AutoModelForCausalLM.from_config(config, **families.PLAIN).eval()
        with torch.no_grad():
            for name, weight in theirs.named_parameters():
                weight.normal_(float("norm" in name), 0.3)
        theirs.save_pretrained(tmp_path / "phi3")
        wanted = families.logits(theirs)
    model = open_folder(tmp_path / "phi3").model
    mine = forward.logits(0, ProcessGroups(), tmp_path / "phi3", model, Layout(), families.TOKENS, "fp64")
    found = forward.joined([mine])
    assert (found - wanted).abs().max() < 1e-10 * wanted.abs().max()
    written = {"model_type": "phi3", "_name_or_path": model.name, **to_phi3(model)}
    assert hf.model_from_hf(json.loads(json.dumps(written))) == model
