"""Overrides as words, and values as texts."""

from pathlib import Path

import pytest

from penteract.config.files.read import read_overrides, read_toml
from penteract.errors import BadInput


@pytest.mark.parametrize(
    "words", [["--parallel.tp", "4"], ["--parallel.tp=4"], ["parallel.tp=4"], ["parallel.tp=2", "--parallel.tp", "4"]]
)
def test_three_ways_to_write_an_override(words: list[str]) -> None:
    found = read_overrides(words)
    assert {k: (s.value, s.origin) for k, s in found.items()} == {"parallel.tp": (4, "--parallel.tp")}


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("data.source=builtin", "builtin"),
        ("data.source=123", "123"),
        ("data.source=a.txt,b.txt", ("a.txt", "b.txt")),
        ('data.source=["a,b.txt"]', ("a,b.txt",)),
        ("data.source=a+b.txt", "a+b.txt"),
        ("memory.recompute=swiglu+rms_norm", ("swiglu", "rms_norm")),
        ("memory.offload=linear+quantise,rms_norm", ("linear", "quantise", "rms_norm")),
        ("kernels.fuse=all+glu", ("norm", "add", "mlp", "qkv", "loss", "fp8", "glu")),
        ("kernels.fuse=norm+norm", ("norm",)),
        ("kernels.fuse=all", "all"),
        ("data.source=hf:org/name", "hf:org/name"),
        ("tokenizer.source=true", "true"),
        ("optimizer.learning_rate=1e-3", 1e-3),
        ("optimizer.learning_rate=1", 1.0),
        ("optimizer.betas=0.8,0.99", (0.8, 0.99)),
        ("optimizer.betas=[0.8, 0.99]", (0.8, 0.99)),
        ("model.moe.dense_layers=0,1", (0, 1)),
        ("parallel.dp=auto", "auto"),
        ("parallel.schedule=1f1b", "1f1b"),
        ("batch.global_batch_tokens=1M", 1_000_000),
        ("batch.global_batch_tokens=1Mi", 1_048_576),
        ("data.pack_documents=false", False),
        ("memory.recompute=full", "full"),
        ("memory.recompute=swiglu", ("swiglu",)),
    ],
)
def test_texts_become_what_the_key_takes(word: str, value: object) -> None:
    (setting,) = read_overrides([word]).values()
    assert setting.value == value
    assert type(setting.value) is type(value)


def test_a_switch_needs_no_value() -> None:
    found = read_overrides(["--data.pack_documents", "--model.tied"])
    assert {k: s.value for k, s in found.items()} == {"data.pack_documents": True, "model.tied": True}


@pytest.mark.parametrize(
    "words",
    [["--parallel.tp"], ["--parallel.tp", "--parallel.pp", "2"], ["parallel.tp"], ["parallel.tp="], ["--parallel.tp=x"],
     ["--parallel.tp=1.5"], ["--parallel.tp=1\n2"], ["--a.b", "1"], ["batch.global_batch_tokens=1e400"],
     ["batch.global_batch_tokens=1.5"], ["--model.config"], ["--parallel.tp=" + "9" * 5000]],
)  # fmt: skip
def test_what_is_no_override(words: list[str]) -> None:
    with pytest.raises(BadInput) as caught:
        read_overrides(words)
    assert "\n" not in str(caught.value)


def test_the_choice_that_was_probably_meant_is_the_fix(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[precision]\ndtype = "fp7"\n')
    with pytest.raises(BadInput, match=r'precision\.dtype \(run\.toml:2\) .* · fix: dtype = "fp8_tensorwise"$'):
        read_toml(path)
    for word, fix in (("precision.dtype=bf16/fp32", "bf16"), ("parallel.schedule=1fb1", "1f1b")):
        with pytest.raises(BadInput, match=rf"fix: --{word.partition('=')[0]} {fix}$"):
            read_overrides([word])
    with pytest.raises(BadInput) as caught:
        read_overrides(["parallel.schedule=like_none"])
    assert not caught.value.fix
