"""Our import, forward pass and export against transformers: an implementation of every family that is not ours."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.hf import families, forward
from engine.hf.families import FAMILIES, TOKENS
from penteract.cli import main
from penteract.config.layout import Layout
from penteract.engine.comm.groups import ProcessGroups
from penteract.engine.hf.folder import open_folder
from pool import Pool

TYPES = {"fp64": torch.float64, "fp32": torch.float32}


@dataclass(frozen=True)
class Saved:
    folder: Path
    logits: torch.Tensor


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Saved]:
    """Every family in either precision, as transformers writes it."""
    found: dict[tuple[str, str], Saved] = {}
    for family in FAMILIES:
        at = tmp_path_factory.mktemp(family)
        found[family, "fp32"] = Saved(at / "fp32", families.save(at / "fp32", family))
        with families.exact():
            found[family, "fp64"] = Saved(at / "fp64", families.save(at / "fp64", family))
    return found


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest, relative to the largest logit."""
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize(("precision", "most"), [("fp64", 1e-10), ("fp32", 1e-5)])
@pytest.mark.parametrize("family", FAMILIES)
def test_our_logits_are_theirs(saved: Any, family: str, precision: str, most: float) -> None:
    at = saved[family, precision]
    model = open_folder(at.folder).model
    ours = forward.logits(0, ProcessGroups(), at.folder, model, Layout(), TOKENS, precision)
    assert difference(forward.joined([ours]), at.logits) < most


LAYOUTS = [
    ("llama", Layout(tp=2, pp=2)),
    ("qwen3", Layout(tp=4, pp=2)),
    ("gpt2", Layout(tp=2, pp=2, dp=2)),
    ("mixtral", Layout(dp=2, ep=2, pp=2)),
    ("qwen3_moe", Layout(dp=2, tp=2, ep=2, expert_tp=2)),
    ("deepseek_v2", Layout(tp=2, pp=2)),
    ("deepseek_v3", Layout(dp=2, tp=4, ep=2)),
]


@pytest.mark.parametrize(("family", "layout"), LAYOUTS)
def test_ranks_fill_their_own_rectangles(saved: Any, pool: Pool, family: str, layout: Layout) -> None:
    at = saved[family, "fp64"]
    model = open_folder(at.folder).model
    found = pool.run(forward.logits, at.folder, model, layout, TOKENS, "fp64")
    assert difference(forward.joined(found), at.logits) < 1e-10


@pytest.mark.parametrize("family", FAMILIES)
def test_in_and_out_again_is_every_bit(saved: Any, family: str, tmp_path: Path, capsys: Any) -> None:
    at = saved[family, "fp64"]
    words = ["--dtype", "fp64", "--shard-gib", "4e-5"]
    assert main(["convert", str(at.folder), str(tmp_path / "ours"), *words]) == 0
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "back"), *words]) == 0
    back: dict[str, torch.Tensor] = {}
    for file in sorted((tmp_path / "back").glob("model-*-of-*.safetensors")):
        back |= load_file(file)
    wanted = load_file(at.folder / "model.safetensors")
    assert back.keys() == wanted.keys()
    assert all(torch.equal(back[n], wanted[n]) and back[n].dtype == wanted[n].dtype for n in wanted)
    with families.exact():
        model, said = families.load(tmp_path / "back", torch.float64)
        assert not any(said.values()), said
        assert difference(families.logits(model.eval()), at.logits) < 1e-12


def test_rows_beyond_theirs_are_the_mean_row(saved: Any) -> None:
    at = saved["gpt2", "fp64"]
    model = replace(open_folder(at.folder).model, vocab_size=288)
    ours = forward.joined([forward.logits(0, ProcessGroups(), at.folder, model, Layout(), TOKENS, "fp64")])
    assert difference(ours[:, :272], at.logits) < 1e-10
    mean = ours[:, :272].mean(1, keepdim=True).expand(-1, 16)
    torch.testing.assert_close(ours[:, 272:], mean, rtol=1e-10, atol=1e-10)
