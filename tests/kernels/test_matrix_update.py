"""Muon's passes over a shard by kernels against those by torch, bit for bit: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penteract.config.layout import Layout
from penteract.config.optimizers import OptimizerKind, OptimizerKinds
from penteract.config.precision.policy import RECIPES, Policy
from penteract.config.run import Optimizer
from penteract.engine.comm.fake import FakeComm
from penteract.engine.device.storages import Storages
from penteract.engine.dtypes import DTYPES
from penteract.engine.executor.initial_weights import initialise
from penteract.engine.optim.matrix_update import MatrixUpdate
from penteract.engine.optim.muon import Muon
from penteract.engine.optim.shard_tiles import TILE
from penteract.engine.state.state import Flat, TrainingState, allocate
from penteract.step import muon as muon_costs
from penteract.step.program import compile_step
from precisions import POLICIES, SMALL, differ

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EVERY = {name: p for name, p in (RECIPES | POLICIES).items() if p.stat == "fp32" and not p.fp8}
SPEC = Optimizer(kind="muon", learning_rate=3e-2, weight_decay=0.2)
MODEL = replace(SMALL, layers=1, hidden_size=16, heads=4, kv_heads=2, head_size=4, ffn_size=104, vocab_size=64)
LAYOUT = Layout(dp=2, tp=2, zero=1, micro_batch_size=4)
LONE = Layout(micro_batch_size=4)


def state(policy: Policy, layout: Layout = LAYOUT, rank: int = 3) -> TrainingState:
    """By default of the second rank of tp and dp: matrices that both cut, before the first step."""
    kinds = OptimizerKinds(matrices=OptimizerKind("muon", 5))
    made = allocate(p := compile_step(MODEL, layout, 64, rank=rank, precision=policy, optimizer_kinds=kinds), DEVICE)
    initialise(p, made, 0)
    if made.scaling is not None:
        made.scaling.begin()
    made.flats = [f for f in made.flats if f.bucket.optimizer_kind.by_matrix]
    for flat in made.flats:
        flat.copy_from_master()
    return made


class _Alone:
    """Collectives without peers."""

    def on_wire(self, *_: object) -> _Alone:
        return self

    def wait(self) -> None: ...


def both(policy: Policy, s: TrainingState, spec: Optimizer = SPEC, rank: int = 3) -> tuple[Muon, Muon]:
    """By torch, by kernels."""
    comm: Any = FakeComm(rank, _Alone())  # type: ignore[arg-type]
    made = [
        Muon(spec, DEVICE, 5, s.scaling, comm=comm, policy=policy, passes=passes)
        for passes in (None, MatrixUpdate(spec, 5))
    ]
    for muon in made:
        muon.rate.fill_(spec.learning_rate)
    return made[0], made[1]


def draw(s: TrainingState, policy: Policy, step: int) -> list[torch.Tensor]:
    """Gradients from 1e-9 to 1, with the loss's scale where there is one. -> directions of each shard."""
    generator, made = torch.Generator().manual_seed(step), list[torch.Tensor]()
    scale = 1.0 if s.scaling is None else s.scaling.used.item()
    for flat in s.flats:
        g = torch.randn(len(flat.own_gradient), generator=generator) * scale
        flat.own_gradient.copy_(g * 10 ** (-9 * torch.rand(len(g), generator=generator)))
        d = torch.randn(len(g), generator=generator) * 0.2
        made.append(d.to(DTYPES[policy.products]).to(DEVICE))
    return made


def bits(flat: Flat, *more: torch.Tensor) -> list[torch.Tensor]:
    kept = [flat.own_parameter, flat.master, *flat.moments.values(), *flat.scales.values(), *more]
    return [x.contiguous().view(torch.uint8).clone() for x in kept]


@pytest.mark.parametrize("name", EVERY)
def test_three_steps_have_the_same_bits(name: str) -> None:
    policy = EVERY[name]
    ours = state(policy)
    assert any(len(f.master) % TILE for f in ours.flats) and max(len(f.master) for f in ours.flats) > TILE
    if policy.stochastic:
        assert any(q.gaps for f in ours.flats for q in f.parameter_slices)
    pair, norm = both(policy, ours), torch.tensor(4.0, device=DEVICE)
    for step in (1, 2, 3):
        for flat, direction in zip(ours.flats, draw(ours, policy, step), strict=True):
            start, ends = bits(flat), list[list[torch.Tensor]]()
            for muon, moved in zip(pair, (deepcopy(flat), flat), strict=True):
                muon.step.fill_(step)
                into, factors = torch.empty_like(direction), muon.factors(norm)
                muon.update_momentum(moved, into, factors)
                muon.apply(moved, direction.clone(), factors)
                ends.append(bits(moved, into))
                assert not muon.nonfinite.isnan()
            assert not differ(*ends) and len(differ(start, ends[1][:-1])) == len(start)


@pytest.mark.parametrize(("momentum", "nesterov"), [*product((0.3, 0.5, 0.99), (True, False))])
def test_any_momentum_has_the_same_bits(momentum: float, nesterov: bool) -> None:
    """Torch interpolates from the end that is nearer."""
    policy, norm = EVERY["fp32"], torch.tensor(0.04, device=DEVICE)
    ours = state(policy)
    pair = both(policy, ours, replace(SPEC, muon_momentum=momentum, muon_nesterov=nesterov, weight_decay=0.0))
    draw(ours, policy, 1)
    for flat in ours.flats:
        flat.moments["momentum"].normal_()
        ends = list[list[torch.Tensor]]()
        for muon, moved in zip(pair, (deepcopy(flat), flat), strict=True):
            into = torch.empty_like(flat.master)
            muon.update_momentum(moved, into, muon.factors(norm))
            ends.append(bits(moved, into))
        assert not differ(*ends)


@pytest.mark.parametrize("name", ["fp16, moments in 8 bits", "bf16_pure", "bf16"])
def test_a_norm_that_is_not_finite_leaves_every_bit(name: str) -> None:
    policy = EVERY[name]
    ours = state(policy)
    reference, kernels = both(policy, ours)
    for norm, spoilt in ((4.0, 1.0), (float("inf"), float("inf")), (float("nan"), 1.0), (float("nan"), float("nan"))):
        for flat, direction in zip(ours.flats, draw(ours, policy, 1), strict=True):
            flat.own_gradient[5] = spoilt
            before, found = bits(flat), list[torch.Tensor]()
            for muon, moved in ((reference, deepcopy(flat)), (kernels, flat)):
                into, factors = torch.empty_like(direction), muon.factors(torch.tensor(norm, device=DEVICE))
                muon.update_momentum(moved, into, factors)
                muon.apply(moved, direction.clone(), factors)
                found.append(into)
            assert torch.equal(*found)
            assert bool(differ(before, bits(flat))) == (norm == 4.0), (norm, spoilt)


def test_a_weight_that_is_not_finite_shows() -> None:
    policy = EVERY["bf16"]
    ours = state(policy)
    _, kernels = both(policy, ours)
    direction = draw(ours, policy, 1)[0]
    direction[7] = float("inf")
    kernels.apply(ours.flats[0], direction, kernels.factors(torch.tensor(4.0, device=DEVICE)))
    assert kernels.nonfinite.isnan()


# ---- whole updates, and what they are priced at ------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_a_whole_update_has_the_same_bits_and_allocates_what_is_priced(name: str) -> None:
    """Here the products are there, too. A matrix's workspace alone is beside the bucket: no copy of a slice is."""
    policy, norm = EVERY[name], torch.tensor(4.0, device=DEVICE)
    ours = state(policy, LONE, 0)
    pair = both(policy, ours, rank=0)
    draw(ours, policy, 1)
    for flat in ours.flats:
        ends = list[list[torch.Tensor]]()
        for muon, moved in zip(pair, (deepcopy(flat), flat), strict=True):
            muon.update(moved, muon.factors(norm))
            ends.append(bits(moved))
        assert not differ(*ends)
        factors = pair[1].factors(norm)  # tables of slices and of levels are there from the first update on
        with Storages() as seen:
            pair[1].update(flat, factors)
        priced = muon_costs.workspace(flat.bucket, policy, "triton")
        assert 0 <= seen.peak - priced <= 16, (seen.peak, priced)  # a matrix's norm, and its least


@pytest.mark.parametrize("name", ["bf16", "bf16, whole master weights", "bf16_pure", "fp16, moments in 8 bits"])
@pytest.mark.parametrize("layout", [LONE, LAYOUT, replace(LAYOUT, zero=0)], ids=["alone", "zero 1", "zero 0"])
def test_an_update_moves_the_bytes_that_it_is_priced_at(name: str, layout: Layout) -> None:
    """Those of the kernels, by the tensors that each is given; and of torch between them, by its operators."""
    policy, norm, rank = EVERY[name], torch.tensor(4.0, device=DEVICE), layout.world - 1
    ours = state(policy, layout, rank)
    kernels = both(policy, ours, rank=rank)[1]
    assert kernels.passes is not None
    for flat in ours.flats:
        factors, given, seen = kernels.factors(norm), list[tuple[str, torch.Tensor | None]](), _Moved()
        kernels.update(flat, factors)  # tables of slices are there from then on
        record: Any = lambda *_, given=given, **tensors: given.extend(tensors.items())  # noqa: E731
        with patch.object(MatrixUpdate, "_launch", record), seen:
            kernels.update(flat, factors)
        times = {"gradient": 1, "kept": 2, "scales": 2, "into": 1, "direction": 1, "master": 2,
                 "parameter": 1 + flat.splits_master}  # fmt: skip
        moved = sum(times.get(name, 0) * x.nbytes for name, x in given if x is not None)
        measured = len(flat.own_gradient) * flat.own_gradient.element_size()  # read for the norm
        assert moved == muon_costs.bytes_moved(flat.bucket, policy) - measured
        mine = muon_costs.own(flat.bucket, rank)
        assert sorted(seen.amounts) == sorted(muon_costs.passes(flat.bucket, mine, policy))


class _Moved(TorchDispatchMode):
    """Bytes that each operator over a matrix reads and writes; of a sum with a product, those of what it is added to,
    which torch copies to where the sum goes."""

    def __init__(self) -> None:
        super().__init__()
        self.amounts = list[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name = func(*args, **(kwargs or {})), func._schema.name
        times = {"aten::linalg_vector_norm": 1, "aten::zero_": 1, "aten::copy_": 2, "aten::div_": 2, "aten::mul": 2,
                 "aten::addmm": 2}.get(name)  # fmt: skip
        if times is not None and args[0].ndim:
            self.amounts.append(times * args[0].numel() * args[0].element_size())
        return out


def test_updates_in_fp64_are_refused() -> None:
    ours = state(EVERY["fp32"])
    kernels = both(EVERY["fp32"], ours)[1]
    with pytest.raises(TypeError, match=r"float32, not in torch\.float64"):
        kernels.update_momentum(
            ours.flats[0], torch.empty_like(ours.flats[0].master),
            kernels.factors(torch.ones((), dtype=torch.float64, device=DEVICE)),
        )  # fmt: skip
