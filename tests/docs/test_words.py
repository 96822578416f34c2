"""The field's own words: what has a standard name has no other here. And no function hides a package."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import penteract

ROOT = Path(__file__).parents[2]
RETIRED = {
    "recompute": "remake remakes remade remaking",
    "gpipe": "afab",
    "cp_method": "context_method",
    "reshard_after_step": "keep_gathered",
    "reduce_scatter_once": "whole_gradients",
    "redistribution": "seam seams",
    "optimizer": "mover movers",
    "overlapped": "woven",
    "op": "word words",
    "kernel, or an op's declaration": "body bodies TorchBody body_of",
    "work": "Flight",
    "moments, master weights": "averages masters",
    "BucketPlan, BucketKey, BucketPlanner": "Packer Alike",
    "shard_ranks, replicate_ranks, reduce_ranks": "sharers",
    "StageAssignment, SymbolicProgram, LivenessAnalysis": "Miniature Fate Fates",
    "tokens_per_expert, sort_chunks, expert_permutation": "tally tallies regroup sort_by_expert",
    "mtp_layers, layer_inputs": "predict_ahead anchors",
    "stochastic_rounding, cpu_affinity, resume, liveness": "going_on fates",
    "MicroBatch, TokenStream, is_complete, as_parts": "allocate_batches prefetcher have_tokens as_pieces",
    "min_pp, max_pp, min_vpp, max_vpp": "least_pp most_pp least_vpp most_vpp",
    "Bracketed, MOMENT_BLOCK, moment codebook": "Rounded",
    "intervals, layers, shards, chunks, products, text_parts: whichever it is": "pieces Piece",
    "Fp8Data, put_fp8, rowwise, columnwise, quantise": "Codes put_codes of_codes _of_codes as_codes coded CODED",
}
# These are plain English in a sentence, but not as a name in code: identifiers, or strings that name an op.
RETIRED_NAMES = {
    "parameter_parts, num_shards, overlaps, QueryChunk, StoredTensors": "piece_ops pieces_of Pieces QueryRun",
    "launcher_reports, notify": "told TELL_S _say",
    "num_micro_batches": "micros",
    "LeasedRun, run_lease, placed, used": "Taken taken",
    "reuses_fixed, own_largest, CHOICES": "known KNOWN",
    "linear_ops, rotary_columns": "linears _linears turned",
    "optimizer_state_bytes, optimizer_buffers, Interconnect": "kept_apart Wires",
    "other_stream, other_streams": "beside",
    "owning_pp_ranks of a parameter, locations of a placement": "owning_stages OwningStages",
    "delayed_scaling of FP8, delayed_weight_gradients of a schedule": "delayed",
    "StepAllReduce, all_reduce_max, broadcast": "agree agreed Agreement agreements",
    "FsdpUnit; SHARD_MULTIPLE, PRODUCT_MULTIPLE": "Unit UNIT FP8_UNIT",
    "period of a schedule, tick of a watch, last_read of FSDP": "last_turn unit_turns UnitTurns",
    "failure_row, one_line, print_grace, refuse_used_folder": "_told _say_grace refuse_taken",
    "as_settings, parse_settings, SettingFilter": "as_axes parse_axes changed_axes AxisFilter",
    "RecipeState; LearningRateSchedule, lr_schedule of a run; WorkerQueue": "Recipe RECIPE LearningRate Lane Lanes",
    "P2PBatch, post_p2p, wait_recv, wait_sends": "Exchange exchange exchanges _exchange",
}
RETIRED_STRINGS = {"tp_all_gather, tp_reduce_scatter": "enter leave", "rotary_columns": "turned"}
# What people type, what they read and what a vocabulary of tokens has are words; a function has a body.
PLAIN = {"word", "words", "body", "bodies"}
WHERE = ("src/penteract/ops", "src/penteract/step", "src/penteract/readings", "src/penteract/engine/kernels",
         "src/penteract/parallel", "src/penteract/schedule")  # fmt: skip


EVERYWHERE = ("src", "tests", "docs", "benchmarks", "examples", "README.md", "ARCHITECTURE.md")


def texts(*under: str) -> list[Path]:
    """Files of the project that people read, but for this one."""
    every = [q for name in under for q in ([ROOT / name] if (ROOT / name).is_file() else (ROOT / name).rglob("*"))]
    return [p for p in every if p.suffix in (".py", ".md", ".toml", ".json") and p != Path(__file__)]


def test_retired_words_do_not_come_back() -> None:
    retired = {word for words in RETIRED.values() for word in words.split()}
    everywhere = re.compile(rf"(?<!\w)({'|'.join(sorted(retired - PLAIN))})(?!\w)")
    of_ops = re.compile(rf"(?<!\w)({'|'.join(sorted(PLAIN))})(?!\w)", re.IGNORECASE)
    found = list[str]()
    for pattern, files in ((everywhere, texts(*EVERYWHERE)), (of_ops, texts(*WHERE))):
        for path in files:
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                found += [f"{path.relative_to(ROOT)}:{number}: {one}" for one in pattern.findall(line)]
    assert not found, RETIRED


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, identifier) of all that a file names."""
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "asname"):
            if isinstance(name := getattr(node, field, None), str):
                yield getattr(node, "lineno", 0), name


def test_retired_names_do_not_come_back() -> None:
    retired = {name for names in RETIRED_NAMES.values() for name in names.split()}
    strings = {name for names in RETIRED_STRINGS.values() for name in names.split()}
    found = list[str]()
    for path in sorted((ROOT / "src").rglob("*.py")):
        tree, where = ast.parse(path.read_text(encoding="utf-8")), path.relative_to(ROOT)
        found += [f"{where}:{line}: {name}" for line, name in names(tree) if name in retired]
        found += [
            f"{where}:{node.lineno}: {node.value!r}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and node.value in strings
        ]
    assert not found, RETIRED_NAMES | RETIRED_STRINGS


def test_no_function_hides_a_package() -> None:
    packages = {p.name for p in (ROOT / "src" / "penteract").iterdir() if (p / "__init__.py").is_file()}
    assert packages.isdisjoint(penteract.__all__)


def packages() -> list[Path]:
    return sorted({p.parent for p in (ROOT / "src" / "penteract").rglob("*.py")})


def test_no_folder_is_a_list_of_everything() -> None:
    """About twelve entries: with more, some are read together and want a package."""
    crowded = {}
    for folder in packages():
        entries = [p for p in folder.iterdir() if not p.name.startswith("_") and p.name != "py.typed"]
        if len(entries) > 16:
            crowded[folder.name] = len(entries)
    assert crowded == {}


def test_no_class_has_the_name_of_another() -> None:
    found = Counter(
        node.name
        for path in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, n in found.items() if n > 1] == []


# Files of one name in two packages are two sides of one thing: a declaration and its kernels; a verb and what
# answers it; what a probe asks and what a finding is made of.
MIRRORS = (
    {"ops/declarations", "engine/kernels", "engine/kernels/triton", "model", "config/precision"},
    {"cli", "cli/resolve", "planner", "planner/search", "planner/report", "config", "engine/hf", "engine/session"},
    {"cli", "engine/doctor"},
    {"engine/doctor", "engine/doctor/probe"}, {"engine/checkpoint", "engine/hf"}, {"cli", "measure/schemas"},
    {"step", "engine/optim", "engine/kernels/triton"}, {"readings/time/timelines", "planner/report"},
    {"schedule", "ops/declarations", "engine/kernels"},
    {"ops/declarations/moe", "engine/kernels/moe", "engine/kernels/triton"},
    {"ops/declarations/fused_attention", "engine/kernels/fused_attention"},
    {"ops/declarations/quantised", "engine/kernels/quantised", "engine/kernels/triton/quantised", "config/precision"},
)  # fmt: skip


def test_a_file_has_the_name_of_another_only_where_it_mirrors_it() -> None:
    found = defaultdict[str, set[str]](set)
    for path in (ROOT / "src" / "penteract").rglob("*.py"):
        if path.name != "__init__.py":
            found[path.name].add(path.parent.relative_to(ROOT / "src" / "penteract").as_posix())
    twice = {name: sorted(where) for name, where in found.items() if len(where) > 1}
    assert {name: where for name, where in twice.items() if not any({*where} <= m for m in MIRRORS)} == {}
