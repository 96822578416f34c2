"""A tiny `tokenizer.json`: characters as tokens, so that tests can tell what came of what."""

from __future__ import annotations

import json
import string
from pathlib import Path

import pytest

END = 200  # leaves a hole in the ids, as published tokenizers do


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    vocabulary = {c: i for i, c in enumerate(string.printable)}
    end = {"id": END, "content": "<|endoftext|>", "special": True, "normalized": False,
           "single_word": False, "lstrip": False, "rstrip": False}  # fmt: skip
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({
        "version": "1.0", "added_tokens": [end], "normalizer": None, "pre_tokenizer": None, "post_processor": None,
        "padding": None, "decoder": {"type": "Fuse"},
        "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "model": {"type": "BPE", "vocab": vocabulary | {"<|endoftext|>": END}, "merges": []},
    }))  # fmt: skip
    return path
