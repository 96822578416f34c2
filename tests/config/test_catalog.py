"""The catalogue says what was published, finds models by the names people use, and is read only where it is asked."""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.published import PUBLISHED
from penteract.config import catalog
from penteract.config.hf import model_from_hf
from penteract.config.layout import Layout
from penteract.config.resolve.presets import preset
from penteract.config.resolve.resolved_run import resolve
from penteract.config.rules.breaches import breaches
from penteract.config.rules.case import Case
from penteract.errors import BadInput

# Where the catalogue differs from config.json on purpose: a padded vocabulary; a deviation that the papers give.
DIFFERENT: dict[str, dict[str, Any]] = {
    **{name: {"vocab_size": 50304} for name in PUBLISHED if name.startswith("gpt")},
    **{name: {"initial_std": 0.006} for name in PUBLISHED if name.startswith("deepseek")},
}


def test_every_entry_has_its_published_file() -> None:
    assert sorted(catalog.names()) == sorted(PUBLISHED)


@pytest.mark.parametrize("name", catalog.names())
def test_entries_are_what_their_files_say(name: str) -> None:
    published = model_from_hf(PUBLISHED[name] | {"_name_or_path": f"owner/{name}"})
    assert catalog.model(name) == replace(published, **DIFFERENT.get(name, {}))


@pytest.mark.parametrize("name", catalog.names())
def test_entries_can_be_trained(name: str) -> None:
    found = catalog.model(name)
    assert not breaches(Case(model=found, layout=Layout(), sequence_length=min(found.max_positions, 8192)))


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"),
        ("Llama 3.1 405B", "llama-3.1-405b"),
        ("llama3.2_1b", "llama-3.2-1b"),
        ("mistral-7b", "mistral-7b-v0.1"),
        ("mistralai/Mixtral-8x22B-v0.1", "mixtral-8x22b"),
        ("Mistral-Nemo", "mistral-nemo-12b"),
        ("Qwen/Qwen3-235B-A22B", "qwen3-235b-a22b"),
        ("qwen-2.5-7b", "qwen2.5-7b"),
        ("GPT-2", "gpt2"),
        ("openai-community/gpt2-xl/", "gpt2-xl"),
        ("gpt-3-175b", "gpt3-175b"),
        ("deepseek-ai/DeepSeek-V3", "deepseek-v3"),
    ],
)
def test_names_as_people_say_them(said: str, name: str) -> None:
    assert catalog.model(said).name == preset(said).model.name == name


def test_no_two_models_answer_to_one_name() -> None:
    for name in catalog.names():
        found = catalog.entry(name)
        for said in (name, found.source, *found.aliases):
            if "Table" not in said:
                assert catalog.entry(said) is found


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("lama-3.1-8b", "found lama-3.1-8b / allowed llama-3.1-8b, .*fix: use llama-3.1-8b"),
        ("qwen4-8b", "use qwen3-8b"),
        ("llama-3.1-9b", "allowed llama-3.1-8b, llama-3.1-70b, llama-3.1-405b · fix: use llama-3.1-8b"),
        ("Llama 3.1 400B", "use llama-3.1-405b"),
        ("llama3.2_2b", "use llama-3.2-1b|use llama-3.2-3b"),
        ("qwen3-30b", "use qwen3-30b-a3b"),
        ("gpt2-xxl", "use gpt2-xl"),
        ("llama", "allowed llama-.*penteract plan --models"),
        ("qwen2.5-15b", "use qwen2.5-1.5b"),
        ("2005.14165, Table 2.1", "MODEL"),
        ("bert", "MODEL"),
        ("", "fix: penteract plan --models lists them$"),
        ("x" * 10**6, "MODEL"),
        ("llama\n\u202e", "MODEL"),
    ],
)
def test_a_miss_names_the_nearest(said: str, line: str) -> None:
    with pytest.raises(BadInput, match=line) as caught:
        catalog.model(said)
    assert "\n" not in str(caught.value)


@given(st.text())
def test_any_name_is_a_model_or_one_line(said: str) -> None:
    try:
        assert catalog.model(said).name in catalog.names()
    except BadInput as error:
        assert error.code == "MODEL" and "\n" not in str(error)


@pytest.mark.parametrize("name", ["gpt3-125m", "llama-3.1-405b", "deepseek-v3", "qwen3-235b-a22b"])
def test_a_published_model_is_a_preset(name: str) -> None:
    run = resolve(preset=name).run
    assert run.model == catalog.model(name)
    assert (run.layout.global_batch_size, run.precision.dtype) == (64, "bf16")
    assert run.sequence_length == min(run.model.max_positions, 8192)
    assert run.optimizer.learning_rate == (catalog.entry(name).learning_rate or 3e-4)


def test_files_are_read_when_a_name_asks() -> None:
    """Importing presets reads none of them, and one name reads one."""
    program = """if True:
        import tomllib
        read, loads = [], tomllib.loads
        tomllib.loads = lambda text: read.append(text) or loads(text)
        from penteract.config.resolve import presets
        from penteract.config.resolve import resolved_run
        assert not read
        presets.preset("llama-3.1-8b")
        assert len(read) == 1 and "llama-2-7b" in read[0]
    """
    subprocess.run([sys.executable, "-c", program], check=True)
