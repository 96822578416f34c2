"""What a fused kernel cannot do is refused in one line that names what to choose instead."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from penteract.config.layout import Layout
from penteract.config.model import ModelSpec, MoESpec
from penteract.config.precision.policy import RECIPES
from penteract.config.resolve.presets import TINY_LATENT
from penteract.config.rules.kernel_limits import (
    FA4,
    fastest_attention,
    glu_breaches,
    installed_packages,
    installed_version,
)
from penteract.config.run import Precision, RunSpec
from penteract.engine.kernels import checks, registry
from penteract.engine.kernels.checks import check_documents, check_kernels
from penteract.engine.kernels.fused_attention import fa4
from penteract.engine.rank.rank import Rank
from penteract.engine.session.trainer import Trainer
from penteract.errors import BadInput, CorruptData
from penteract.step.program import compile_step
from samples import Sample

CUDA = torch.device("cuda")
MODEL = ModelSpec(layers=1, hidden_size=64, heads=4, kv_heads=2, head_size=16, ffn_size=32, vocab_size=32)
EXPERTS = MoESpec(experts=4, top_k=2, ffn_size=32)


def _refused(layout: Layout, model: ModelSpec = MODEL, precision: str = "bf16", **more: Any) -> str:
    """The line that a program is refused with; nothing where it is not."""
    p = compile_step(model, layout, 16, precision=precision)  # type: ignore[arg-type]
    try:
        check_kernels(p, more.get("device", CUDA), packed=more.get("packed", False))
    except BadInput as e:
        return str(e)
    return ""


def _kernel(name: str, **more: Any) -> Layout:
    return Layout(attention=name, **more)  # type: ignore[arg-type]


TRITON = Layout(elementwise="triton")


@pytest.mark.parametrize("kernel", ["reference", "flash", "cudnn"])
def test_what_kernels_can_do_is_not_refused(kernel: str):
    assert _refused(_kernel(kernel)) == ""
    assert _refused(_kernel(kernel, cp=2, cp_method="ulysses")) == ""


@pytest.mark.parametrize(
    ("model", "tp", "named"),
    [
        (replace(MODEL, hidden_size=68), 1, ["hidden_size, 68"]),
        (MODEL, 8, ["the ffn_size on a rank, 4"]),
        (replace(MODEL, moe=replace(EXPERTS, shared_ffn_size=40)), 2, ["the shared_ffn_size on a rank, 20"]),
        (replace(MODEL, moe=EXPERTS), 2, []),
    ],
)  # fmt: skip
def test_rows_that_the_products_of_a_glu_cannot_read_are_named(model: ModelSpec, tp: int, named: list[str]):
    found = [why for _, why in glu_breaches(model, Layout(tp=tp, fuse=("mlp", "glu"), elementwise="triton"))]
    assert [why.partition(", and ")[2].replace(" is ", ", ") for why in found] == named


def test_a_package_is_imported_before_a_run_calls_it(monkeypatch: pytest.MonkeyPatch):
    """What an import within a call leaves would keep that call's tensors."""
    imported = list[str]()
    monkeypatch.setattr(fa4, "library", lambda: imported.append("fa4"))
    registry.load_package.cache_clear()
    try:
        registry.import_packages(compile_step(MODEL, _kernel("cudnn"), 16, precision="bf16"), CUDA)
        assert imported == []
        program = compile_step(MODEL, _kernel("fa4"), 16, precision="bf16")
        registry.kernels(program, CUDA)  # which a rehearsal asks for as well, where there is no package
        assert imported == []
        registry.import_packages(program, CUDA)
        assert imported == ["fa4"]
    finally:
        registry.load_package.cache_clear()


def test_the_reference_runs_anywhere():
    ring = Layout(cp=2, cp_method="ring")
    assert _refused(ring, replace(MODEL, head_size=6), "fp64", device=torch.device("cpu"), packed=True) == ""


@pytest.mark.parametrize(
    ("layout", "about", "op_names"),
    [
        (_kernel("flash"), {"device": torch.device("cpu")}, ("found cpu", "allowed cuda", "reference")),
        (_kernel("flash"), {"precision": "fp32"}, ("found fp32", "--precision.dtype bf16")),
        (_kernel("flash", cp=2, cp_method="ring"), {},
         ("parallel.cp_method", "found ring", "allowed all_gather, ulysses", "reference")),
        (_kernel("cudnn", cp=2), {}, ("found all_gather", "fix: --parallel.cp_method ulysses", "reference")),
        (_kernel("cudnn"), {"packed": True}, ("--data.pack_documents false", "flash")),
        (_kernel("cudnn"), {"model": replace(MODEL, sliding_window=4)},
         ("no window", "is 4", "found cudnn", "fix: --kernels.attention flash")),
        (_kernel("cudnn"), {"model": replace(MODEL, head_size=136)},
         ("multiples of 8 to 128, not 136", "--kernels.attention flash")),
        (_kernel("flash"), {"model": replace(MODEL, head_size=12)},
         ("multiples of 8 to 256, not 12", "allowed reference")),
        (_kernel("flash"), {"model": TINY_LATENT}, ("not 16 for 24", "--kernels.attention reference")),
        (TRITON, {"device": torch.device("cpu")}, ("kernels.elementwise", "found cpu", "allowed cuda", "reference")),
        (TRITON, {"precision": "fp64"}, ("found updates in fp64", "fix: --kernels.elementwise reference")),
    ],
)  # fmt: skip
def test_what_they_cannot_do_is_refused(layout: Layout, about: dict[str, Any], op_names: tuple[str, ...]):
    line = _refused(layout, **about)
    assert "\n" not in line
    assert line.startswith("error[KERNEL]: ")
    assert [w for w in op_names if w not in line] == []


OF_PACKAGES = ("fa4", "fa4_documents")


def _installed(
    monkeypatch: pytest.MonkeyPatch, version: str = "4.0.0b36", capability: tuple[int, int] = (9, 0)
) -> None:
    monkeypatch.setattr(registry, "installed_version", lambda name: version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


@pytest.mark.parametrize("kernel", OF_PACKAGES)
def test_a_kernel_of_a_package_wants_this_version_and_gpu(monkeypatch: pytest.MonkeyPatch, kernel: str):
    _installed(monkeypatch)
    assert _refused(_kernel(kernel)) == ""
    assert _refused(_kernel(kernel, cp=2, cp_method="ulysses")) == ""
    assert _refused(_kernel(kernel), replace(MODEL, sliding_window=4)) == ""
    assert ("--kernels.attention fa4_documents" in _refused(_kernel(kernel), packed=True)) == (kernel == "fa4")
    _installed(monkeypatch, version="4.0.0")
    line = _refused(_kernel(kernel))
    assert (
        "found flash-attn-4 4.0.0 / allowed flash-attn-4 4.0.0b36 · fix: pip install 'flash-attn-4==4.0.0b36'" in line
    )
    _installed(monkeypatch, capability=(10, 0))
    assert "found compute capability 10.0 / allowed 9.0 · fix: --kernels.attention cudnn" in _refused(_kernel(kernel))
    _installed(monkeypatch, version="")
    assert "found a python without flash-attn-4" in _refused(_kernel(kernel))


def test_plans_have_no_kernel_of_a_package_unasked():
    asked = (MODEL, Layout(), RECIPES["bf16"])
    assert fastest_attention(*asked) == "cudnn"
    assert fastest_attention(*asked, packages=["flash-attn-4"]) == "fa4"
    assert fastest_attention(MODEL, Layout(cp=2), RECIPES["bf16"], ["flash-attn-4"]) == "fa4_documents"
    assert fastest_attention(*asked, packages=["flash-attn-4"], documents=True) == "fa4_documents"
    assert fastest_attention(*asked, packages=["flash-attn-4"], capability=(8, 0)) == "cudnn"
    assert fastest_attention(*asked, documents=True) == "flash"


def test_bitwise_refuses_what_was_not_seen_to_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU; a CPU adds in order."""
    in_order = Layout(determinism="bitwise")
    monkeypatch.setattr(checks, "find_spec", lambda name: True)
    _installed(monkeypatch)
    triton = in_order.put(elementwise="triton")
    assert _refused(in_order, device=torch.device("cpu")) == ""
    assert _refused(triton) == _refused(triton.put(attention="fa4")) == ""
    assert "found reference / allowed triton · fix: --kernels.elementwise triton, or" in _refused(in_order)
    line = _refused(triton.put(attention="cudnn"))
    assert "adds gradients in any order" in line and "allowed fa4, fa4_documents, reference" in line
    grouped = _refused(triton.put(experts="grouped"), replace(MODEL, moe=EXPERTS))
    assert (
        "found grouped / allowed reference, quack · fix: --kernels.experts reference, or --kernels.determinism off"
        in grouped
    )
    _installed(monkeypatch, version="")
    assert "or --kernels.attention reference" in _refused(triton.put(attention="fa4"))
    _installed(monkeypatch, capability=(10, 0))
    line = _refused(triton)
    assert (
        "found bitwise on compute capability 10.0 / allowed off, bitwise on 9.0 · fix: --kernels.determinism off"
        in line
    )


def test_bitwise_has_kernels_that_repeat() -> None:
    """Those of torch add gradients in any order."""
    asked = (MODEL, Layout(determinism="bitwise"), RECIPES["bf16"])
    assert fastest_attention(*asked) == "reference"
    assert fastest_attention(*asked, packages=["flash-attn-4"]) == "fa4"
    assert fastest_attention(*asked, packages=["flash-attn-4"], documents=True) == "fa4_documents"
    assert installed_version("no-such-package") == ""
    assert installed_packages(FA4) <= {"flash-attn-4"}


def test_kernels_in_triton_want_triton(monkeypatch: pytest.MonkeyPatch):
    assert _refused(TRITON) == ""
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    assert "found a python without triton" in _refused(TRITON)


def test_a_trainer_refuses_before_it_allocates():
    spec = RunSpec(model=MODEL, layout=_kernel("flash"), sequence_length=16, precision=Precision(dtype="bf16"))
    with pytest.raises(BadInput, match="found cpu"):
        Trainer.build(spec, Rank(0, 1, torch.device("cpu"), None))


def _sample(length: int, documents: int) -> Sample:
    """The first tokens are documents of their own."""
    whole = torch.arange(length)
    return Sample(whole, whole, whole.clamp(max=documents - 1), whole)


@pytest.mark.parametrize(
    ("layout", "most"), [(Layout(), 32), (Layout(cp=2), 16), (Layout(cp=2, cp_method="ulysses"), 32)]
)
def test_more_documents_than_the_kernel_is_started_for_are_refused(layout: Layout, most: int):
    p = compile_step(MODEL, replace(layout, attention="flash"), 2048, precision="bf16")
    check_documents(p, [_sample(2048, most)])
    with pytest.raises(CorruptData, match=rf"found {most + 1} / allowed <= {most}"):
        check_documents(p, [_sample(2048, 3), _sample(2048, most + 1)])
    check_documents(replace(p, mesh=replace(p.mesh, layout=layout)), [_sample(2048, 2048)])
