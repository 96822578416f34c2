"""The field's own words: what has a standard name has no other here. And no function hides a package."""

from __future__ import annotations

import re
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
    "stochastic_rounding, cpu_affinity, resume, liveness": "going_on fates",
}
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


def test_no_function_hides_a_package() -> None:
    packages = {p.name for p in (ROOT / "src" / "penteract").iterdir() if (p / "__init__.py").is_file()}
    assert packages.isdisjoint(penteract.__all__)
