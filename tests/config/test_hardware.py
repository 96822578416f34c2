"""Clusters by name, the catalogue they come from, and the file of measured curves."""

from __future__ import annotations

import importlib.util
import json
import sys
import tomllib
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType

import pytest

from penteract.config.catalog.hardware import tables
from penteract.config.files.hardware_schema import PRODUCTS
from penteract.config.hardware import Cluster, cluster, fabric, gpu, reference
from penteract.errors import BadInput

ROOT = Path(__file__).parents[2]
CATALOGUE = ROOT / "src/penteract/config/catalog/hardware"
CEILINGS = ROOT / "benchmarks/results/ceilings_8xh200.json"
SUSTAINED = ROOT / "benchmarks/results/sustained_h200.json"
LAYERS = ROOT / "benchmarks/results/attention_in_layers_h200.json"
UPDATE = ROOT / "benchmarks/results/update_forms_h200.json"
STEPS = ROOT / "benchmarks/results/flash_attention.json"
PROFILE = ROOT / "benchmarks/results/step_profile_2xh200.json"
WALKED = ROOT / "benchmarks/results/walked_kernels_h200.json"
TRIED = ROOT / "benchmarks/results/planned_steps_4xh200.json"
ONE, TWO = (ROOT / f"benchmarks/results/bench_{name}_h200.json" for name in ("one_card", "two_cards"))
CALLS = ROOT / "benchmarks/results/host_calls_h200.json"
DIRECT = ROOT / "benchmarks/results/direct_links_4xh200.json"
FOUR = ROOT / "benchmarks/results/bench_plan_30b_4xh200.json"
BESIDE = ROOT / "benchmarks/results/contention_in_steps_h200.json"
IN_BLOCKS = ROOT / "benchmarks/results/products_in_blocks_h200.json"


@pytest.mark.parametrize(
    ("text", "name", "gpus", "each"),
    [
        ("8xH200", "H200", 8, 8),
        ("1xh200", "H200", 1, 1),
        ("h200", "H200", 1, 1),
        ("16XH200", "H200", 16, 8),
        ("64x8xH100", "H100", 512, 8),
        ("4x2xH100", "H100", 8, 2),
        ("16xA100-40GB", "A100-40GB", 16, 8),
        ("8 x a100", "A100-80GB", 8, 8),
        ("72xGB200", "GB200", 72, 72),
        ("144xGB200", "GB200", 144, 72),
    ],
)
def test_a_cluster_by_name(text: str, name: str, gpus: int, each: int) -> None:
    found = cluster(text)
    assert found.gpu is not None
    assert (found.gpu.name, found.gpus, found.gpus_per_node) == (name, gpus, each)
    assert found.memory_gib == found.gpu.memory_gib
    assert cluster(found.name) == found


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("8xH20", "H200"),
        ("12xH200", "8 or 16"),
        ("2x16xH200", "2x8xH200"),
        ("0xH200", "8xH200"),
        ("8xH200@ef", "efa"),
        ("8xH200@nvlink4", "infiniband-ndr"),
        ("8 of them", "8xH200"),
        ("nowhere.toml", "No such file"),
    ],
)
def test_what_is_no_cluster_names_the_nearest_in_one_line(text: str, says: str) -> None:
    with pytest.raises(BadInput) as caught:
        cluster(text)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_the_fabric_between_nodes_by_suffix_or_argument() -> None:
    found = cluster("64x8xH100@EFA").between
    assert found is not None and found.name == "efa"
    assert cluster("64x8xH100", fabric="efa-p5").between == found
    assert cluster("64x8xH100").between == fabric("ndr")


def test_a_cluster_needs_no_device_to_say_what_fits() -> None:
    bare = Cluster(name="ours", gpus=8, gpus_per_node=8, memory_gib=80)
    assert (bare.gpu, bare.curves, Cluster(memory_gib=80).gpus) == (None, None, 1)


def test_curves_belong_to_what_they_were_measured_on() -> None:
    for text in ("1xH200", "2xH200", "8xH200", "4x8xH200"):
        assert cluster(text).curves == reference()
    for text in ("1xH100", "8xH100", "64x8xH100"):
        found = cluster(text).curves
        assert found is not None and found.gpu.name == "H100" and not found.collectives  # of links: the reference's
    for text in ("8xH100-PCIe", "8xB200"):
        assert cluster(text).curves is None


def test_the_catalogue_is_whole() -> None:
    nodes = tables("nodes")
    assert set(nodes) == set(tables("gpus"))
    for name, row in nodes.items():
        device, inside = gpu(name), fabric(row["inside"])
        assert row["gpus_per_node"] <= inside.domain and fabric(row["between"]).domain == 0
        assert device.source and inside.source and fabric(row["between"]).source
        assert device.fp64 <= device.fp32 or device.fp64 <= device.tf32 < device.bf16
        assert device.fp8 == 0 or device.fp8 == pytest.approx(2 * device.bf16, rel=0.01)
        assert device.tf32 == pytest.approx(device.bf16 / 2, rel=0.01)
        assert bool(device.fp8) == (device.capability >= (8, 9)) or device.capability == (0, 0)


def test_no_measured_rate_exceeds_the_data_sheet() -> None:
    known = reference()
    for dtype, shapes in known.gemm:
        assert max(rate for *_, rate in shapes) * 1e12 < known.gpu.peak("fp8" if dtype.startswith("fp8") else dtype)
    assert {dtype for dtype, _ in known.gemm} == set(PRODUCTS)
    assert max(max(rates) for _, _, _, *rates in known.attention) < known.gpu.bf16
    assert max(dict(known.memory).values()) < known.gpu.hbm
    assert all(size / us / 1e3 < known.gpu.hbm for size, us in known.moved)
    for kind, ranks, points in known.collectives:
        passes = 2 if kind == "all_reduce" else 1
        assert all(passes * size * (ranks - 1) / ranks / us / 1e3 < known.inside.gb_per_second for size, us in points)


def test_a_measured_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    text = (CATALOGUE / "8xh200.toml").read_text()
    path.write_text(text.replace("\ngpus = 8\n", '\ngpus = 16\nname = "ours"\nbetween = "efa"\n'))
    found = cluster(str(path))
    assert (found.name, found.gpus, found.gpu) == ("ours", 16, gpu("H200"))
    assert found.curves == replace(reference()) and found.between == fabric("efa")
    path.write_text(text.replace("[p2p]", "[p2x]"))
    with pytest.raises(BadInput, match="p2p"):
        cluster(str(path))
    path.write_text("gpus = ")
    with pytest.raises(BadInput, match="not a file of measured curves"):
        cluster(str(path))


def test_the_committed_curves_are_what_the_script_makes_of_the_measurements() -> None:
    read = (
        json.loads(path.read_text())
        for path in (
            CEILINGS,
            SUSTAINED,
            LAYERS,
            UPDATE,
            STEPS,
            PROFILE,
            WALKED,
            TRIED,
            ONE,
            TWO,
            CALLS,
            DIRECT,
            FOUR,
            BESIDE,
            IN_BLOCKS,
        )
    )
    made = _script().toml(*read, "2026-11-20")
    assert made == (CATALOGUE / "8xh200.toml").read_text()


def test_an_h100_has_what_calibrate_wrote() -> None:
    calibrated = json.loads((ROOT / "benchmarks/results/calibrated_h100.json").read_text())
    made = (CATALOGUE / "1xh100.toml").read_text()
    assert made == _script("make_1xh100").toml(calibrated, (CATALOGUE / "8xh200.toml").read_text())
    assert tomllib.loads(made)["gemm"]["bf16"] == tomllib.loads(calibrated["file"])["gemm"]["bf16"]
    assert all(abs(step["planned_ms"] / step["median_ms"] - 1) < 0.051 for step in calibrated["steps"].values())


def test_the_curves_say_what_the_measurements_say() -> None:
    """Read straight from the JSON, with no line of the script."""
    data, tree = json.loads(CEILINGS.read_text()), tomllib.loads((CATALOGUE / "8xh200.toml").read_text())
    direct = json.loads(DIRECT.read_text())["rows"]
    for row in direct:
        assert [row["bytes"], row["us"]] in tree["collectives"][f"direct_{row['collective']}"][str(row["ranks"])]
    for kind, by_ranks in tree["collectives"].items():
        for ranks, points in by_ranks.items() if not kind.startswith("direct_") else ():
            assert points[-1] == [2**30, pytest.approx(data[kind][f"g{ranks}_1024MiB"]["ms"] * 1e3, abs=0.01)]
    shapes = {"fwd": [8192, 1024, 4096], "dgrad": [8192, 4096, 1024], "wgrad": [1024, 4096, 8192]}
    for phase, shape in shapes.items():
        rate = data["gemm_bf16"][f"8b_kv_T8192_{phase}"]["tflops"]
        assert [*shape, pytest.approx(rate, abs=0.01)] in tree["burst"]["gemm"]
    forward, backward = json.loads(LAYERS.read_text())["in_layer"]["fa4"][0][6:]  # 32 heads of 128, 8,192 tokens
    flops = 32 * 128 * 8192**2 * 2  # of two products, half of which is masked
    rates = pytest.approx(flops / forward / 1e6, abs=0.01), pytest.approx(2.5 * flops / backward / 1e6, abs=0.01)
    assert tree["attention"]["fa4"][0] == [flops, 128, 8192, *rates]
    assert tree["burst"]["attention"][0] == [2 * 32 * 8192**2 * 128, 128, pytest.approx(619.23), pytest.approx(529.44)]
    assert tree["provenance"]["nvls_multicast"] == "off" and tree["provenance"]["nccl"] == data["nccl"]


def test_an_update_has_the_rate_of_the_form_that_runs() -> None:
    adamw = pytest.importorskip("penteract.engine.kernels.triton.optimizer.adamw")
    assert asdict(adamw.FORM) == _script().FORM


def _script(name: str = "make_8xh200") -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"benchmarks/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
