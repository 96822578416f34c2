"""Inputs of every kind, from sound to hostile, drawn by hypothesis: files, and the command line that names them."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from hypothesis import strategies as st

from penteract.config.catalog.hardware import FOLDER
from penteract.config.files.keys import Key, keys
from penteract.config.files.sections import Count

Kind = Literal["file", "folder", "fifo", "loop", "nowhere", "device", "socket", "locked"]
DEPTHS = st.sampled_from([3, 200, 5_000, 100_000])


@dataclass(frozen=True)
class Entry:
    """What is at a path."""

    kind: Kind = "file"
    content: bytes = b""

    def make(self, at: Path) -> None:
        """Put it there."""
        at.parent.mkdir(parents=True, exist_ok=True)
        if self.kind in ("file", "locked"):
            at.write_bytes(self.content)
            at.chmod(0 if self.kind == "locked" else 0o644)
        elif self.kind == "folder":
            at.mkdir()
        elif self.kind == "fifo":
            os.mkfifo(at)
        elif self.kind == "socket":
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(os.path.relpath(at))  # a path of a socket is short
        else:
            at.symlink_to({"loop": at.name, "nowhere": "nowhere", "device": "/dev/zero"}[self.kind])

    def __repr__(self) -> str:
        """Short: a content may have 100,000 bytes."""
        return f"Entry({self.kind!r}, {self.content[:200]!r}{'…' * (len(self.content) > 200)})"


@dataclass(frozen=True)
class Input:
    """Files of the folder that a command runs in, and the command."""

    words: Sequence[str]
    files: Mapping[str, Entry] = field(default_factory=dict[str, Entry])

    def make(self) -> None:
        """Put the files into the present folder."""
        for name, entry in self.files.items():
            entry.make(Path.cwd() / name)


# ---- values ----------------------------------------------------------------------------------------------------------

NUMBERS = st.sampled_from(
    [0, 1, -1, 2, 3, 7, 8, 64, 1000, 1024, 1025, 2**16, 2**20, 2**24, 2**31, 2**48, 2**63, 2**70, 10**40, 10**400]
) | st.integers(-4, 300)  # fmt: skip
REALS = st.sampled_from([0.0, -0.0, 1.0, 0.5, 0.9, 0.999999, 0.9999999, 1e-20, 1e-45, 1e-320, 1e38, 1e300, -1.0,
                         float("inf"), float("-inf"), float("nan")]) | st.floats()  # fmt: skip
TEXTS = st.text(max_size=12) | st.sampled_from(
    ["", "auto", "none", "all", "full", "a/../..", "\x00", "é", "x" * 5_000, "/dev/zero", "1M", "true"]
)  # fmt: skip
ATOMS = st.none() | st.booleans() | NUMBERS | REALS | TEXTS
TREES = st.recursive(ATOMS, lambda s: st.lists(s, max_size=3) | st.dictionaries(TEXTS, s, max_size=3), max_leaves=5)
BYTES = st.binary(max_size=200) | st.sampled_from(
    [b"", b"\xff\xfe" * 50, b"\x00" * 4096, b"PK\x03\x04" + bytes(60), b"\x80\x04\x95", b"9" * 50_000,
     b"\xef\xbb\xbf{}"]
)  # fmt: skip
DEEP = st.builds(lambda what, n: what * n, st.sampled_from([b"[", b'{"a":', b"a.", b"[["]), DEPTHS)
ODD = st.sampled_from(["folder", "fifo", "loop", "nowhere", "device", "socket", "locked"]).map(
    lambda kind: Entry(kind, b"{}")
)


def as_json(tree: object) -> bytes:
    try:
        return json.dumps(tree).encode()
    except ValueError:  # a number of more digits than Python writes
        return b"9" * 5_000


def as_toml(value: object) -> str:
    """A value as TOML, as far as it has one."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {as_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    return as_json(value).decode()


@st.composite
def contents(draw: st.DrawFn, sound: st.SearchStrategy[bytes]) -> bytes:
    """Mostly what a sound file might hold; at times cut short, garbled, nested deeply or of another kind."""
    how = draw(st.integers(0, 11))
    if how == 0:
        return draw(BYTES)
    if how == 1:
        return draw(DEEP)
    text = draw(sound)
    if how == 2:
        return text[: draw(st.integers(0, len(text)))]
    if how == 3 and text:
        at = draw(st.integers(0, len(text) - 1))
        return text[:at] + draw(st.binary(max_size=4)) + text[at + 1 :]
    return text


def entries(sound: st.SearchStrategy[bytes]) -> st.SearchStrategy[Entry]:
    """A file, or at times something else with its name."""
    file = contents(sound).map(lambda content: Entry("file", content))
    return st.integers(0, 7).flatmap(lambda n: ODD if n == 0 else file)


# ---- run files -------------------------------------------------------------------------------------------------------


def values_of(key: Key) -> st.SearchStrategy[object]:
    """Values of a key: mostly sound ones and those at its bounds, and any."""
    if key.name == "output.folder":
        return st.sampled_from(["runs", "out", "", "a.toml", 3])
    if key.name == "checkpoint.folder":
        return st.sampled_from(["inside", "apart", "runs", ".", "", "a.toml", 3])
    hints = (key.hint, *get_args(key.hint))
    words: list[object] = [w for hint in hints if get_origin(hint) is Literal for w in get_args(hint)]
    if bool in hints:
        words += [True, False]
    if {int, float, Count} & {*hints}:
        words += [n for n in (1, 2, 3, 4, 8, 0.1, 0.5, 64) if key.least <= n <= key.most]
        words += [int(key.least), int(key.most), key.most, key.most + 1, key.least - 1]
    if tuple in map(get_origin, hints):
        words += [[0.9, 0.95], ["tp_all_gather"], ["swiglu", "norm"], [0], ["*:moments=int8"], []]
    sound = st.sampled_from([*words, *([key.default] if key.default is not None else [])] or ["x"])
    return st.integers(0, 5).flatmap(lambda n: sound if n else ATOMS | TREES)


SETTINGS = st.sampled_from(sorted(keys())).flatmap(
    lambda name: st.tuples(st.just(name), values_of(keys()[name]))
)  # fmt: skip
UNKNOWN = st.tuples(st.sampled_from(["parallel.tpp", "train.steps", "preset", "model.config", "a", "parallel"]), ATOMS)


def _run_file(pairs: Sequence[tuple[str, object]]) -> bytes:
    return "".join(f"{key} = {as_toml(value)}\n" for key, value in pairs).encode("utf-8", "replace")


RUN_FILES = st.lists(SETTINGS | UNKNOWN, max_size=4).map(_run_file)
OVERRIDES = st.lists(SETTINGS, max_size=3).map(
    lambda pairs: [f"--{key}={value if isinstance(value, str) else as_toml(value)}" for key, value in pairs]
)

# ---- models and hardware ---------------------------------------------------------------------------------------------

_SHAPE: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 128, "vocab_size": 512, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048,
    "rope_theta": 1e4, "tie_word_embeddings": False,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
CONFIGS: list[dict[str, Any]] = [
    {"model_type": "llama", **_SHAPE},
    {"model_type": "llama", **_SHAPE, "rope_scaling": _YARN},
    {"model_type": "mistral", **_SHAPE, "sliding_window": 64},
    {"model_type": "qwen3", **_SHAPE},
    {"model_type": "mixtral", **_SHAPE, "num_local_experts": 4, "num_experts_per_tok": 2},
    {"model_type": "qwen3_moe", **_SHAPE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
     "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True},
    {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024, "vocab_size": 512},
    {"model_type": "deepseek_v3", **_SHAPE, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24,
     "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
     "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
     "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 2.5},
]  # fmt: skip
_FIELDS = sorted({name for config in CONFIGS for name in config})
_MORE = ("rope_scaling", "rope_parameters", "quantization_config", "layer_types", "text_config", "attention_bias",
         "hidden_act", "num_nextn_predict_layers", "partial_rotary_factor")  # fmt: skip
SCALINGS = st.dictionaries(
    st.sampled_from(["rope_type", "type", "factor", "a", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
                     "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "rope_theta"]),
    st.sampled_from(["llama3", "yarn", "linear", "default", "dynamic"]) | ATOMS, max_size=5,
)  # fmt: skip


@st.composite
def configs(draw: st.DrawFn) -> bytes:
    """A config.json with some fields changed, added or left out; at times no object at all."""
    config = dict(draw(st.sampled_from(CONFIGS)))
    for name in draw(st.lists(st.sampled_from([*_FIELDS, *_MORE]), max_size=3)):
        if draw(st.integers(0, 4)) == 0:
            config.pop(name, None)
        else:
            config[name] = draw(SCALINGS if name.startswith("rope_s") and draw(st.booleans()) else ATOMS | TREES)
    return as_json(config if draw(st.integers(0, 20)) else draw(TREES))


_HARDWARE = (FOLDER / "8xh200.toml").read_text(encoding="utf-8").splitlines()


@st.composite
def hardware(draw: st.DrawFn) -> bytes:
    """A file of measured curves with some lines changed, doubled or left out."""
    lines = list(_HARDWARE)
    for _ in range(draw(st.integers(0, 3))):
        at, how = draw(st.integers(0, len(lines) - 1)), draw(st.integers(0, 3))
        name, equals, _ = lines[at].partition(" = ")
        if how == 0:
            lines[at] = ""
        elif how == 1:
            lines.insert(at, lines[at])
        elif equals:
            lines[at] = f"{name} = {as_toml(draw(ATOMS | TREES))}"
    return "\n".join(lines).encode("utf-8", "replace")


# ---- data and weights ------------------------------------------------------------------------------------------------

PROSE = st.sampled_from([b"", b"a b c\n" * 3, b"the quick brown fox\n" * 500, "日本語\n".encode() * 900, b"x" * 9_000])
ROWS = st.lists(
    st.sampled_from([{"text": "a row of text " * 200}, {"text": ""}, {"text": "\ud800"}, {}, {"text": 3}])
    | TREES, max_size=4,
).map(lambda rows: b"\n".join(map(as_json, rows)))  # fmt: skip
IDS = st.sampled_from([b"", b"\x01", bytes(16_000), bytes(15_999), b"\x01\x00" * 9_000, b"\xff" * 16_000])
DESCRIPTIONS = st.dictionaries(
    st.sampled_from(["dtype", "tokens", "end_of_document", "vocab_size", "largest"]),
    st.sampled_from(["uint16", "uint32", 8_000, 256]) | ATOMS | TREES, max_size=4,
).map(lambda d: as_json({"dtype": "uint16"} | d))  # fmt: skip
TOKENIZERS = (
    st.just({"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}})
    | st.dictionaries(st.sampled_from(["version", "added_tokens", "model", "truncation"]), TREES)
).map(as_json)
HEADERS = st.builds(
    lambda tree, length: (len(as_json(tree)) if length is None else length).to_bytes(8, "little") + as_json(tree),
    st.dictionaries(
        st.sampled_from(["model.norm.weight", "model.embed_tokens.weight", "__metadata__", "x"]),
        st.fixed_dictionaries({}, optional={"dtype": st.sampled_from(["F32", "BF16"]) | ATOMS, "shape": TREES,
                                            "data_offsets": st.lists(NUMBERS, max_size=2) | TREES}) | TREES,
        max_size=3,
    ),
    st.none() | st.sampled_from([0, 1, 2**40, 2**63]),
)  # fmt: skip
MANIFESTS = st.dictionaries(
    st.sampled_from(["format", "version", "tensors", "files", "extra", "step", "digest", "ranks"]), TREES
).map(as_json)


@st.composite
def data(draw: st.DrawFn) -> tuple[str, dict[str, Entry]]:
    """A source of data, and its files."""
    files: dict[str, Entry] = {}
    for name, sound in draw(st.lists(
        st.sampled_from([("a.txt", PROSE), ("b.txt", PROSE), ("a.jsonl", ROWS), ("a.bin", IDS), ("a.csv", PROSE)]),
        max_size=2, unique_by=lambda pair: pair[0],
    )):  # fmt: skip
        files[f"data/{name}"] = draw(entries(sound))
        if name == "a.bin" and draw(st.integers(0, 3)):
            files["data/a.bin.json"] = draw(entries(DESCRIPTIONS))
    named = draw(st.sampled_from(["data", *files, "data.txt", "", "hf:", "builtin", "builtin,data"]))
    return named, files


# ---- commands --------------------------------------------------------------------------------------------------------


@st.composite
def train_runs(draw: st.DrawFn) -> Input:
    """`train` with a run file, and values of the command line."""
    return Input(["train", "a.toml", *draw(OVERRIDES)], {"a.toml": draw(entries(RUN_FILES))})


@st.composite
def train_words(draw: st.DrawFn) -> Input:
    """`train` with a preset and values of the command line."""
    presets = ["tiny", "tiny-moe", "gpt2", "llama-3.1-8b", "deepseek-v3", "tin", ""]
    return Input(["train", "--preset", draw(st.sampled_from(presets)), *draw(OVERRIDES)])


@st.composite
def train_configs(draw: st.DrawFn) -> Input:
    """`train` with a config.json, or its folder."""
    name = draw(st.sampled_from(["config.json", "m/config.json"]))
    at = draw(st.sampled_from([name, name.rpartition("/")[0] or name]))
    return Input(["train", "--model.config", at, *draw(OVERRIDES)], {name: draw(entries(configs()))})


@st.composite
def train_data(draw: st.DrawFn) -> Input:
    """`train` with data, and at times a tokenizer of its own."""
    named, files = draw(data())
    words = ["train", f"--data.source={named}"]
    if draw(st.integers(0, 3)) == 0:
        files["tokenizer.json"] = draw(entries(TOKENIZERS))
        words.append("--tokenizer.source=tokenizer.json")
    return Input(words, files)


_PLAN_OPTIONS = ("--seq", "--batch", "--headroom", "--imbalance", "--top", "--tokens", "--precision", "--modules",
                 "--optimizer", "--trace-pp-rank", "--usd-per-gpu-hour", "--why")  # fmt: skip


@st.composite
def plans(draw: st.DrawFn) -> Input:
    """`plan` of one layout: a search may take as long as it needs."""
    files: dict[str, Entry] = {}
    model, gpus = draw(st.sampled_from(["gpt2", "llama-3.2-1b", "config.json"])), draw(
        st.sampled_from(["8xH200", "2x8xH100", "0xH200", "8xH2000", "99999999999xH200", "8x", "ours.toml", "H200x8"])
    )  # fmt: skip
    if model == "config.json":
        files[model] = draw(entries(configs()))
    if gpus == "ours.toml":
        files[gpus] = draw(entries(hardware()))
    layout = draw(st.sampled_from(["tp=1", "tp=2", "pp=2,zero=1", "zero=3", "tp=0", "tp=x", "a=b", "mbs=99999999999"]))
    words = ["plan", model, "--gpus", gpus, "--layout", layout]
    for option in draw(st.lists(st.sampled_from(_PLAN_OPTIONS), max_size=2)):
        value = draw(st.sampled_from(["1024", "64seqs", "0.5", "1", "bf16", "adamw"]) | ATOMS.map(as_toml) | TEXTS)
        words += [option, value]
    return Input(words, files)


@st.composite
def weights(draw: st.DrawFn) -> Input:
    """A Hugging Face folder to begin from, or to convert."""
    files = {"hf/config.json": draw(entries(configs())), "hf/model.safetensors": draw(entries(HEADERS))}
    if draw(st.booleans()):
        files["hf/model.safetensors.index.json"] = draw(
            entries(st.builds(lambda tree: as_json({"weight_map": tree}), TREES))
        )
    if draw(st.integers(0, 3)) == 0:
        files["hf/tokenizer.json"] = draw(entries(TOKENIZERS))
    return Input(draw(st.sampled_from([["train", "--init", "hf"], ["convert", "hf", "to"]])), files)


@st.composite
def runs(draw: st.DrawFn) -> Input:
    """A run's folder to go on from, to begin from, to compare with, to convert, or to list."""
    files = {"r/run.toml": draw(entries(RUN_FILES | st.just(b'preset = "tiny"\n')))}
    latest = draw(st.sampled_from(["step-00000010", "nowhere", "../..", ""]))
    files["r/checkpoints/latest"] = draw(entries(st.just(latest.encode())))
    if draw(st.booleans()):
        files["r/checkpoints/step-00000010/manifest.json"] = draw(entries(MANIFESTS))
    if draw(st.booleans()):
        files["r/metrics.jsonl"] = draw(entries(ROWS))
    commands = [["train", "--resume", "r"], ["train", "--init", "r"], ["train", "--compare", "r"],
                ["convert", "r", "to"], ["checkpoints", "r"], ["checkpoints", "r", "--verify"]]  # fmt: skip
    return Input(draw(st.sampled_from(commands)), files)


_WORDS = ["train", "plan", "convert", "init", "checkpoints", "--help", "--json", "--debug", "--draw", "--steps", "--tp",
          "--gpus", "--resume", "latest", "--init", "a.toml", "a/b/c", ".", "/", "-", "--", "-x", "parallel.tp=2", "=",
          "--.x=1", "--parallel.tp", "8xH200", "--model", "--version", "--json=maybe", "--no-json", "--grace", "nan",
          "\n", "--steps=1e9", "--log-level", "--verify", "--prune", "0"]  # fmt: skip


@st.composite
def command_lines(draw: st.DrawFn) -> Input:
    """Words in any order."""
    words = draw(st.lists(st.sampled_from(_WORDS) | TEXTS, max_size=5))
    if "--debug" in words or "llama-3.2-1b" in words:  # tracebacks are wanted then
        words = [word for word in words if word != "--debug"]
    return Input(words, {"a.toml": Entry("file", b"[training]\nsteps = 3\n")} if "a.toml" in words else {})


INPUTS = st.one_of(
    train_runs(), train_words(), train_configs(), train_data(), plans(), weights(), runs(), command_lines()
)  # fmt: skip
