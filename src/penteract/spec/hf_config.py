"""Hugging Face's config.json as a `ModelSpec`. Own reader: every field is checked, and what we cannot say is named."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from penteract.errors import BadInput
from penteract.spec.convert import show
from penteract.spec.keys import keys, show_key
from penteract.spec.model import ModelSpec, MoESpec, RopeScaling
from penteract.spec.read import read_text

_REQUIRED = object()


class _Fields:
    """A config's fields by name, each held against the bounds of the key that it becomes."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config, self.where = config, where

    def get(self, name: str, key: str, default: Any = _REQUIRED) -> Any:
        """The field as `key` of a run file takes it; null counts as absent."""
        value = self.config.get(name)
        if value is None:
            if default is _REQUIRED:
                raise BadInput("CONFIG", "a field is missing", where=self.where, found=f"no {name}", fix=f"add {name}")
            return default
        try:
            return keys()[key].check(value, self.where)
        except BadInput as error:
            raise BadInput(
                "CONFIG", f"{name} is not what it should be", where=self.where, found=error.found, allowed=error.allowed
            ) from None

    def flag(self, name: str, default: bool = False) -> bool:
        return self.get(name, "model.tied", default)

    def unsaid(self, name: str, word: str, allowed: str) -> BadInput:
        """The model is real, but a word that it needs does not exist here yet."""
        return BadInput(
            "UNSAID", f"needs {word}", where=f"{self.where}: {name}", found=show(self.config.get(name)), allowed=allowed
        )


def model_from_hf(config: Mapping[str, Any] | str | Path) -> ModelSpec:
    """The model that a config.json (its content, its path, or its folder's) describes.

    Raises BadInput: CONFIG for a field that is missing or wrong, UNSAID for one that has no word here.
    """
    where = "config.json"
    if not isinstance(config, Mapping):
        path = Path(config)
        where = show_key(str(path))
        config = _load(path / "config.json" if path.is_dir() else path)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _READERS:
        allowed = ", ".join(_READERS)
        raise BadInput("CONFIG", "no such model_type here", where=where, found=show(kind), allowed=allowed)
    return _READERS[kind](_Fields(config, where))


def _load(path: Path) -> Mapping[str, Any]:
    try:
        tree: object = json.loads(read_text(path, largest=2**22))
    except (ValueError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise BadInput("CONFIG", f"no JSON: {what}", where=show_key(str(path))) from None
    if not isinstance(tree, dict):
        raise BadInput("CONFIG", "not a JSON object", where=show_key(str(path)))
    return cast("dict[str, Any]", tree)


def _sizes(f: _Fields, *, head_size: int | None = None) -> dict[str, Any]:
    """The fields that all of these families have."""
    if f.config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise f.unsaid("hidden_act", "another activation", "silu")
    heads, hidden = f.get("num_attention_heads", "model.heads"), f.get("hidden_size", "model.hidden_size")
    if head_size is None and f.config.get("head_dim") is None and hidden % heads:
        raise BadInput(
            "CONFIG", "hidden_size does not divide into heads", where=f.where, found=f"{hidden} / {heads}",
            fix="add head_dim",
        )  # fmt: skip
    name = f.config.get("_name_or_path")
    short = name.rstrip("/").rsplit("/", 1)[-1] if isinstance(name, str) else ""
    return {
        "name": short if short and short.isprintable() else str(f.config["model_type"]),
        "layers": f.get("num_hidden_layers", "model.layers"),
        "hidden_size": hidden,
        "heads": heads,
        "head_size": f.get("head_dim", "model.head_size", head_size or hidden // heads),
        "ffn_size": f.get("intermediate_size", "model.ffn_size"),
        "vocab_size": f.get("vocab_size", "model.vocab_size"),
        "norm_epsilon": f.get("rms_norm_eps", "model.norm_epsilon", 1e-6),
        "max_positions": f.get("max_position_embeddings", "model.max_positions"),
        "initial_std": f.get("initializer_range", "model.initial_std", 0.02),
        "tied": f.flag("tie_word_embeddings"),
        **_rope(f),
    }


def _rope(f: _Fields) -> dict[str, Any]:
    """theta and scaling: two top-level fields in older files, `rope_parameters` in newer ones."""
    newer = f.config.get("rope_parameters")
    field = "rope_parameters" if newer is not None else "rope_scaling"
    scaling = f.config.get(field)
    if scaling is not None and not isinstance(scaling, dict):
        raise BadInput("CONFIG", f"{field} is not what it should be", where=f.where, found=show(scaling), allowed="{…}")
    inner = _Fields(cast("dict[str, Any]", scaling or {}), f"{f.where}: {field}")
    theta = (inner if "rope_theta" in inner.config else f).get("rope_theta", "model.rope_theta", 10_000.0)
    kind = inner.config.get("rope_type", inner.config.get("type", "default"))
    if scaling is None or kind == "default":
        return {"rope_theta": theta}
    if kind != "llama3":
        raise inner.unsaid("rope_type" if "rope_type" in inner.config else "type", "another rope scaling", "llama3")
    part = "model.rope_scaling"
    return {
        "rope_theta": theta,
        "rope_scaling": RopeScaling(
            factor=inner.get("factor", f"{part}.factor"),
            low_frequency_factor=inner.get("low_freq_factor", f"{part}.low_frequency_factor"),
            high_frequency_factor=inner.get("high_freq_factor", f"{part}.high_frequency_factor"),
            original_positions=inner.get("original_max_position_embeddings", f"{part}.original_positions"),
        ),
    }


def _kv_heads(f: _Fields, default: Any = _REQUIRED) -> dict[str, Any]:
    return {"kv_heads": f.get("num_key_value_heads", "model.kv_heads", default)}


def _window(f: _Fields) -> int:
    return f.get("sliding_window", "model.sliding_window", 0)


def _switched_window(f: _Fields, layers: int) -> int:
    """Qwen's window has a switch, and holds from layer `max_window_layers` on: all, none, or a mix we cannot say."""
    if not f.flag("use_sliding_window"):
        return 0
    first = f.get("max_window_layers", "model.sliding_window", layers)
    if first >= layers:
        return 0
    if first:
        raise f.unsaid("max_window_layers", "a window on some layers only", f"0, or {layers} and more")
    return _window(f)


def _llama(f: _Fields) -> ModelSpec:
    bias = f.flag("attention_bias")
    return ModelSpec(
        **_sizes(f), **_kv_heads(f, f.config.get("num_attention_heads")),
        qkv_bias=bias, output_bias=bias, mlp_bias=f.flag("mlp_bias"),
    )  # fmt: skip


def _mistral(f: _Fields) -> ModelSpec:
    return ModelSpec(**_sizes(f), **_kv_heads(f), sliding_window=_window(f))


def _qwen2(f: _Fields) -> ModelSpec:
    sizes = _sizes(f)
    return ModelSpec(**sizes, **_kv_heads(f), qkv_bias=True, sliding_window=_switched_window(f, sizes["layers"]))


def _qwen3(f: _Fields, moe: MoESpec | None = None, *, head_size: int | None = 128) -> ModelSpec:
    sizes, bias = _sizes(f, head_size=head_size), f.flag("attention_bias")
    return ModelSpec(
        **sizes, **_kv_heads(f), qkv_bias=bias, output_bias=bias, qk_norm=True, moe=moe,
        sliding_window=_switched_window(f, sizes["layers"]),
    )  # fmt: skip


def _mixtral(f: _Fields) -> ModelSpec:
    sizes = _sizes(f)
    moe = MoESpec(
        experts=f.get("num_local_experts", "model.moe.experts"),
        top_k=_top_k(f, "num_local_experts"),
        ffn_size=sizes["ffn_size"],
        **_balance(f),
    )
    return ModelSpec(**sizes, **_kv_heads(f), sliding_window=_window(f), moe=moe)


def _qwen3_moe(f: _Fields) -> ModelSpec:
    moe = MoESpec(
        experts=f.get("num_experts", "model.moe.experts"),
        top_k=_top_k(f, "num_experts"),
        ffn_size=f.get("moe_intermediate_size", "model.moe.ffn_size"),
        every=f.get("decoder_sparse_step", "model.moe.every", 1),
        dense_layers=f.get("mlp_only_layers", "model.moe.dense_layers", ()),
        normalize_weights=f.flag("norm_topk_prob"),
        **_balance(f),
    )
    return _qwen3(f, moe, head_size=None)


def _top_k(f: _Fields, experts: str) -> int:
    top_k, most = f.get("num_experts_per_tok", "model.moe.top_k"), f.config[experts]
    if top_k > most:
        raise BadInput(
            "CONFIG", "num_experts_per_tok is not what it should be", where=f.where, found=top_k, allowed=f"1 to {most}"
        )  # fmt: skip
    return top_k


def _balance(f: _Fields) -> dict[str, Any]:
    return {"balance_coefficient": f.get("router_aux_loss_coef", "model.moe.balance_coefficient", 0.001)}


_READERS: Mapping[str, Callable[[_Fields], ModelSpec]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
}
