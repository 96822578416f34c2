"""What is written loads again, and says where each value came from."""

import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penteract.config.files.keys import keys
from penteract.config.resolve.presets import PRESETS
from penteract.config.resolve.resolved_run import resolve
from penteract.config.resolve.write_run_file import (
    go_on,
    retrain_from,
    template,
    to_toml,
    with_device,
    with_first_origins,
)

CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "optimizer.learning_rate": st.floats(0, 1),
        "optimizer.betas": st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)).map(list),
        "training.seed": st.integers(0, 2**48),
        "data.source": st.lists(st.text(st.characters(categories=["L", "N", "P"]), min_size=1)),
        "model.name": st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1),
        "memory.recompute": st.sampled_from(["none", "full", ["tp_all_gather", "swiglu"], []]),
        "parallel.tp": st.sampled_from([1, 2, 4]),
        "data.pack_documents": st.booleans(),
        "model.qk_norm": st.booleans(),
    },
)


def toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value) if not isinstance(value, str) else value


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(sorted(PRESETS)), changes=CHANGES)
def test_a_written_run_loads_to_the_same_run(
    tmp_path_factory: pytest.TempPathFactory, name: str, changes: dict[str, object]
) -> None:
    if name == "tiny-latent":  # its latents are normalised, and no head after them
        changes = {key: value for key, value in changes.items() if key != "model.qk_norm"}
    words = [
        f"{key}={toml(value)}" for key, value in changes.items() if not isinstance(value, list) or "'" not in str(value)
    ]
    got = resolve(preset=name, overrides=words)
    path = tmp_path_factory.mktemp("run") / "run.toml"
    path.write_text(to_toml(got), encoding="utf-8")
    assert resolve(path).run == got.run


def test_every_written_value_has_its_origin_beside_it() -> None:
    text = to_toml(resolve(preset="tiny-moe", overrides=["--parallel.tp", "2"]))
    rows = [line for line in text.splitlines() if re.match(r"\w+ =", line)]
    assert len(rows) > 60
    assert all(re.search(r"  # (preset tiny-moe|default|derived: .+|--parallel.tp)$", row) for row in rows)
    assert re.search(r"^tp = 2 +# --parallel.tp$", text, re.MULTILINE)
    assert "# gradient_accumulation_steps = 4  (derived: 16 / (1·4))" in text


def test_a_second_reading_names_the_lines(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(to_toml(resolve()), encoding="utf-8")
    lines = path.read_text(encoding="utf-8").splitlines()
    origins = resolve(path).origins
    for key in ("model.layers", "parallel.tp", "output.folder"):
        number = int(origins[key].removeprefix("run.toml:"))
        assert lines[number - 1].startswith(key.rsplit(".", 1)[1] + " = ")


def test_a_file_that_is_written_anew_keeps_where_values_came_from_first(tmp_path: Path) -> None:
    """However often, and not what the command line has set since."""
    path = tmp_path / "run.toml"
    first = resolve(preset="tiny", overrides=["--optimizer.weight_decay", "0.3", 'data.source="a # b"'])
    path.write_text(to_toml(first))
    for _ in range(2):
        again = with_first_origins(resolve(path, "", ["training.steps=7"]), path)
        assert {**first.origins, "training.steps": "--training.steps"}.items() - again.origins.items() == set()
        path.write_text(to_toml(again))
    text = path.read_text()
    assert 'source = "a # b"' in text and "run.toml:" not in text


def test_a_line_without_a_comment_and_another_file(tmp_path: Path) -> None:
    path, other = tmp_path / "run.toml", tmp_path / "other" / "run.toml"
    other.parent.mkdir()
    path.write_text("[training]\nsteps = 7\nseed = 3 # mine, # and 3\n")
    other.write_text("[training]\nseed = 4  # theirs\n")
    origins = with_first_origins(resolve(path), path).origins
    assert (origins["training.steps"], origins["training.seed"]) == ("the run file, without a word", "mine, # and 3")
    assert with_first_origins(resolve(other), path).origins["training.seed"] == "run.toml:2"


def test_the_template_is_the_preset_tiny(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(template(), encoding="utf-8")
    assert resolve(path).run == resolve(preset="tiny").run


def test_the_template_names_every_key_with_the_preset_s_value_or_its_default() -> None:
    """All comments taken away, no table is lost: section names and verbs do not collide."""
    text = re.sub(r"^# ([\w]+ = |\[)", r"\1", template(), flags=re.MULTILINE).replace("= …", '= "…"')
    tree = tomllib.loads(text)
    chosen = PRESETS["tiny"]
    for key in keys().values():
        at = tree
        for part in key.name.split("."):
            at = at[part]
        section, _, leaf = key.name.rpartition(".")
        of_preset = getattr(chosen.model, leaf) if section == "model" else chosen.settings.get(key.name)
        value = key.default if of_preset is None else of_preset
        if value is not None:
            assert key.check(at, "template") == value


def test_nothing_is_auto_in_a_written_run() -> None:
    """What a recipe decides has its value; what the host or the cluster decides is left open."""
    text = to_toml(resolve(preset="tiny", overrides=["--precision.dtype=bf16", "--precision.gradient=bf16"]))
    assert '"auto"' not in text
    rows = dict(re.findall(r"^((?:# )?\w+ = \S+) +# (.*)$", text, re.MULTILINE))
    assert rows['# master = "fp32_split"'] == rows['# modules = "none"'] == "derived: recipe bf16"
    assert rows['gradient = "bf16"'] == "--precision.gradient"
    assert rows['reduce = "bf16"'] == "derived: precision.gradient"
    assert rows["# device = …"] == rows["# revision = …"] == rows["# partition = …"] == "default, left open"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_device_that_ranks_found_is_written_where_none_was_chosen(device: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    text = to_toml(resolve(preset="tiny"))
    path.write_text(with_device(text, device), encoding="utf-8")
    changed = [(a, b) for a, b in zip(text.splitlines(), path.read_text().splitlines(), strict=True) if a != b]
    assert [b.split("  # ")[1] for _, b in changed] == [
        f"derived: torch sees {'a' if device == 'cuda' else 'no'} GPU here"
    ]
    assert [a.index("  #") for a, _ in changed] == [b.index("  #") for _, b in changed]
    assert resolve(path).run.precision.device == device
    chosen = to_toml(resolve(preset="tiny", overrides=["--precision.device=cpu"]))
    assert with_device(chosen, "cuda") == chosen


def test_the_lines_above_the_values_name_a_command_that_does_what_they_say() -> None:
    run = resolve(preset="tiny")
    assert "#   penteract train run.toml\n" in to_toml(run)
    assert "#   penteract train run.toml --init 'my weights'\n" in to_toml(run, retrain_from("my weights"))
    resumed = to_toml(run, go_on("runs/a"))
    assert "#   penteract train --resume runs/a\n" in resumed and "the same run" not in resumed
