"""Check a Hugging Face folder against a model: all tensors are there with their shapes, before one is read.

Needs no torch: the command line checks before any process starts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from penteract.config.files.read import read_text
from penteract.config.files.regular import read_regular
from penteract.config.hf import model_from_hf
from penteract.config.hf.write_config import different
from penteract.config.model import LatentSpec, ModelSpec, MoESpec, RopeScaling
from penteract.engine.hf.headers import TensorHeader, held_tensors
from penteract.errors import BadInput
from penteract.model.hf_families import FAMILIES, HfFamily
from penteract.model.hf_names import Ours, by_theirs, hf_names

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
ELSEWHERE = "free some space, or name a folder on another disk"  # the fix where weights cannot be written
WEIGHTS_ALONE = "converted"  # the state of a run's folder that `convert` made: there is no training to resume
_ORIGIN = "init.json"  # in a run's folder: which weights it started from
_READ = ("F64", "F32", "F16", "BF16")
_SHOWN = 4  # names in a message


@dataclass(frozen=True, slots=True)
class HfFolder:
    """`ours`: our tensors by our names, and where they are in the folder; `held`: the folder's tensors by HF name.

    `ours` also marks rows of an embedding that are padding: our model may have more rows than the folder.
    """

    path: Path
    model: ModelSpec  # of config.json
    ours: Mapping[str, Ours]
    held: Mapping[str, TensorHeader]


def open_folder(path: Path, model: ModelSpec | None = None) -> HfFolder:
    """The folder, checked for `model`; by default for the folder's own model. The folder may have smaller vocabulary
    tables and more layers of multi-token prediction (MTP) than `model`.

    Raises BadInput or CorruptData: one line with the first few names that are wrong.
    """
    there, theirs = held_tensors(path), model_from_hf(path)
    # Files that transformers saved lack the MTP layers, even where config.json counts them.
    if not any(n.startswith(f"model.layers.{theirs.layers}.") for n in there):
        theirs = replace(theirs, mtp_layers=0)
    model = model or theirs
    refuse_another_model(model, theirs, path)
    config = json.loads(read_text(path / CONFIG))
    if config.get("quantization_config"):
        raise BadInput("UNSUPPORTED", "weights are quantised", where=str(path / CONFIG), found="quantization_config",
                       allowed="BF16, F16, F32, F64", fix="dequantise them first")  # fmt: skip
    family = str(config["model_type"])
    ours = hf_names(model, family, theirs.vocab_size)
    unneeded = range(model.layers + model.mtp_layers, theirs.layers + theirs.mtp_layers)
    return HfFolder(path, theirs, ours, _matched(path, FAMILIES[family], ours, there, unneeded))


def refuse_another_model(model: ModelSpec, theirs: ModelSpec, path: Path, *, padding: bool = True) -> None:
    """BadInput for the first field in which the model is not that of the weights.

    It may have fewer MTP layers and, with `padding`, larger vocabulary tables.
    """
    ours = replace(model, vocab_size=theirs.vocab_size) if padding else model
    if ours.positions == "rope":
        ours = replace(ours, max_positions=theirs.max_positions)
    ours = replace(ours, mtp_layers=max(ours.mtp_layers, theirs.mtp_layers))
    for name, mine, other in different(ours, theirs):
        raise _differs(name, _short(mine), _short(other), path)
    if model.vocab_size < theirs.vocab_size:
        raise _differs("model.vocab_size", model.vocab_size, f">= {theirs.vocab_size}", path)


_PARTS = {MoESpec: "experts", LatentSpec: "latent attention", RopeScaling: "scaled positions"}


def _short(value: object) -> str:
    """A value, or a part of a model by what it is called."""
    return _PARTS.get(type(value), str(value).lower() if value is None else str(value))


def _differs(where: str, found: object, allowed: object, path: Path) -> BadInput:
    fix = f"leave out --preset and the keys of the model: they are read from {path}"
    return BadInput("INIT", "the model is not that of the weights", where=where, found=found,
                    allowed=f"{allowed}, as in {path}", fix=fix)  # fmt: skip


def _matched(
    path: Path, family: HfFamily, ours: Mapping[str, Ours], there: Mapping[str, TensorHeader], unneeded: range
) -> dict[str, TensorHeader]:
    """The tensors that the mapping needs, by its names. Files may omit the family's prefix. `unneeded`: layers of the
    folder that the model lacks."""
    wanted, names = by_theirs(ours), by_theirs(ours, copies=True)
    named = {name if name in names or name.startswith(family.prefix) else family.prefix + name: name for name in there}
    _refuse(path, "tensors are missing", [n for n in wanted if n not in named])
    tied = {f"{family.prefix}lm_head.weight"} if "head.weight" not in ours else set[str]()  # a copy of the embedding
    skipped = tuple(f"{family.prefix}layers.{i}." for i in unneeded)
    extra = [n for full, n in named.items() if full not in names and full not in tied and not full.startswith(skipped)]
    _refuse(path, "tensors are not of this model", [n for n in extra if not family.unused.fullmatch(n)])
    found = {name: there[named[name]] for name in wanted}
    wrong = [f"{n} {list(h.shape)}" for n, h in found.items() if h.shape != wanted[n].shape]
    if wrong:
        first = next(n for n, h in found.items() if h.shape != wanted[n].shape)
        _refuse(path, "tensors have another shape", wrong, f"{list(wanted[first].shape)} for the first")
    _refuse(path, "tensors have another type", [f"{n} {h.dtype}" for n, h in found.items() if h.dtype not in _READ],
            ", ".join(_READ))  # fmt: skip
    return found


def _refuse(path: Path, what: str, names: list[str], allowed: str = "") -> None:
    if names:
        shown = ", ".join(n[:100] for n in names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
        raise BadInput("WEIGHTS", f"{len(names)} {what}", where=str(path), found=shown, allowed=allowed,
                       fix="use config.json and weights of the same model")  # fmt: skip


def remember(run: Path, weights: Path) -> None:
    """Write into a run's folder which weights it started from, and how many ids those have."""
    row = {"from": str(weights)}
    if (weights / CONFIG).is_file():
        row["vocab_size"] = str(model_from_hf(weights).vocab_size)
    (run / _ORIGIN).write_text(json.dumps(row) + "\n")


def remembered_vocabulary(run: Path) -> int:
    """Vocabulary size of the weights that a run started from: further rows are padding. 0: there are none, or their
    size is not known."""
    try:
        return int(json.loads(read_regular(run / _ORIGIN, largest=2**20))["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def weights_alone(run: Path) -> bool:
    """Whether a run's folder was made by `convert`."""
    try:
        return json.loads(read_regular(run / "status.json", largest=2**20))["state"] == WEIGHTS_ALONE
    except (OSError, ValueError, KeyError, TypeError):
        return False
