"""What the ranks of one layout saved, those of another go on with, bit for bit: whole buckets, shards, or both."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist

from engine.checkpoint.shards import load_whole, noise
from penteract.config.layout import Layout
from penteract.config.model import ModelSpec, MoESpec
from penteract.config.optimizers import PLAIN, OptimizerKind, OptimizerKinds
from penteract.engine import checkpoint
from penteract.engine.checkpoint.manifest import read
from penteract.engine.comm.distributed import Gloo
from penteract.engine.comm.groups import ProcessGroups, Round, needed
from penteract.engine.executor.allocator import Fresh
from penteract.engine.executor.executor import Executor
from penteract.engine.kernels.reference import REFERENCE
from penteract.engine.session.saved import KINDS, after_load, load_state, state_slices
from penteract.engine.state.split_master import rounded
from penteract.engine.state.state import ParameterPart, StateKind, TrainingState, allocate
from penteract.ops.params import Param
from penteract.step.program import Program, compile_step
from pool import Pool
from tiny import SIZES

MODEL = ModelSpec(**SIZES, tied=True, qkv_bias=True, moe=MoESpec(experts=4, top_k=2, ffn_size=24, dense_layers=(0,)))
CPU = torch.device("cpu")
Action = Literal["save", "load"]

PAIRS = [
    (Layout(dp=4, zero=1, bucket_bytes=2**12), Layout(dp=3, zero=1)),
    (Layout(dp=3, zero=1, bucket_bytes=0), Layout(dp=4)),
    (Layout(dp=2, tp=4), Layout(dp=4, ep=2, zero=1, bucket_bytes=2**13)),
    (Layout(dp=2, tp=2, ep=2, expert_tp=2, zero=1), Layout()),
    (Layout(dp=2, pp=2, cp=2, ep=4, gradient_accumulation_steps=2, zero=1), Layout(tp=8, zero=1)),
    (Layout(dp=4, zero=3, shard_group=2), Layout(dp=3, zero=2)),
    (
        Layout(dp=2, tp=2, pp=2, gradient_accumulation_steps=2, zero=2),
        Layout(dp=4, ep=2, zero=3, reshard_after_step=True),
    ),
    (Layout(dp=8, ep=4, zero=3, shard_group=2, reduce_scatter_once=True), Layout()),
    (Layout(dp=4, zero=3, offload_optimizer=True), Layout(dp=2, ep=2, zero=1, offload_optimizer=True)),
]


def truth(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The global tensor: random bytes of finite float32 numbers, many of them ties between two of bf16."""
    digest = hashlib.sha256(name.encode()).digest()
    words = noise(shape, torch.float32, int.from_bytes(digest[:4], "little")).view(torch.int32)
    words = words.where(words % 8 > 0, words & ~0xFFFF | 0x8000)
    return (words & ~(1 << 29)).view(torch.float32)  # no exponent is all ones, before or after rounding


def local(p: Program, q: Param, suffix: str) -> torch.Tensor:
    """What rank p.rank holds of it."""
    whole = truth(q.name + suffix, q.shape)
    for dim, (at, n) in enumerate(zip(q.offset(p.mesh, p.rank), q.local_shape(p.mesh), strict=True)):
        whole = whole.narrow(dim, at, n)
    return whole


def expected(p: Program, part: ParameterPart, suffix: str) -> torch.Tensor:
    return local(p, part.param, suffix).reshape(-1)[part.begin : part.begin + len(part.values)]


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().reshape(-1).view(torch.uint8)


def narrow(values: torch.Tensor) -> torch.Tensor:
    """The parameters of these master weights."""
    made = torch.empty(values.shape, dtype=torch.bfloat16)
    rounded(values, made)
    return made


def wide(state: TrainingState, kind: StateKind) -> list[torch.Tensor | None]:
    """The whole state of one kind by flat, in fp32."""
    return [
        None if (kept := flat.kept(kind)) is None else flat.read(kind, slice(0, len(kept)), torch.float32)
        for flat in state.flats
    ]


def visit(
    rank: int,
    groups: ProcessGroups,
    layout: Layout,
    folder: Path,
    action: Action,
    optimizer_kinds: OptimizerKinds = PLAIN,
) -> list[str]:
    """One rank saves the truth, or loads it; what differs then."""
    p = compile_step(MODEL, layout, 48, rank=rank, precision="bf16", optimizer_kinds=optimizer_kinds)
    everyone = tuple(range(layout.world))
    groups.make([*needed(p), Round((everyone,))])
    state = allocate(p, CPU)
    if action == "save":
        for suffix, kind in KINDS.items():
            values = wide(state, kind)
            for part in state.parameter_parts_of(values):
                part.values.copy_(expected(p, part, suffix))
            for flat, x in zip(state.flats, values, strict=True):
                if x is not None:
                    flat.write(kind, slice(0, len(x)), x)

        def barrier() -> None:
            if layout.world > 1:
                dist.barrier(group=groups[everyone])

        checkpoint.save(folder, 1, state_slices(p, state), {}, rank=rank, world=layout.world, barrier=barrier)
        return []
    load_state(checkpoint.latest(folder), p, state)
    after_load(Executor(p, state, Gloo(rank, groups), REFERENCE, Fresh("bf16", CPU)))
    wrong = [
        f"{rank}: {kind} of {part.param.name} from {part.begin}"
        for suffix, kind in KINDS.items()
        for part in state.parameter_parts_of(wide(state, kind))
        if not bits(part.values).equal(bits(expected(p, part, suffix)))
    ]
    for part in state.parameter_parts("parameter"):
        if not bits(part.values).equal(bits(narrow(expected(p, part, "")))):
            wrong.append(f"{rank}: rounded {part.param.name} from {part.begin}")
    cut = {q.name for b in p.buckets if b.cut_parameters for q in b.params}
    parameters = {q.name: narrow(local(p, q, "")) for q in p.params if q.name not in cut}
    return wrong + [f"{rank}: {n}" for n, t in parameters.items() if not bits(state.parameters[n]).equal(bits(t))]


@pytest.mark.parametrize(("wrote", "reads"), PAIRS, ids=str)
def test_any_layout_reads_any_other(pool: Pool, tmp_path: Path, wrote: Layout, reads: Layout) -> None:
    pool.run(visit, wrote, tmp_path, "save")
    at = checkpoint.latest(tmp_path)
    checkpoint.verify(at)
    like = {q.name: torch.empty(q.shape) for q in compile_step(MODEL, wrote, 48).everything}
    for name, t in load_whole(at, like).items():
        assert bits(t).equal(bits(truth(name, tuple(t.shape)))), name
    assert [wrong for rank in pool.run(visit, reads, tmp_path, "load") for wrong in rank] == []


@pytest.mark.parametrize(("wrote", "reads"), [PAIRS[3], PAIRS[6]], ids=str)
def test_what_muon_keeps_is_read_on_any_layout(pool: Pool, tmp_path: Path, wrote: Layout, reads: Layout) -> None:
    optimizer_kinds = OptimizerKinds(matrices=OptimizerKind("muon", 5))
    pool.run(visit, wrote, tmp_path, "save", optimizer_kinds)
    names = {n.rsplit("/", 1)[-1] for n in read(checkpoint.latest(tmp_path)).tensors if "/" in n}
    assert names >= {"mean", "square", "momentum"}
    assert [wrong for rank in pool.run(visit, reads, tmp_path, "load", optimizer_kinds) for wrong in rank] == []
