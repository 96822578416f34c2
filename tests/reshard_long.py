"""Twenty layouts: what each saved, each other reads, and would save again byte for byte.

    python tests/reshard_long.py

The state of one rank, of random numbers, is read by each layout, which saves it; that file is read by each other. No
step is trained, so all ranks of a layout are made one after another in this process. Run by `make test-all`; writes
benchmarks/results/reshard_380.json. Exit status 1: a pair differs.
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from asked_long import commit
from layouts import Case
from penteract._version import __version__
from penteract.config.layout import Layout
from penteract.config.model import ModelSpec, MoESpec
from penteract.engine.checkpoint import rank_file
from penteract.engine.checkpoint.packing import rank_of
from penteract.engine.checkpoint.rank_file import RankTable
from penteract.engine.checkpoint.writing import entry
from penteract.engine.session.saved import KINDS, load_state, state_slices
from penteract.engine.state.state import TrainingState, allocate
from penteract.step.program import Program
from tiny import SIZES

RESULT = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "reshard_380.json"
CPU, STEP = torch.device("cpu"), 7
MODEL = ModelSpec(**SIZES, tied=True, qkv_bias=True, moe=MoESpec(experts=4, top_k=2, ffn_size=24, dense_layers=(0,)))
PRECISION = "bf16"  # parameters in 16 bits, master weights split
LARGEST = 2**14  # bytes of a file, so that a rank has several
_TWO: dict[str, Any] = {"gradient_accumulation_steps": 2}
LAYOUTS = (
    Layout(), Layout(dp=2), Layout(dp=2, zero=1), Layout(dp=4, zero=1, bucket_bytes=2**12), Layout(dp=3, zero=2),
    Layout(dp=4, zero=3), Layout(dp=4, zero=3, shard_group=2), Layout(dp=3, zero=1, bucket_bytes=0), Layout(tp=2),
    Layout(dp=2, tp=4), Layout(tp=8, zero=1), Layout(cp=2), Layout(dp=2, cp=2, zero=3), Layout(pp=2, **_TWO),
    Layout(dp=2, tp=2, pp=2, zero=2, **_TWO), Layout(dp=4, ep=2, zero=3, reshard_after_step=True),
    Layout(dp=8, ep=4, zero=3, shard_group=2, reduce_scatter_once=True), Layout(dp=2, pp=2, cp=2, ep=4, zero=1, **_TWO),
    Layout(dp=2, tp=2, ep=2, expert_tp=2, zero=1), Layout(dp=4, zero=3, offload_optimizer=True),
)  # fmt: skip


def random_state(p: Program) -> TrainingState:
    """Random numbers in all that is saved."""
    state, dice = allocate(p, CPU), torch.Generator().manual_seed(20)
    for flat in state.flats:
        for kind in KINDS.values():
            if (kept := flat.kept(kind)) is not None:
                flat.write(kind, slice(0, len(kept)), torch.randn(len(kept), generator=dice))
    for bias in state.biases.values():
        bias.copy_(torch.randn(bias.shape, generator=dice))
    return state


def save(at: Path, programs: list[Program], source: Path | None) -> None:
    """Save, as all ranks of a layout, what they read at `source`; the random state where there is none."""
    at.mkdir(parents=True)
    tables = list[RankTable]()
    for p in programs:
        state = random_state(p) if source is None else allocate(p, CPU)
        if source is not None:
            load_state(source, p, state)
        entries = [entry(s, finite=True) for s in state_slices(p, state)]
        tables.append(rank_file.write(at, entries, p.rank, largest=LARGEST))
    rank_file.finish(at, STEP, {"step": STEP}, tables)


def files(at: Path) -> dict[str, bytes]:
    """The content of a folder."""
    return {path.name: path.read_bytes() for path in at.iterdir()}


def differing(root: Path) -> list[str]:
    """The pairs that are not equal byte for byte."""
    programs = [[Case(MODEL, lay, precision=PRECISION).compile(r) for r in range(lay.world)] for lay in LAYOUTS]
    save(root / "origin", programs[0], None)
    for number, own in enumerate(programs):
        save(root / str(number), own, root / "origin")
    assert files(root / "0") == files(root / "origin")
    expected, found = [files(root / str(number)) for number in range(len(LAYOUTS))], list[str]()
    for written in range(len(LAYOUTS)):
        for read, own in enumerate(programs):
            if read == written:
                continue
            at = root / f"{written} {read}"
            save(at, own, root / str(written))
            if files(at) != expected[read]:
                found.append(f"{LAYOUTS[written]} -> {LAYOUTS[read]}")
            for path in at.iterdir():
                path.unlink()
    return found


def main() -> int:
    """Try all pairs, and write the record."""
    began = time.monotonic()
    torch.set_grad_enabled(False)
    with tempfile.TemporaryDirectory() as folder:
        found = differing(Path(folder))
        origin = Counter(rank_of(path.name) for path in Path(folder, "origin").glob("*.safetensors"))
    pairs = len(LAYOUTS) * (len(LAYOUTS) - 1)
    record = {
        "command": "python tests/reshard_long.py", "commit": commit(), "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "versions": {"penteract": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "layouts": [str(lay) for lay in LAYOUTS], "largest_file": LARGEST, "files_of_one_rank": origin[0],
        "pairs": pairs, "equal": pairs - len(found), "differing": found,
        "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip
    RESULT.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{pairs - len(found)} of {pairs} pairs are equal byte for byte, {record['seconds']} s")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
