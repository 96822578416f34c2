"""Hardware that cannot be: each wrong entry of a file of measured curves is refused by its name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outside import LONGEST, penteract
from penteract.api import plan
from penteract.config.catalog.hardware import FOLDER, tables
from penteract.config.files.hardware_schema import FABRIC, GPU
from penteract.config.hardware import Cluster, cluster
from penteract.errors import BadInput

Tell = Callable[..., Any]
TEXT = (FOLDER / "8xh200.toml").read_text(encoding="utf-8")
ASKED = ("llama-3.2-1b", "--seq", "1024", "--batch", "64seqs", "--layout", "tp=2,zero=1")
TABLE = ("memory_gib = 80.0, bf16 = 900.0, tf32 = 450.0, fp32 = 60.0, fp8 = 0.0, fp64 = 30.0, hbm = 3000.0, "
         "multiprocessors = 132")  # fmt: skip


def changed(folder: Path, *changes: tuple[str, str]) -> Path:
    """The catalogue's file with lines changed, by regular expressions; each matches once."""
    text = TEXT
    for pattern, line in changes:
        text, found = re.subn(pattern, line, text, count=1, flags=re.MULTILINE)
        assert found, pattern
    path = folder / "ours.toml"
    path.write_text(text, encoding="utf-8")
    return path


ALL_GATHER = r"^8 = \[\[8389, 55.44\]"


@pytest.mark.alone
@pytest.mark.parametrize(
    ("change", "line"),
    [
        ((r"^gpus_per_node = 8", "gpus_per_node = -1"), "node.gpus_per_node (ours.toml:7) · found -1"),
        ((ALL_GATHER, "8 = [[8389, nan]"), "collectives.all_gather.8[0][1] (ours.toml:336) · found nan"),
        ((r"^gpus = 8", "gpus = inf"), "node.gpus (ours.toml:6) · found inf"),
    ],
)
def test_from_outside(tmp_path: Path, change: tuple[str, str], line: str) -> None:
    ended = penteract(tmp_path, "plan", "--gpus", changed(tmp_path, change), *ASKED)
    assert ended.refused and line in ended.err, ended
    assert ended.seconds < LONGEST


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ((r"^gpus = 8", "gpus = 0"), "VALUE]: not a value for this key · node.gpus (ours.toml:6) · found 0"),
        ((r"^gpus = 8", "gpus = true"), "node.gpus (ours.toml:6) · found true"),
        ((r"^gpus = 8", "gpus = 8.5"), "node.gpus (ours.toml:6) · found 8.5 / allowed a whole number, 1 to 2^20"),
        ((r"^gpus = 8", "gpus = 4194304"), "node.gpus (ours.toml:6) · found 4194304"),
        ((r"^gpus = 8", "gpus = 12"), "CLUSTER]: the last node would be part empty · node.gpus (ours.toml:4)"),
        ((r"^gpus_per_node = 8", "gpus_per_node = 16"), "CLUSTER]: no fabric joins so many devices of a node"),
        ((r"^gpus = 8", ""), "MISSING]: a key is missing · ours.toml:4 · found no node.gpus"),
        ((r"^gpus = 8", "gpu_count = 8"), "KEY]: unknown key · node (ours.toml:4) · found \"gpu_count\" · fix: did"),
        ((r'^gpu = "H200"', 'gpu = "H20O"'), "GPU]: no such GPU · found H20O"),
        ((r'^gpu = "H200"', f"gpu = {{ {TABLE} }}"), "MISSING]: a key is missing · ours.toml:5 · found no node.gpu.na"),
        ((r'^gpu = "H200"', f'gpu = {{ name = "X", {TABLE} }}'), "MISSING]: a key is missing · ours.toml:4 · found no"),
        ((r'^gpu = "H200"', f'gpu = {{ name = "X", {TABLE.replace("3000.0", "-1")} }}'), "node.gpu.hbm"),
        ((r"^copy = 4242.2", "copy = 0"), "memory.copy (ours.toml:314) · found 0 / allowed a number, 0.001 to 1e+06"),
        ((r"^copy = 4242.2", "copy = -inf"), "memory.copy (ours.toml:314) · found -inf"),
        ((r"^h2d_one = 52.79", ""), "MISSING]: a key is missing · ours.toml:313 · found no memory.h2d_one"),
        ((r"^flash = \[0.519, 0.549\]", "flash = [0.519]"), "attention.flash (ours.toml:310)"),
        ((r"^flash = \[0.519, 0.549\]", "flash = [0.5, nan]"), "attention.flash[1] (ours.toml:310) · found nan"),
        ((ALL_GATHER, "8 = [[-8389, 55.44]"), "collectives.all_gather.8[0][0] (ours.toml:336) · found -8389"),
        ((ALL_GATHER, "8 = [[8389]"), "collectives.all_gather.8[0] (ours.toml:336) · found [8389] / allowed a list of"),
        ((r"^8 = .*", "8 = []"), "collectives.all_gather.8 (ours.toml:336) · found [] / allowed a list of 1 or"),
        ((r"^8 = ", "1 = "), "a name in collectives.all_gather (ours.toml:333) · found 1 / allowed a whole number, 2"),
        ((r"^8 = ", "many = "), "a name in collectives.all_gather (ours.toml:333) · found \"many\""),
        ((r"^\[collectives.all_to_all\]", "[collectives.to_all]"), "KEY]: unknown key · collectives"),
        ((r"^\[moved\]\npoints = .*", "[moved]\npoints = 3"), "moved.points (ours.toml:324) · found 3"),
        ((r"^  \[1, 512, 512, 512, 51.91\]", "[1, 512, 512, 0, 51.91]"), "gemm.bf16.shapes[0][3] (ours.toml:25)"),
        ((r"^microseconds = 84.2", "microseconds = 1e300"), "launch.microseconds (ours.toml:381) · found 1e+300"),
        ((r"^\[contention\]", "contention = 3\n[sides]"), "KEY]"),
    ],
)  # fmt: skip
def test_each_wrong_entry_is_named(tell: Tell, tmp_path: Path, change: tuple[str, str], line: str) -> None:
    told = tell("plan", "--gpus", changed(tmp_path, change), *ASKED)
    assert (told.code, told.out) == (2, "")
    assert told.err.startswith("error[") and line in told.err and told.err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "MISSING]: a key is missing · none.toml · found no node"),
        ("node = 3", "MISSING]: a key is missing · none.toml · found no provenance"),
        ("[node", "CLUSTER]: not a file of measured curves"),
        ("a = " + "[" * 9000 + "]" * 9000, "CLUSTER]: not a file of measured curves: nested too deeply"),
        ("a = " + "9" * 9000, "CLUSTER]: not a file of measured curves"),
        ("\0", "CLUSTER]: not a file of measured curves"),
    ],
)
def test_what_is_no_such_file(tell: Tell, tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "none.toml").write_text(text)
    told = tell("plan", "--gpus", "none.toml", *ASKED)
    assert told.code == 2 and line in told.err and told.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--gpus", "99999999x8xH200"], "CLUSTER]: no cluster is that large · --gpus · found 99999999x8xH200"),
        (["--gpus", "1048576x8xH200"], "CLUSTER]: no cluster is that large"),
        (["--gpus", "9" * 5000 + "xH200"], "CLUSTER]: no cluster is that large"),
        (["--top", 10**30], "VALUE]: layouts count from 1 · --top"),
        (["--why", -1], "VALUE]: layouts count from 1 · --why · found -1"),
        (["--seq", 10**30], "VALUE]: no length of a sequence · --seq"),
        (["--headroom", "nan"], "VALUE]: not a share · --headroom · found nan"),
        (["--headroom", "-inf"], "VALUE]: not a share · --headroom · found -inf"),
        (["--tokens", "9" * 400], "VALUE]: not a number of tokens"),
        (["--tokens", "1T", "--usd-per-gpu-hour", "inf"], "VALUE]: not a price · --usd-per-gpu-hour · found inf"),
        (["--batch", "9" * 400], "BATCH]: not a batch"),
        (["--batch", "9" * 20 + "seqs"], "VALUE]: no number of sequences of a step · --batch"),
        (["--fix", "tp=" + "9" * 20], "SETTING]: not a size · --fix tp"),
        (["--fix", "bucket_bytes=" + "9" * 15], "SETTING]: not a size · --fix bucket_bytes"),
    ],
)
def test_options_have_bounds(tell: Tell, words: list[object], line: str) -> None:
    given: dict[object, object] = {"--gpus": "8xH200", "--seq": 1024, "--batch": "64seqs"}
    given |= dict(zip(words[::2], words[1::2], strict=True))
    told = tell("plan", "llama-3.2-1b", *(word for pair in given.items() for word in pair))
    assert told.code == 2 and line in told.err and told.err.count("\n") == 1, told


def test_a_small_product_on_a_busy_cpu_has_a_rate(tell: Tell, tmp_path: Path) -> None:
    first = r"^  \[1, 512, 512, 512, 51.91\]"
    slow = changed(tmp_path, (first, "  [1, 64, 64, 64, 7.2e-05],\n  [1, 512, 512, 512, 51.91]"))
    assert tell("plan", "--gpus", slow, *ASKED).code == 0


def test_few_measurements_are_enough(tell: Tell, tmp_path: Path) -> None:
    """One shape tells no term of a product from another; one point is a rate without a latency."""
    one = (r"(?s)^\[gemm.bf16\]\nshapes = \[.*?^\]", "[gemm.bf16]\nshapes = [[1, 4096, 4096, 4096, 600.0]]")
    point = (r"^\[moved\]\npoints = .*", "[moved]\npoints = [[12288, 2.01]]")
    told = tell("plan", "--gpus", changed(tmp_path, one, point), *ASKED)
    assert told.code == 0 and told.err == ""


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"gpus": 0}, "Cluster.gpus"),
        ({"gpus_per_node": -1}, "Cluster.gpus_per_node"),
        ({"memory_gib": float("nan")}, "Cluster.memory_gib"),
        ({"gpus": 12}, "Cluster.gpus"),
    ],
)
def test_clusters_from_python_have_the_same_bounds(change: dict[str, Any], name: str) -> None:
    known = cluster("8xH200")
    with pytest.raises(BadInput, match=name):
        plan("tiny", replace(known, **change), batch="16seqs", sequence_length=256)
    assert known.gpu is not None and known.between is not None
    for part, entry in (("gpu", replace(known.gpu, bf16=-1.0)), ("between", replace(known.between, latency_us=-1.0))):
        with pytest.raises(BadInput, match=rf"Cluster\.{part}"):
            plan("tiny", replace(known, **{part: entry}), batch="16seqs", sequence_length=256)
    assert Cluster(name="ours", gpus=8, memory_gib=80).gpu is None


def test_the_catalogue_keeps_to_it() -> None:
    for row in tables("gpus").values():
        assert GPU.check(row, "")["memory_gib"] == row["memory_gib"]
    for row in tables("fabrics").values():
        assert FABRIC.check(row, "")["gb_per_second"] == row["gb_per_second"]


@pytest.mark.parametrize("row", ["[549755813888, 128, 500.0, 400.0]", "[1000, 128, 8192, 500.0, 400.0]"])
def test_attention_of_no_sequence_length_is_refused(tmp_path: Path, row: str) -> None:
    """Files had rows without one before."""
    text = (FOLDER / "8xh200.toml").read_text()
    begin = text.index("shapes = [", text.index("\n[attention]"))
    (tmp_path / "old.toml").write_text(f"{text[:begin]}shapes = [{row}{text[text.index(chr(10) + ']', begin) :]}")
    with pytest.raises(BadInput, match="not the FLOPs of a sequence length") as caught:
        cluster(str(tmp_path / "old.toml"))
    assert row in str(caught.value) and "penteract calibrate" in str(caught.value)
