"""Hugging Face's config.json as a `ModelSpec`. Every field is checked, and what is not supported is reported."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from penteract.config.files.keys import show_key
from penteract.config.files.read import read_text
from penteract.config.hf import deepseek, families
from penteract.config.hf.fields import Fields, shown
from penteract.config.hf.gpt2 import gpt2
from penteract.config.model import ModelSpec
from penteract.errors import BadInput

READERS: Mapping[str, Callable[[Fields], ModelSpec]] = {
    "llama": families.llama,
    "mistral": families.mistral,
    "qwen2": families.qwen2,
    "qwen3": families.qwen3,
    "mixtral": families.mixtral,
    "qwen3_moe": families.qwen3_moe,
    "gpt2": gpt2,
    "deepseek_v2": deepseek.deepseek_v2,
    "deepseek_v3": deepseek.deepseek_v3,
}


def model_from_hf(config: Mapping[str, Any] | str | Path) -> ModelSpec:
    """The model that a config.json (its content, its path, or its folder's) describes.

    Raises BadInput: CONFIG for a field that is missing or wrong, UNSUPPORTED for one that is not supported, FILE for a
    file that cannot be read.
    """
    where = "config.json"
    if not isinstance(config, Mapping):
        path = Path(config)
        where = show_key(str(path))
        config = _load(path / "config.json" if path.is_dir() else path)
    f = Fields(config, where)
    if "text_config" in f:
        raise f.unsupported("text_config", "more than text", "the config.json of the text model alone")
    if "quantization_config" in f and not isinstance(config["quantization_config"], Mapping):
        raise f.wrong("quantization_config", "{…}, which says how weights are quantised")
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in READERS:
        allowed = ", ".join(READERS)
        raise BadInput("CONFIG", "no such model_type here", where=where, found=shown(kind), allowed=allowed)
    return READERS[kind](f)


def _load(path: Path) -> Mapping[str, Any]:
    try:
        tree: object = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise BadInput("CONFIG", f"no JSON: {what}", where=show_key(str(path))) from None
    if not isinstance(tree, dict):
        raise BadInput("CONFIG", "not a JSON object", where=show_key(str(path)))
    return cast("dict[str, Any]", tree)
