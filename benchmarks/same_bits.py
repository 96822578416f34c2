"""GPUs: whether runs have the same bits when they are repeated, and what that costs.

    python benchmarks/same_bits.py --out OUT.json [--commit HASH] [--parts attention,steps,kills,ranks] [--cases A1,B1,E1,F1] [--sets NAME;NAME]

- **attention**: the backward pass of FlashAttention-4, called again and again: in how many of `CALLS` its gradients have
  the bits of the first, and its milliseconds, with `determinism` off and bitwise in turns.
- **kills**: runs that are killed while they save in the background, and resumed, beside ones that nothing disturbs.
  `bitwise`: all losses and norms, and the last checkpoint. Some have determinism off, which promises nothing.
- **ranks**: the same on two GPUs. All sets that are asked for run beside each other, and none may take longer than two
  minutes: ask for three at a time.
- **steps**: steps of `beside_torchtitan.py` with both, in turns, on as many GPUs as a case has.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]

import torch
from beside_sides import CASES, started_ranks
from killed_runs import killed_and_resumed
from provenance import hexadecimal, provenance

from penteract.config.layout import DETERMINISM, Determinism
from penteract.engine.kernels.fused_attention.fa4 import library

CALLS, ROUNDS, IN_A_ROW = 20, 8, 12
HERE = Path(__file__).parent
KEPT = ("median_ms", "spread_ms", "tok_s_gpu", "allocated_gib", "planned_ms", "planned_gib")
STEPS = 240  # of a run that is killed, or not


class Shape(NamedTuple):
    """Sequences, their tokens, heads of queries and of keys, and their size; documents that share a sequence, or 0; a
    window, or 0."""

    sequences: int
    tokens: int
    heads: int
    kv_heads: int
    size: int
    documents: int = 0
    window: int = 0


SHAPES: Mapping[str, Shape] = {
    "8 heads of keys": Shape(2, 8192, 32, 8, 128), "4,096 tokens": Shape(4, 4096, 32, 8, 128),
    "2,048 tokens": Shape(8, 2048, 32, 8, 128), "4 heads of keys": Shape(4, 4096, 32, 4, 128),
    "as many heads of keys": Shape(2, 4096, 16, 16, 128), "heads of 64": Shape(4, 4096, 32, 8, 64),
    "heads of 64, 32,768 tokens": Shape(1, 32_768, 32, 8, 64), "32,768 tokens": Shape(1, 32_768, 32, 8, 128),
    "a window of 1,024": Shape(2, 8192, 32, 8, 128, window=1024), "6 documents": Shape(1, 8192, 32, 8, 128, 6),
    "6 documents, heads of 64": Shape(1, 8192, 32, 8, 64, 6),
}  # fmt: skip

_SMALL = (
    "--preset=tiny", "--model.hidden_size=1024", "--model.heads=8", "--model.kv_heads=2", "--model.head_size=128",
    "--model.ffn_size=2816", "--batch.sequence_length=4096", "--batch.global_batch_size=4",
    "--batch.micro_batch_size=2", "--training.sample_tokens=0", "--training.validation_every=0", "--checkpoint.every=30",
    "--checkpoint.keep=0", "--checkpoint.asynchronous=true",
)  # fmt: skip
_EXPERTS = ("--model.moe.experts=16", "--model.moe.top_k=4", "--model.moe.ffn_size=512")
_TWO = ("--parallel.dp=2", "--parallel.ep=2", "--parallel.ep_method=all_gather", "--parallel.zero=1")
_WHOLE = "--data.pack_documents=false"
_FP8 = (_WHOLE, "--precision.dtype=fp8_tensorwise")
_ULYSSES = ("--parallel.cp=2", "--parallel.cp_method=ulysses")  # with documents
_PIPELINE = (_WHOLE, "--parallel.pp=2", "--batch.micro_batch_size=1")
KILLED: Mapping[str, Sequence[str]] = {
    "whole sequences": (_WHOLE,), "documents": (), "FP8": _FP8,
    "experts": (_WHOLE, *_EXPERTS), "reference attention": (_WHOLE, "--kernels.attention=reference"),
    "FP8, a scale a row": (_WHOLE, "--precision.dtype=fp8_rowwise"), "Muon": (_WHOLE, "--optimizer.kind=muon"),
    "experts one by one": (_WHOLE, *_EXPERTS, "--kernels.experts=reference"), "SwiGLU recomputed": (_WHOLE, "--memory.recompute=swiglu"),
}  # fmt: skip
RANKS: Mapping[str, Sequence[str]] = {
    "ZeRO 3": (_WHOLE, "--parallel.dp=2", "--parallel.zero=3"), "tensor parallel": (_WHOLE, "--parallel.tp=2"),
    "tensor parallel, overlapped": (_WHOLE, "--parallel.tp=2", "--kernels.collectives=overlapped"),
    "context parallel": ("--parallel.cp=2",), "pipeline": (_WHOLE, "--parallel.pp=2"),
    "experts of two ranks": (_WHOLE, *_EXPERTS, *_TWO, "--parallel.expert_rows=exact"),
    "experts of two ranks, padded": (_WHOLE, *_EXPERTS, *_TWO, "--parallel.expert_rows=padded", "--kernels.experts=quack"),
    **{f"ZeRO {stage}": (_WHOLE, "--parallel.dp=2", f"--parallel.zero={stage}") for stage in (0, 1, 2)},
    "tensor parallel, documents": ("--parallel.tp=2",),
    "tensor parallel, direct": (_WHOLE, "--parallel.tp=2", "--kernels.collectives=direct"),
    "context parallel, direct": ("--parallel.cp=2", "--kernels.collectives=direct"),
    "context parallel, ring": ("--parallel.cp=2", "--parallel.cp_method=ring"),  # with the plain kernel of attention
    "context parallel, Ulysses": (*_ULYSSES, "--kernels.collectives=library"),
    "context parallel, Ulysses, direct": (*_ULYSSES, "--kernels.collectives=direct"),
    "pipeline, zb_h1": (*_PIPELINE, "--parallel.schedule=zb_h1"),
    "pipeline, interleaved": (*_PIPELINE, "--parallel.schedule=interleaved", "--parallel.vpp=2"),
    "experts of two ranks, all-to-all": (_WHOLE, *_EXPERTS, "--parallel.dp=2", "--parallel.ep=2", "--parallel.zero=1",
                                         "--parallel.ep_method=all_to_all"),
    # In blocks with so little room that some steps are repeated.
    "experts of two ranks, in blocks": (_WHOLE, *_EXPERTS, "--parallel.dp=2", "--parallel.ep=2", "--parallel.zero=1",
                                        "--parallel.ep_method=all_to_all", "--parallel.expert_rows=padded",
                                        "--parallel.capacity_percent=105", "--kernels.experts=quack"),
    "FP8, ZeRO 3": (*_FP8, "--parallel.dp=2", "--parallel.zero=3"),
    "FP8, tensor parallel": (*_FP8, "--parallel.tp=2", "--kernels.collectives=library"),
    "FP8, tensor parallel, overlapped": (*_FP8, "--parallel.tp=2", "--kernels.collectives=overlapped"),
}  # fmt: skip


WITHOUT = ("whole sequences", "experts", "tensor parallel")  # which run with determinism off, too


def backward(shape: Shape, determinism: Determinism) -> tuple[Callable[[], Any], list[torch.Tensor]]:
    """A call, and the gradients that it writes."""
    torch.manual_seed(0)
    s, one = shape.tokens, (shape.sequences,) if not shape.documents else ()

    def new(heads: int) -> torch.Tensor:
        return torch.randn(*one, s, heads, shape.size, device="cuda").to(torch.bfloat16)

    q, k, v, g = (new(n) for n in (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads))
    about: dict[str, Any] = {"softmax_scale": shape.size**-0.5, "causal": True}
    about |= {"window_size_left": shape.window - 1} if shape.window else {}
    if shape.documents:
        ends = torch.linspace(0, s, shape.documents + 1, device="cuda").to(torch.int32)
        about |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": s, "max_seqlen_k": s}
    o, log_sum = torch.empty_like(q), torch.empty(*one, shape.heads, s, device="cuda")
    library()._flash_attn_fwd(q, k, v, **about, return_lse=True, out=o, lse=log_sum)
    made = [torch.empty_like(x) for x in (q, k, v)]
    about |= dict(zip(("dq", "dk", "dv"), made, strict=True))
    in_order = {"deterministic": True} if determinism == "bitwise" else {}
    return partial(library()._flash_attn_bwd, q, k, v, o, g, log_sum, **about, **in_order), made


def repeated(call: Callable[[], Any], made: Sequence[torch.Tensor]) -> int:
    """In how many calls all gradients have the bits of the first."""
    call()
    first, same = [x.clone() for x in made], 0
    for _ in range(CALLS):
        for x in made:
            x.fill_(7)
        call()
        same += all(map(torch.equal, first, made))
    return same


def milliseconds(call: Callable[[], Any]) -> float:
    """Of one of some calls in a row."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(IN_A_ROW):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / IN_A_ROW


def attention() -> Iterator[dict[str, Any]]:
    """A row for each shape."""
    for name, shape in SHAPES.items():
        both = {kind: backward(shape, kind) for kind in DETERMINISM}
        row: dict[str, Any] = {"shape": name, **shape._asdict()}
        row["same_bits"] = {kind: repeated(*calls) for kind, calls in both.items()}
        times = {kind: list[float]() for kind in DETERMINISM}
        for turn in range(ROUNDS):
            for kind in reversed(DETERMINISM) if turn % 2 else DETERMINISM:
                times[kind].append(milliseconds(both[kind][0]))
        row["ms"] = {kind: [median(t), min(t), max(t)] for kind, t in times.items()}
        yield row


def steps(cases: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A row for each case: the runs of both kinds, each in processes of its own."""
    for case in cases:
        row: dict[str, Any] = {"case": case, **{kind: list[dict[str, Any]]() for kind in DETERMINISM}}
        for kind in (*DETERMINISM, *reversed(DETERMINISM)):
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "run.json"
                words = [case, str(out), json.dumps({"determinism": kind}), "{}", "0"]
                launcher, environment = started_ranks(CASES[case].gpus)
                command = [sys.executable, *launcher, str(HERE / "beside_ours.py"), *words]
                subprocess.run(command, env=os.environ | environment, check=True)
                run = json.loads(out.read_text())
            row[kind].append({name: run[name] for name in KEPT} | {"losses": [run["losses"][0], run["losses"][-1]]})
        yield row


def kills(sets: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """What became of killed runs, by set of settings and determinism."""
    every = {
        f"{name}, {kind}": [*words, f"--kernels.determinism={kind}"]
        for name, words in sets.items()
        for kind in DETERMINISM
        if kind == "bitwise" or name in WITHOUT
    }
    with tempfile.TemporaryDirectory() as folder:
        return killed_and_resumed(Path(folder), "cuda", every, _SMALL, STEPS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="", type=hexadecimal)
    parser.add_argument("--parts", default="attention,steps,kills,ranks")
    parser.add_argument("--cases", default="A1,B1,E1,F1")
    parser.add_argument("--sets", default="", help="of kills and ranks: some names, with ; between them")
    asked = parser.parse_args()
    record: dict[str, Any] = {
        "case": "runs that are repeated", **provenance("python benchmarks/same_bits.py", asked.commit),
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "calls": CALLS,
    }  # fmt: skip
    wanted = [name.strip() for name in asked.sets.split(";") if name.strip()]
    if unknown := [name for name in wanted if name not in KILLED and name not in RANKS]:
        parser.error(f"no such sets: {'; '.join(unknown)}")
    for part in asked.parts.split(","):
        match part:
            case "attention":
                made: Any = list(attention())
            case "steps":
                made = list(steps(asked.cases.split(",")))
            case _:
                sets = KILLED if part == "kills" else RANKS
                chosen = {name: words for name, words in sets.items() if not wanted or name in wanted}
                made = kills(chosen) if chosen else {}
        record[part] = made
        print(json.dumps({part: made}), flush=True)
        asked.out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
