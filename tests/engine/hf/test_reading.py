"""Any rectangle of ours is that part of the whole, whatever files hold it; and little is in memory for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine.hf import folders
from penteract.config.layout import Layout
from penteract.config.resolve.resolved_run import resolve
from penteract.engine.device.storages import Storages
from penteract.engine.hf import convert
from penteract.engine.hf.folder import open_folder
from penteract.engine.hf.reading import HfWeights
from penteract.engine.hf.weights import open_weights, start_from
from penteract.engine.hf.writing import WriteOptions
from penteract.engine.state.state import allocate
from penteract.step.program import compile_step
from precisions import master_weights

CPU = torch.device("cpu")


@cache
def weights(family: str) -> HfWeights:
    return HfWeights(open_folder(folders.write(Path(mkdtemp()) / family, family, files=3)))


@cache
def whole(family: str, name: str) -> torch.Tensor:
    shape = weights(family).folder.ours[name].shape
    return weights(family).rectangle(name, ((0,) * len(shape), shape), torch.float32)


@settings(max_examples=150)
@given(data=st.data())
def test_a_rectangle_is_that_part_of_the_whole(data: st.DataObject) -> None:
    family = data.draw(st.sampled_from(sorted(folders.MODELS)))
    tensor = data.draw(st.sampled_from(list(weights(family).folder.ours.values())))
    start, size = [], []
    for n in tensor.shape:
        start.append(data.draw(st.integers(0, n - 1)))
        size.append(data.draw(st.integers(1, n - start[-1])))
    wanted = whole(family, tensor.name)
    for dim, (at, n) in enumerate(zip(start, size, strict=True)):
        wanted = wanted.narrow(dim, at, n)
    assert torch.equal(weights(family).rectangle(tensor.name, (tuple(start), tuple(size)), torch.float32), wanted)


def test_views_as_the_families_have_them() -> None:
    """Stacked, turned, cut from one of three, and with rotated pairs apart: each written out once by hand."""
    theirs = folders.tensors_of("mixtral")
    gates = [theirs[f"model.layers.1.block_sparse_moe.experts.{x}.w1.weight"] for x in range(4)]
    assert torch.equal(whole("mixtral", "layers.1.moe.experts.gate"), torch.stack(gates))
    fused = folders.tensors_of("gpt2")["transformer.h.0.attn.c_attn.weight"]
    assert torch.equal(whole("gpt2", "layers.0.attention.k.weight"), fused[:, 32:64].T)
    latent = folders.tensors_of("deepseek_v3")
    heads = latent["model.layers.0.self_attn.q_b_proj.weight"].view(4, 14, 12)
    apart = torch.cat([heads[:, :6], heads[:, 6::2], heads[:, 7::2]], 1).reshape(56, 12)
    assert torch.equal(whole("deepseek_v3", "layers.0.attention.q_up.weight"), apart)


def test_files_without_the_networks_prefix(tmp_path: Path) -> None:
    for family, prefix in (("gpt2", "transformer."), ("llama", "model.")):
        theirs = folders.tensors_of(family)
        bare = {n.removeprefix(prefix): t for n, t in theirs.items()}
        extra = {"h.0.attn.bias": torch.ones(1, 1, 4, 4)} if family == "gpt2" else {}
        at = folders.write(tmp_path / family, family, bare | extra)
        found = HfWeights(open_folder(at)).rectangle("layers.0.norm1.weight", ((0,), (32,)), torch.float32)
        assert torch.equal(found, whole(family, "layers.0.norm1.weight"))


def test_half_precision_is_cast_to_the_masters(tmp_path: Path) -> None:
    theirs = {n: t.bfloat16() for n, t in folders.tensors_of("llama").items()}
    at = folders.write(tmp_path / "half", "llama", theirs)
    p = compile_step(folders.MODELS["llama"], Layout(), 8, precision="bf16")
    state = allocate(p, CPU)
    start_from(open_weights(at, p), p, state)
    assert torch.equal(master_weights(state)["norm.weight"], theirs["model.norm.weight"].float())


LAYOUTS = [Layout(tp=2), Layout(tp=2, pp=2), Layout(dp=2, ep=2), Layout(dp=2, ep=2, tp=2, expert_tp=2, zero=1)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_every_rank_of_a_layout_gets_its_part(family: str, layout: Layout) -> None:
    for rank in range(layout.world):
        p = compile_step(folders.MODELS[family], layout, 8, rank=rank)
        state = allocate(p, CPU)
        start_from(weights(family), p, state)
        for q in p.params:
            wanted = whole(family, q.name)
            for dim, (at, n) in enumerate(zip(q.offset(p.mesh, rank), q.local_shape(p.mesh), strict=True)):
                wanted = wanted.narrow(dim, at, n)
            assert torch.equal(state.parameters[q.name], wanted)
        for name, bias in state.biases.items():
            assert torch.equal(bias, whole(family, f"{name}/bias"))


@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek_v3"])
def test_memory_stays_below_two_shards(family: str, tmp_path: Path) -> None:
    """Bytes of all tensors alive at once, while weights come in, go out, and start a run."""
    at = folders.write(tmp_path / "hf", family, files=4)
    largest = max(f.stat().st_size for f in at.glob("*.safetensors"))
    resolved = resolve(None, "", [f"model.config={at}"])
    p = compile_step(folders.MODELS[family], Layout(tp=2), 8)
    state = allocate(p, CPU)
    options = WriteOptions(dtype="fp32", shard_bytes=largest)

    def peak(act: Callable[[], Any]) -> int:
        with Storages() as seen:
            act()
        return seen.peak

    assert peak(lambda: start_from(open_weights(at, p), p, state)) < 2 * largest
    assert 0 < peak(lambda: convert.from_hf(at, tmp_path / "ours", resolved, options)) < 2 * largest
    assert 0 < peak(lambda: convert.to_hf(tmp_path / "ours", tmp_path / "back", options)) < 2 * largest


def test_a_tensor_of_a_type_that_is_no_weight(tmp_path: Path) -> None:
    theirs = folders.tensors_of("llama")
    at = folders.write(tmp_path / "a", "llama", theirs)
    save_file(theirs | {"model.norm.weight": torch.ones(32, dtype=torch.int8)}, at / "model.safetensors")
    with pytest.raises(Exception, match=r"WEIGHTS.*another type.*model.norm.weight I8 / allowed F64, F32, F16, BF16"):
        open_folder(at)


def test_layers_that_predict_further_may_be_left(tmp_path: Path) -> None:
    """Files hold tables again for such a layer; a run without it reads none of that, and files may lack it."""
    model, theirs = folders.MODELS["deepseek_v3"], folders.tensors_of("deepseek_v3")
    assert "model.layers.2.eh_proj.weight" in theirs
    copies = {"model.layers.2.embed_tokens.weight": theirs["model.embed_tokens.weight"].clone(),
              "model.layers.2.shared_head.head.weight": theirs["lm_head.weight"].clone()}  # fmt: skip
    full = folders.write(tmp_path / "full", "deepseek_v3", theirs | copies)
    assert open_folder(full).model.mtp_layers == 1
    shorter = open_folder(full, replace(model, mtp_layers=0))
    assert not any("layers.2" in name for name in (*shorter.ours, *shorter.held))
    bare = {n: t for n, t in theirs.items() if "layers.2" not in n}
    assert open_folder(folders.write(tmp_path / "bare", "deepseek_v3", bare)).model.mtp_layers == 0
    options = WriteOptions(dtype="fp32")
    resolved = resolve(None, "", [f"model.config={full}"])
    convert.from_hf(full, tmp_path / "ours", resolved, options)
    convert.to_hf(tmp_path / "ours", tmp_path / "back", options)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == (theirs | copies).keys()
    assert all(torch.equal(back[n], t) for n, t in (theirs | copies).items())
