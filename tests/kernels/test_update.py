"""AdamW's step by a kernel against that by torch, from the same start: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from penteract.config.layout import Layout
from penteract.config.optimizers import OptimizerName
from penteract.config.precision.policy import MOMENT_BLOCK, RECIPES, Policy
from penteract.config.run import Optimizer
from penteract.engine.device.storages import Storages
from penteract.engine.executor.initial_weights import initialise
from penteract.engine.kernels import registry
from penteract.engine.kernels.kernel import TorchKernel
from penteract.engine.kernels.triton.optimizer.adamw import UpdateForm
from penteract.engine.kernels.triton.optimizer.adamw import update as update_plain
from penteract.engine.optim.matrix_update import MatrixUpdate
from penteract.engine.optim.optimizer import AdamW
from penteract.engine.optim.shard_update import TILE, Update
from penteract.engine.session import trainer
from penteract.engine.state import moments
from penteract.engine.state.state import Flat, TrainingState, allocate
from penteract.ops.declarations import OPS, Implementation
from penteract.parallel.data import Bucket
from penteract.step import update as step_update
from penteract.step.program import compile_step
from precisions import POLICIES, SMALL, Small, differ, kept

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EVERY = {name: p for name, p in (RECIPES | POLICIES).items() if p.stat == "fp32" and not p.fp8}
INT8_MOMENTS = "bf16, no master, moments in 8 bits"
MODEL = replace(SMALL, layers=1, hidden_size=16, heads=4, kv_heads=2, head_size=4, ffn_size=104, vocab_size=64)
LAYOUT = Layout(dp=2, tp=2, zero=1, micro_batch_size=4)
SPEC = Optimizer(learning_rate=3e-2)
EPS = 2.0**-23  # from one to the next number of fp32; a rounding is off by half of it
FINITE = 4.0


def state(policy: Policy, rank: int = 3) -> TrainingState:
    """A rank's, of the second ranks of tp and dp: parameters cut by either, before the first step."""
    made = allocate(p := compile_step(MODEL, LAYOUT, 64, rank=rank, precision=policy), DEVICE)
    initialise(p, made, 0)
    if made.scaling is not None:
        made.scaling.begin()
    for flat in made.flats:
        flat.copy_from_master()
    return made


def optimizer_kinds(s: TrainingState, spec: Optimizer = SPEC, seed: int = 5) -> tuple[AdamW, AdamW]:
    """By torch, by the kernel."""
    both = AdamW(spec, DEVICE, seed, s.scaling), AdamW(spec, DEVICE, seed, s.scaling, Update(spec, seed))
    for adamw in both:
        adamw.rate.fill_(spec.learning_rate)
    return both


def draw(s: TrainingState, step: int) -> None:
    """Gradients from 1e-9 to 1, with the loss's scale where there is one."""
    generator = torch.Generator().manual_seed(step)
    scale = 1.0 if s.scaling is None else s.scaling.used.item()
    for flat in s.flats:
        g = torch.randn(len(flat.own_gradient), generator=generator) * scale
        flat.own_gradient.copy_(g * 10 ** (-9 * torch.rand(len(g), generator=generator)))


def wide(flat: Flat) -> dict[str, torch.Tensor]:
    """Copies of all that it keeps in fp32."""
    whole = slice(0, len(flat.master))
    return {
        "mean": flat.read("mean", whole, torch.float32).clone(),
        "square": flat.read("square", whole, torch.float32).clone(),
        "master": flat.read("master", whole, torch.float32).clone(),
        "parameter": flat.own_parameter.float().clone(),
    }


def bits(flat: Flat) -> list[torch.Tensor]:
    kept = [flat.own_parameter, flat.master, *flat.moments.values(), *flat.scales.values()]
    return [x.contiguous().view(torch.uint8).clone() for x in kept]


# ---- by torch and by the kernel ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_three_steps_by_the_kernel_are_those_by_torch(name: str) -> None:
    """Each from the same start. Either rounds a few times in other places: `_close` says how far that may carry."""
    ours = state(EVERY[name])
    reference, kernel = optimizer_kinds(ours)
    norm = torch.tensor(FINITE, device=DEVICE)
    sizes, places = [len(f.master) for f in ours.flats], [f.parameter_slices for f in ours.flats]
    assert any(n % TILE for n in sizes) and max(sizes) > TILE
    if EVERY[name].stochastic:  # several in one tile, cut by the shard, cut over tp
        assert max(map(len, places)) > 1 and any(q.begin for some in places for q in some)
        assert any(q.gaps for some in places for q in some)
    for step in (1, 2, 3):
        draw(ours, step)
        for flat in ours.flats:
            theirs, before, start = deepcopy(flat), wide(flat), bits(flat)
            for adamw, moved in ((reference, theirs), (kernel, flat)):
                adamw.step.fill_(step)
                adamw.update(moved, adamw.factors(norm))
            assert len(differ(start, bits(flat))) == len(start)
            _close(reference, flat, theirs, before, norm)


def _close(adamw: AdamW, ours: Flat, theirs: Flat, before: dict[str, torch.Tensor], norm: torch.Tensor) -> None:
    """In fp32 an average is a sum of two products: two roundings each, one of the sum, so both kernels are within
    2·EPS of what is summed. The step is a quotient of them: four roundings more. What is then rounded to fewer bits is
    the same but where that lies at a border; there it is a neighbour, unless terms cancel and leave less."""
    f = adamw.factors(norm)
    g = ours.own_gradient.float() * f.gradient
    size = before["mean"].abs() + g.abs() * f.mean
    square = before["square"] * f.square + (1 - adamw.spec.betas[1]) * g.square()
    off = {"mean": 3 * EPS * size, "square": 3 * EPS * square}
    longest = f.rate * size / ((square.sqrt() / f.root) + adamw.spec.epsilon)
    off["master"] = off["parameter"] = 12 * EPS * longest + 2 * EPS * before["master"].abs()
    now, then = wide(ours), wide(theirs)
    tiny = 2.0**-140  # products that are nearly nothing lose their last bits
    for kind, there in then.items():
        buffer = {"master": ours.master, "parameter": ours.own_parameter}.get(kind)
        narrow = (ours.moments[kind] if buffer is None else buffer).dtype  # type: ignore[index]
        if kind == "master" and ours.splits_master:
            narrow = torch.float32
        gap = (now[kind] - there).abs()
        if narrow == torch.float32:
            assert (gap <= off[kind] + tiny).all(), (kind, (gap / (off[kind] + tiny)).max())
            continue
        if narrow == torch.uint8:
            assert torch.allclose(ours.scales[kind], theirs.scales[kind], rtol=3 * EPS, atol=0)  # type: ignore[index]
            indices = ours.moments[kind].int() - theirs.moments[kind].int()  # type: ignore[index]
            other, apart = indices != 0, indices.abs() > 1
        else:
            steps = [x.to(narrow).view(torch.int16).int() for x in (now[kind], there)]
            other, apart = steps[0] != steps[1], (steps[0] - steps[1]).abs() > 1
        assert not (apart & (gap > off[kind])).any(), (kind, narrow)
        assert other.sum() <= 1 + len(other) // 500, (kind, narrow, int(other.sum()))


def test_averages_that_forget_fast_are_those_by_torch() -> None:
    """Whose lerp has another form then."""
    spec = replace(SPEC, betas=(0.3, 0.8))
    ours = state(EVERY["fp32"])
    reference, kernel = optimizer_kinds(ours, spec)
    norm = torch.tensor(FINITE, device=DEVICE)
    for step in (1, 2):
        draw(ours, step)
        for flat in ours.flats:
            theirs, before = deepcopy(flat), wide(flat)
            reference.update(theirs, reference.factors(norm))
            kernel.update(flat, kernel.factors(norm))
            _close(reference, flat, theirs, before, norm)


@pytest.mark.parametrize(
    "form", [UpdateForm(1024, 4), UpdateForm(4096, exact=True), UpdateForm(512, 4, fused=False, stream=True)], ids=str
)
def test_every_form_of_the_plain_kernel_is_as_close(form: UpdateForm) -> None:
    """It is chosen by its speed."""
    ours = state(EVERY["bf16"])
    reference, _ = optimizer_kinds(ours)
    norm = torch.tensor(FINITE, device=DEVICE)
    factors, numbers = reference.factors(norm), (1 - SPEC.betas[1], SPEC.epsilon)
    draw(ours, 1)
    for flat in ours.flats:
        theirs, before = deepcopy(flat), wide(flat)
        reference.update(theirs, factors)
        buffers = flat.moments["mean"], flat.moments["square"], flat.master, flat.own_parameter
        update_plain(
            flat.own_gradient, *buffers, factors.good, reference.nonfinite, numbers, decay=flat.bucket.decay, form=form
        )
        _close(reference, flat, theirs, before, norm)


# ---- overflows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
@pytest.mark.parametrize("kernel", [0, 1], ids=["torch", "kernel"])
@pytest.mark.parametrize("name", ["fp16, moments in 8 bits", "bf16_pure"])
def test_a_norm_that_is_not_finite_leaves_every_bit(name: str, kernel: int, clip_norm: float) -> None:
    ours = state(EVERY[name])
    adamw = optimizer_kinds(ours, replace(SPEC, clip_norm=clip_norm))[kernel]
    draw(ours, 1)
    for flat in ours.flats:
        adamw.update(flat, adamw.factors(torch.tensor(FINITE, device=DEVICE)))
    for norm, spoilt in (("inf", "inf"), ("nan", "nan"), ("inf", "1"), ("nan", "-inf")):
        draw(ours, 2)
        for flat in ours.flats:
            before = bits(flat)
            flat.own_gradient[5] = float(spoilt)
            adamw.update(flat, adamw.factors(torch.tensor(float(norm), device=DEVICE)))
            assert not differ(before, bits(flat)), (norm, spoilt)
    draw(ours, 3)
    for flat in ours.flats:
        before = bits(flat)
        adamw.update(flat, adamw.factors(torch.tensor(FINITE, device=DEVICE)))
        assert differ(before, bits(flat))


# ---- parts, indices, memory, training ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bf16", INT8_MOMENTS, "fp16, moments in 8 bits"])
def test_slices_are_moved_as_the_whole(name: str) -> None:
    ours = state(EVERY[name])
    _, kernel = optimizer_kinds(ours)
    draw(ours, 1)
    norm = torch.tensor(FINITE, device=DEVICE)
    for flat in ours.flats:
        whole, n = deepcopy(flat), len(flat.master)
        kernel.update(whole, kernel.factors(norm))
        for begin in range(0, n, 3 * MOMENT_BLOCK):
            at = slice(begin, min(begin + 3 * MOMENT_BLOCK, n))
            blocks = slice(at.start // MOMENT_BLOCK, at.stop // MOMENT_BLOCK)
            here = {kind: x[blocks if kind.endswith("/scales") else at] for kind, x in flat.optimizer_state.items()}
            kernel.update(flat.part(at, here), kernel.factors(norm))
        assert not differ(bits(whole), bits(flat))


@pytest.mark.parametrize("signed", [True, False])
def test_indices_are_those_of_bucketize_at_and_beside_every_border(signed: bool) -> None:
    """Averages that forget all: each is the gradient, or its square."""
    midpoints = moments.codebook(DEVICE, signed=signed).midpoints
    near = torch.cat(
        [midpoints, torch.nextafter(midpoints, midpoints - 9), torch.nextafter(midpoints, midpoints + 9)]
    ).clamp(-1, 1)
    values = torch.cat([near, near.new_ones(4 * MOMENT_BLOCK - len(near))])
    values.view(-1, MOMENT_BLOCK)[:, 0] = 1
    flat, kind = _alone(len(values)), "mean" if signed else "square"
    flat.gradient.copy_(values if signed else values.sqrt())
    spec = replace(SPEC, betas=(0.0, 0.0), clip_norm=0.0)
    adamw = AdamW(spec, DEVICE, kernel=Update(spec))
    adamw.update(flat, adamw.factors(torch.ones((), device=DEVICE)))
    indices, scales = torch.zeros_like(flat.moments["mean"]), torch.zeros_like(flat.scales["mean"])
    moments.quantize(indices, scales, flat.gradient.clone() if signed else flat.gradient.square(), signed=signed)
    assert torch.equal(flat.moments[kind], indices) and torch.equal(flat.scales[kind], scales)  # type: ignore[index]
    assert len(indices.unique()) > 250


def _alone(n: int) -> Flat:
    """A shard in fp32 with indices."""
    own, indices = torch.zeros(n, device=DEVICE), torch.zeros(n, dtype=torch.uint8, device=DEVICE)
    bucket = Bucket((), (), n, (0,), False, False, (0,), (0,), moments="int8")
    scales = {kind: torch.zeros(n // MOMENT_BLOCK, device=DEVICE) for kind in ("mean", "square")}
    moments = {"mean": indices, "square": indices.clone()}
    return Flat(bucket, range(n), own, own.clone(), None, None, own, moments, scales, True)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["fp32", INT8_MOMENTS, "fp16"])
def test_a_step_allocates_scalars_alone(name: str) -> None:
    ours = state(EVERY[name])
    _, kernel = optimizer_kinds(ours)
    norm = torch.tensor(FINITE, device=DEVICE)
    for flat in ours.flats:
        kernel.update(flat, kernel.factors(norm))  # tables of places and indices are there from then on
        with Storages() as seen:
            kernel.update(flat, kernel.factors(norm))
        assert 0 < seen.peak <= 256, seen.peak


def test_updates_in_fp64_are_refused() -> None:
    ours = state(EVERY["fp32"])
    with pytest.raises(TypeError, match=r"float32, not in torch\.float64"):
        kernel = optimizer_kinds(ours)[1]
        kernel.update(ours.flats[0], kernel.factors(torch.ones((), dtype=torch.float64, device=DEVICE)))


# ---- a trainer ---------------------------------------------------------------------------------------------------


def by_reference(op_name: str, one: Implementation, device: str) -> TorchKernel:
    """Of a step, its update alone is by Triton: the interpreter would take minutes for the rest."""
    return registry._found(OPS[op_name].implementations[-1].kernels[device])[op_name]


def trained(policy: str, kind: OptimizerName = "adamw", **layout: Any) -> tuple[Small, list[float]]:
    optimizer, lay = replace(SPEC, kind=kind), Layout(micro_batch_size=4, **layout)
    with patch.object(trainer, "check_kernels"), patch.object(registry, "kernel", by_reference):
        run = Small(EVERY[policy], model=replace(MODEL, vocab_size=264), steps=2, layout=lay, optimizer=optimizer)
    return run, run.losses()


@pytest.mark.skipif(DEVICE.type == "cuda", reason="small trainers are on the CPU")
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_layout_has_a_trainer_move_by_the_kernel(kind: OptimizerName) -> None:
    """Muon's: what is no matrix between hidden states, and by kernels of its own what is."""
    (run, losses), (other, theirs) = trained("fp32", kind, elementwise="triton"), trained("fp32", kind)
    assert run.trainer.run.optimizer and isinstance(run.trainer.run.optimizer.kernel, Update)
    assert other.trainer.run.optimizer and other.trainer.run.optimizer.kernel is None
    passes = [getattr(one.trainer.run.optimizer, "passes", None) for one in (run, other)]
    assert [isinstance(x, MatrixUpdate) for x in passes] == [kind == "muon", False]
    assert losses == pytest.approx(theirs, rel=1e-5) and losses[-1] < losses[0]
    assert differ(kept(run.state), kept(other.state))  # in last bits


@pytest.mark.skipif(DEVICE.type == "cuda", reason="small trainers are on the CPU")
def test_what_lies_on_the_host_is_moved_alike() -> None:
    here, _ = trained(INT8_MOMENTS, elementwise="triton")
    with patch.object(step_update, "SLICE", 4 * MOMENT_BLOCK):
        there, _ = trained(INT8_MOMENTS, elementwise="triton", offload_optimizer=True)
    assert there.trainer.run.streamed is not None and len(there.state.staging) == 3
    assert not differ(kept(here.state), kept(there.state))
