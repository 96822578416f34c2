"""Layers, their order, and the place that each value comes from."""

from pathlib import Path

import pytest

from penteract.config.resolve.resolved_run import resolve
from penteract.config.resolve.write_run_file import to_toml
from penteract.errors import BadInput

MODEL = """
[model]
layers = 2
hidden_size = 64
heads = 4
ffn_size = 128
vocab_size = 264
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_nothing_given_trains_tiny() -> None:
    got = resolve()
    assert got.run.model.name == "tiny"
    assert (got.run.sequence_length, got.run.layout.global_batch_size, got.run.train.steps) == (256, 16, 40)
    assert got.origins["training.steps"] == "preset tiny"
    assert got.origins["optimizer.betas"] == "default"


def test_defaults_then_preset_then_file_then_flags(tmp_path: Path) -> None:
    path = write(tmp_path, 'preset = "tiny-moe"\n[training]\nsteps = 7\nseed = 3\n\n[parallel]\ntp = 2 # two\n')
    got = resolve(path, overrides=["--training.seed", "5", "parallel.pp=2"])
    assert (got.run.train.steps, got.run.train.seed, got.run.layout.tp, got.run.layout.pp) == (7, 5, 2, 2)
    assert got.run.model.moe is not None
    where = {
        k: got.origins[k] for k in ("training.steps", "training.seed", "parallel.tp", "parallel.pp", "model.layers")
    }
    assert where == {
        "training.steps": "run.toml:3",
        "training.seed": "--training.seed",
        "parallel.tp": "run.toml:7",
        "parallel.pp": "--parallel.pp",
        "model.layers": "preset tiny-moe",
    }


def test_every_key_has_an_origin(tmp_path: Path) -> None:
    got = resolve(write(tmp_path, MODEL))
    assert all(got.origins.values())
    assert got.origins["model.kv_heads"] == "derived: heads = 4"
    assert got.origins["model.head_size"] == "derived: 64 / 4"
    assert got.run.model.name == "custom"


def test_the_command_lines_preset_wins_over_the_files(tmp_path: Path) -> None:
    assert resolve(write(tmp_path, 'preset = "tiny"'), preset="tiny-moe").run.model.name == "tiny-moe"


def test_a_file_can_change_its_presets_model(tmp_path: Path) -> None:
    model = resolve(write(tmp_path, 'preset = "tiny"\n[model]\nlayers = 8')).run.model
    assert (model.name, model.layers, model.heads) == ("tiny", 8, 8)


def test_a_model_that_is_not_whole_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"MISSING.*no model.ffn_size, no model.vocab_size"):
        resolve(write(tmp_path, "[model]\nlayers = 2\nhidden_size = 64\nheads = 4"))


def test_a_config_json_replaces_the_model(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        '{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,'
        ' "intermediate_size": 96, "vocab_size": 300, "max_position_embeddings": 512}'
    )
    run = resolve(overrides=[f"model.config={config}", "model.layers=6"]).run
    assert (run.model.hidden_size, run.model.layers, run.model.kv_heads) == (64, 6, 4)


@pytest.mark.parametrize(
    ("overrides", "world", "dp", "origin"),
    [
        ([], None, 1, "default"),
        (["parallel.tp=2"], 8, 4, "derived: 8 / (2·1·1)"),
        (["parallel.dp=2", "parallel.cp=4"], 8, 2, "--parallel.dp"),
        (["parallel.dp=auto", "parallel.pp=2"], 4, 2, "derived: 4 / (1·2·1)"),
    ],
)
def test_dp_is_what_the_ranks_leave_over(overrides: list[str], world: int | None, dp: int, origin: str) -> None:
    got = resolve(overrides=overrides, world=world)
    assert (got.run.layout.dp, got.origins["parallel.dp"]) == (dp, origin)


@pytest.mark.parametrize(
    ("overrides", "micro", "steps"),
    [
        ([], 4, 4),
        (["parallel.dp=8"], 2, 1),
        (["batch.micro_batch_size=2"], 2, 8),
        (["batch.global_batch_size=6"], 3, 2),
        (["batch.global_batch_tokens=8192"], 4, 8),
        (["batch.global_batch_tokens=1Mi"], 4, 1024),
        (["parallel.dp=4", "parallel.pp=2", "parallel.vpp=2", "parallel.schedule=interleaved"], 2, 2),
    ],
)
def test_batch_arithmetic(overrides: list[str], micro: int, steps: int) -> None:
    got = resolve(overrides=overrides)
    lay = got.run.layout
    assert (lay.micro_batch_size, lay.gradient_accumulation_steps) == (micro, steps)
    wanted = f"derived: {lay.global_batch_size} / ({lay.dp}·{micro})"
    assert got.origins["batch.gradient_accumulation_steps"] == wanted


def test_of_sequences_and_tokens_the_later_layer_decides(tmp_path: Path) -> None:
    path = write(tmp_path, "[batch]\nglobal_batch_tokens = 8192")
    assert resolve(path).run.layout.global_batch_size == 32
    assert resolve(path, overrides=["batch.global_batch_size=8"]).run.layout.global_batch_size == 8
    with pytest.raises(BadInput, match="given twice"):
        resolve(write(tmp_path, "[batch]\nglobal_batch_tokens = 8192\nglobal_batch_size = 32"))
    with pytest.raises(BadInput, match=r"found 1000000 / allowed 999936, 1000192"):
        resolve(overrides=["batch.global_batch_tokens=1M"])


@pytest.mark.parametrize(
    ("written", "recompute"),
    [
        ("none", ("tp_all_gather",)),
        ("full", ("*",)),
        ('["tp_all_gather", "swiglu"]', ("tp_all_gather", "swiglu")),
        ("norm,swiglu", ("norm", "swiglu")),
    ],
)
def test_recompute(written: str, recompute: tuple[str, ...]) -> None:
    assert resolve(overrides=[f"memory.recompute={written}"]).run.layout.recompute == recompute


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[parallel]\ntpp = 2", r"KEY.*run.toml:2 · found parallel.tpp · fix: did you mean parallel.tp\?"),
        ("[paralel]\ntp = 2", r"KEY.*run.toml:1.*found paralel"),
        ("[training]\ntrain_iters = 2", r"did you mean training.steps\?"),
        ("[training]\nstep = 2", r"did you mean training.steps\?"),
        ("[parallel]\ntensor_model_parallel_size = 2", r"did you mean parallel.tp\?"),
        ("[parallel]\ntp = '2'", r'VALUE.*parallel.tp \(run.toml:2\) · found "2" / allowed a whole number, 1 to'),
        ("[parallel]\ntp = true", "VALUE.*found true"),
        ("[parallel]\ntp = 0", "VALUE.*found 0 / allowed a whole number, 1"),
        ("[parallel]\nschedule = '1f1bb'", r"allowed gpipe or 1f1b or interleaved or zb_h1"),
        ("[parallel.tp]\nx = 1", "VALUE.*parallel.tp"),
        ("[optimizer]\nlearning_rate = nan", "VALUE.*found nan"),
        ("[learning_rate]\nlr_decay_iters = 100", r"did you mean learning_rate.decay_end\?"),
        ("[optimizer]\nbetas = [0.9]", "allowed a list of 2"),
        ("[optimizer]\nbetas = [0.9, 2]", "allowed a number, 0 to 0.999999"),
        ("[data]\nsource = []\nsource = []", "TOML.*run.toml"),
        ("[data]\nsource = [1]", "allowed a text"),
        ("parallel = 3", "KEY"),
        ("[[model]]\nlayers = 3", "KEY"),
        ("preset = 3", "VALUE.*preset"),
        ("preset = 'big'", r"PRESET.*preset \(run.toml:1\) · found big"),
        ("[model]\nvocab_size = 256\npreset = 1", "KEY"),
        ("preset = 'tiny'\n[model]\nvocab_size = 256", "VOCAB.*run.toml:3"),
        (
            "preset = 'tiny-moe'\n[model.moe]\ndense_layers = [9]",
            r"dense_layers \(run.toml:3\) · found 9 / allowed 0 to 3",
        ),
        ("preset = 'tiny'\n[model.moe]\nexperts = 4", "MISSING.*no model.moe.top_k, no model.moe.ffn_size"),
        ("x = " + "[" * 5000, "TOML"),
    ],
)
def test_one_line_names_found_allowed_and_place(tmp_path: Path, text: str, line: str) -> None:
    with pytest.raises(BadInput, match=line) as caught:
        resolve(write(tmp_path, text))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("text", [b"\xff\xfe", b"x" * (2**20 + 1)])
def test_files_that_are_no_configuration(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(text)
    with pytest.raises(BadInput, match="FILE"):
        resolve(path)
    with pytest.raises(BadInput, match="FILE"):
        resolve(tmp_path)
    with pytest.raises(BadInput, match="FILE"):
        resolve("\0")


# ---- tokens to the experts of other ranks ----------------------------------------------------------------------------

MANY = ["parallel.dp=8", "model.moe.experts=16", "model.moe.top_k=4"]


def sent(*words: str, file: Path | None = None) -> tuple[str, str]:
    found = resolve(file, "" if file else "tiny-moe", [*([] if file else MANY), *words])
    return found.run.layout.ep_method, found.origins["parallel.ep_method"]


def test_tokens_are_gathered_where_that_sends_less() -> None:
    assert sent() == ("all_to_all", "default")
    assert sent("parallel.ep=2") == ("all_gather", "derived: ep = 2")
    assert sent("parallel.ep=4") == ("all_to_all", "derived: ep = 4")
    assert sent("parallel.ep=2", "parallel.ep_method=all_to_all")[0] == "all_to_all"
    with pytest.raises(BadInput, match="ep_method"):
        sent("parallel.ep=2", "parallel.ep_method=all_gahter")


def test_padded_rows_of_a_file_are_open_again_where_what_they_depend_on_changes(tmp_path: Path) -> None:
    """A run that goes on with other ranks is not refused for what was chosen for its first."""
    words = [*MANY, "parallel.ep=2", "kernels.experts=grouped", "model.hidden_size=128", "model.moe.ffn_size=64"]
    resolved = resolve(None, "tiny-moe", [*words, "parallel.expert_rows=padded"])
    (file := tmp_path / "run.toml").write_text(to_toml(resolved), encoding="utf-8")

    def rows(*flags: str) -> tuple[str, str]:
        found = resolve(file, "", flags)
        return found.run.layout.expert_rows, found.origins["parallel.expert_rows"]

    assert rows("training.steps=9")[0] == "padded"
    for flag in ("parallel.ep=1", "parallel.ep=8", "parallel.ep_method=all_to_all", "kernels.experts=reference"):
        assert rows(flag) == ("exact", "default"), flag
    assert rows("parallel.ep=4", "parallel.ep_method=all_gather", "parallel.expert_rows=padded")[0] == "padded"


def test_a_file_keeps_its_method_and_another_ep_has_its_own(tmp_path: Path) -> None:
    resolved = resolve(None, "tiny-moe", [*MANY, "parallel.ep=2"])
    (file := tmp_path / "run.toml").write_text(to_toml(resolved), encoding="utf-8")
    assert sent(file=file)[0] == "all_gather"
    assert sent("parallel.ep=8", file=file) == ("all_to_all", "derived: ep = 8")
    assert sent("parallel.ep=8", "parallel.ep_method=all_gather", file=file)[0] == "all_gather"
    lines = [
        line
        for line in file.read_text(encoding="utf-8").splitlines()
        if not line.startswith(("ep_method", "expert_rows"))
    ]
    file.write_text("\n".join(lines), encoding="utf-8")
    assert sent(file=file) == ("all_to_all", "that of runs from before this key")
