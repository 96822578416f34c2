"""Rates: they meet what was measured, never fall with size, and follow the hardware."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penteract.config.files.hardware_schema import BLOCK_SUMS, BLOCKS
from penteract.config.hardware import DTYPES, Cluster, cluster, fabric, gpu, reference
from penteract.errors import BadInput
from penteract.ops.declarations.declaration import FusedKernel, Product, ScaledBy
from penteract.readings.costs.attention_time import fused_rates
from penteract.readings.costs.curve import Curve
from penteract.readings.costs.gemm import fit, terms
from penteract.readings.costs.rates import GroupSpan, Rates

NODE = cluster("8xH200")
RATES = Rates.of(NODE, "bf16")
EFA = Rates.of(cluster("64x8xH100@efa"), "bf16")
KNOWN = reference()
DEVICES = {
    dtype: [(gpu(name), Rates.of(cluster(name), dtype)) for name in ("H200", "B200", "H100-PCIe")] for dtype in DTYPES
}
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "all_to_all_v")
ONE_NODE, TWO_NODES = GroupSpan(2, 1), GroupSpan(2, 2)  # of a message
SPANS = (
    GroupSpan(2, 1),
    GroupSpan(3, 1),
    GroupSpan(8, 1),
    GroupSpan(2, 2),
    GroupSpan(16, 2),
    GroupSpan(16, 16),
    GroupSpan(512, 64),
)
sizes = st.integers(1, 2**34)
dims = st.integers(1, 2**17)

# TFLOP/s of products inside whole bf16 steps of an 8B model on such GPUs at 8192 tokens: forward, input gradient,
# weight gradient. Measured in other runs than the curves, so they test the law.
IN_A_STEP = {
    (4096, 6144): (668, 674, 675),
    (4096, 4096): (650, 661, 673),
    (4096, 28672): (693, 700, 682),
    (14336, 4096): (700, 680, 690),
    (4096, 128256): (694, 705, 687),
}


# ---- what was measured ---------------------------------------------------------------------------------------------


def test_collectives_pass_through_their_points() -> None:
    """But for points that a larger size undercuts: they were disturbed, and get its time."""
    for kind, ranks, points in KNOWN.collectives:
        for i, (size, _) in enumerate(points):
            least = min(us for _, us in points[i:])
            assert RATES.collective(kind, GroupSpan(ranks, 1), int(size)) == pytest.approx(least * 1e-6, rel=1e-9)


def test_sends_and_pointwise_words_pass_through_their_points() -> None:
    assert RATES.collective("send", ONE_NODE, 2**28) == pytest.approx(dict(KNOWN.p2p[0])[2**28] * 1e-6)
    for size, us in KNOWN.moved:
        assert RATES.moved(int(size)) == pytest.approx(us * 1e-6)


@pytest.mark.parametrize("kernel", ["cudnn", "fa4"])
def test_attention_passes_near_its_points(kernel: FusedKernel) -> None:
    """Of the same FLOPs too, in long sequences and in short ones: by FLOPs alone they were up to 37 % off. It meets a
    shape exactly whose FLOPs and head size no other has."""
    shapes = KNOWN.attention if kernel == "cudnn" else KNOWN.fa4
    shared = Counter(shape[:2] for shape in shapes)
    assert {1, 3} <= set(shared.values())
    for flops, head, length, *rates in shapes:
        for backward, rate in enumerate(rates):
            done, elements = (1.0, 2.5)[backward] * flops, flops // (2 * length)
            took = RATES.attention(
                int(2 * done), elements, backward=bool(backward), causal=True, head_size=head, kernel=kernel
            )
            most = 1e-6 if shared[flops, head] == 1 else 0.026
            assert done / took == pytest.approx(rate * 1e12, rel=most)


def test_shapes_of_other_flops_tell_nothing_of_elements() -> None:
    """Their rates alone are known, and no time is negative, whatever a file of measurements holds."""
    ((_, apart),) = fused_rates([(10**12, 128, 8192, 500.0, 400.0), (10**11, 128, 4096, 400.0, 300.0)], 1.0)
    assert apart.forward.element == 0
    short, long = (10**12, 128, 10, 1e-3, 1e-3), (10**12, 128, 10**9, 1e6, 1e6)
    ((_, odd),) = fused_rates([short, long], 1.0)
    assert odd.forward.element > 0 and odd.forward.products(10**12) > 0
    ((_, other),) = fused_rates([(*short[:3], 900.0, 900.0), (*long[:3], 400.0, 400.0)], 1.0)
    assert other.forward.element == 0


def test_no_attention_takes_less_than_nothing() -> None:
    """Below the smallest shape a curve goes on along its first segment, which may be steep."""
    rows = [(10**10, 128, 1024, 100.0, 100.0), (10**10, 128, 8192, 500.0, 500.0), (10**11, 128, 8192, 400.0, 416.67)]
    ((_, steep),) = fused_rates(rows, 1.0)
    for way in steep:
        for flops in (1.0, 1e6, 1e9, 1e10, 1e12):
            assert 0 <= way.at_best()(flops, 10**4) <= way(flops, 10**4)


def test_attention_without_a_mask_takes_twice_as_long() -> None:
    full, half = (RATES.attention(10**13, 0, backward=False, causal=c) for c in (False, True))
    assert 1.9 < full / half < 2.0


@pytest.mark.parametrize(
    ("dtype", "typical", "worst"),
    # In blocks, sums over few features are much slower than the formula has them.
    [("bf16", 0.05, 0.35), ("fp8", 0.05, 0.35), ("tf32", 0.08, 0.35), (BLOCKS, 0.12, 0.5), (BLOCK_SUMS, 0.06, 0.35)],
)
def test_products_left_out_of_the_fit_are_predicted(dtype: str, typical: float, worst: float) -> None:
    shapes = dict(KNOWN.gemm)[dtype]
    errors = [_error(fit(shapes[:i] + shapes[i + 1 :]), shape) for i, shape in enumerate(shapes)]
    print(
        f"\n{dtype}: mean {mean(errors):.1%}, largest {max(errors):.1%} of {len(errors)} products left out one by one"
    )
    assert mean(errors) < typical and max(errors) < worst


def test_products_of_fp8_values_by_what_has_a_scale() -> None:
    """More scales are slower. A file that lacks some has those of the reference, scaled by the peaks of devices."""
    one = Product(1, 16384, 14336, 4096)
    by: tuple[ScaledBy, ...] = ("tensors", "blocks", "blocks of tokens")
    here, old = Rates.of(NODE, "bf16", fp8=True), Rates.of(cluster("1xH100"), "bf16", fp8=True)
    assert here.scaled(one) < here.scaled(one, "blocks") < here.scaled(one, "blocks of tokens") < here.product(one)
    assert [old.scaled(one, kind) > old.scaled(one, "tensors") for kind in by] == [False, True, True]
    assert not Rates.of(NODE, "bf16").scaled_by


def test_products_inside_whole_steps_are_predicted() -> None:
    errors: list[float] = []
    for (width, out), measured in IN_A_STEP.items():
        for sizes_, rate in zip(((8192, out, width), (8192, width, out), (out, width, 8192)), measured, strict=True):
            p = Product(1, *sizes_)
            errors.append(abs(RATES.product(p) * rate * 1e12 / (2 * p.m * p.n * p.k) - 1))
    print(f"\nin a step: mean {mean(errors):.1%}, largest {max(errors):.1%}")
    assert mean(errors) < 0.02 and max(errors) < 0.04


def test_buses_between_nodes_are_met() -> None:
    """Published for whole nodes; one node is not of this fabric, and on two the ports themselves bound it."""
    for kind, points in fabric("efa").bus:
        for nodes, rate in points[1:]:
            span, passes = GroupSpan(int(8 * nodes), int(nodes)), 2 if kind == "all_reduce" else 1
            volume = passes * 256e6 * (span.ranks - 1) / span.ranks
            assert volume / EFA.collective(kind, span, 256_000_000) == pytest.approx(rate * 1e9, rel=0.07)


def _error(law: list[float], shape: tuple[int, int, int, int, float]) -> float:
    took = sum(seconds * amount for seconds, amount in zip(law, terms(shape), strict=True))
    return abs(took * shape[4] * 1e12 / terms(shape)[0] - 1)


# ---- how rates behave ----------------------------------------------------------------------------------------------


@given(st.tuples(st.integers(1, 64), dims, dims, dims), st.integers(0, 3), st.integers(1, 100))
def test_a_larger_product_never_takes_less(size: tuple[int, int, int, int], which: int, more: int) -> None:
    larger = [s + more * (i == which) for i, s in enumerate(size)]
    assert RATES.product(Product(*larger)) >= RATES.product(Product(*size))


@given(st.tuples(dims, dims, dims), st.sampled_from(DTYPES))
def test_no_product_beats_the_data_sheet(size: tuple[int, int, int], dtype: str) -> None:
    m, n, k = size
    for device, rates in DEVICES[dtype]:
        seconds = rates.product(Product(1, m, n, k))
        assert 2 * m * n * k / seconds < device.peak(dtype)
        assert (m * k + k * n + m * n) / seconds < device.hbm * 1e9


@given(sizes, sizes, st.sampled_from(KINDS), st.sampled_from(SPANS))
def test_more_bytes_never_take_less(one: int, other: int, kind: str, span: GroupSpan) -> None:
    small, large = sorted((one, other))
    assert RATES.moved(small) <= RATES.moved(large)
    assert RATES.update(small) <= RATES.update(large)
    for rates in (RATES, EFA):
        assert 0 < rates.collective(kind, span, small) <= rates.collective(kind, span, large)
        for apart in (ONE_NODE, TWO_NODES):
            assert rates.collective("send", apart, small) <= rates.collective("send", apart, large)


@given(st.integers(1, 10**16), st.integers(1, 10**16), st.booleans(), st.sampled_from([32, 64, 128, 256]))
def test_more_attention_never_takes_less(one: int, other: int, backward: bool, head: int) -> None:
    small, large = sorted((one, other))
    ways = [(small, small), (large, small), (large, large)]
    took = [RATES.attention(f, n, backward=backward, causal=True, head_size=head) for f, n in ways]
    assert 0 < took[0] <= took[1] <= took[2]


def test_slices_of_a_product_reach_fewer_flops() -> None:
    """What tensor parallelism does to a layer: eight slices take longer than the whole."""
    whole = RATES.product(Product(1, 8192, 4096, 4096))
    assert 8 * RATES.product(Product(1, 8192, 512, 4096)) > 1.05 * whole
    assert 8 * RATES.product(Product(1, 8192, 4096, 512)) > 1.3 * whole


def test_small_heads_take_longer_for_the_same_flops() -> None:
    small, large = (RATES.attention(10**12, 10**7, backward=False, causal=True, head_size=h) for h in (64, 128))
    assert small > 1.1 * large


# ---- groups --------------------------------------------------------------------------------------------------------


def test_a_span_counts_ranks_and_nodes() -> None:
    assert GroupSpan.of((0, 1, 2, 3), 8) == GroupSpan(4, 1)
    assert GroupSpan.of((0, 8, 16), 8) == GroupSpan(3, 3)
    assert GroupSpan.of((6, 7, 8, 9), 8) == GroupSpan(4, 2)


def test_a_group_of_one_puts_nothing_on_a_wire() -> None:
    assert all(RATES.collective(kind, GroupSpan(1, 1), 2**30) == 0 for kind in KINDS)


def test_groups_that_were_not_measured_lie_between() -> None:
    for kind in KINDS[:3]:
        four, six, eight = (RATES.collective(kind, GroupSpan(n, 1), 2**28) for n in (4, 6, 8))
        assert four < six < eight


def test_beyond_a_node_the_ports_bound_it() -> None:
    """One rank a node has one port of 50 GB/s; a whole node has eight, and its own links are faster."""
    rates = Rates.of(cluster("16x8xH200"), "bf16")
    lone, whole = (
        rates.collective("all_gather", GroupSpan(16, 16), 2**30),
        rates.collective("all_gather", GroupSpan(128, 16), 2**30),
    )
    assert 2**30 * 15 / 16 / lone < 50e9
    assert 5 < lone / whole < 9
    assert rates.collective("send", TWO_NODES, 2**28) > rates.collective("send", ONE_NODE, 2**28)


def test_a_domain_of_72_is_inside_one_node() -> None:
    rates = Rates.of(cluster("72xGB200"), "bf16")
    assert rates.collective("all_gather", GroupSpan(72, 1), 2**30) < Rates.of(cluster("72xH200"), "bf16").collective(
        "all_gather", GroupSpan(72, 9), 2**30
    )


# ---- other hardware ------------------------------------------------------------------------------------------------


def test_half_the_bandwidth_is_slower() -> None:
    assert NODE.gpu is not None and NODE.inside is not None and NODE.between is not None
    slow = replace(
        NODE,
        curves=None,
        gpu=replace(NODE.gpu, hbm=NODE.gpu.hbm / 2),
        inside=replace(NODE.inside, gb_per_second=NODE.inside.gb_per_second / 2),
        between=replace(NODE.between, gb_per_second=NODE.between.gb_per_second / 2),
    )
    half = Rates.of(slow, "bf16")
    assert half.moved(2**30) == pytest.approx(2 * RATES.moved(2**30), rel=0.02)
    assert half.update(2**30) == pytest.approx(2 * RATES.update(2**30), rel=0.02)
    assert (
        1.8
        < half.collective("all_reduce", GroupSpan(8, 1), 2**28) / RATES.collective("all_reduce", GroupSpan(8, 1), 2**28)
        < 2
    )
    assert 1.8 < half.collective("send", TWO_NODES, 2**28) / RATES.collective("send", TWO_NODES, 2**28) < 2
    assert half.product(Product(1, 1, 8192, 8192)) > 1.5 * RATES.product(Product(1, 1, 8192, 8192))
    assert half.product(Product(1, 8192, 8192, 8192)) == RATES.product(Product(1, 8192, 8192, 8192))


def test_half_the_flops_are_slower() -> None:
    slow = replace(NODE, curves=None, gpu=replace(gpu("H200"), bf16=gpu("H200").bf16 / 2))
    p, half = Product(1, 8192, 8192, 8192), Rates.of(slow, "bf16")
    assert half.product(p) == pytest.approx(2 * RATES.product(p), rel=0.01)
    slower, full = (r.attention(10**13, 10**8, backward=True, causal=True) for r in (half, RATES))
    assert slower == pytest.approx(2 * full, rel=0.02)


def test_the_basis_tells_measured_from_modelled() -> None:
    asked = {"product", "attention", "moved", "collective", "send", "update", "launch", "contention", "copy"}
    assert set(RATES.basis) == asked
    assert all(text.startswith("measured: ") for text in RATES.basis.values())
    other = Rates.of(cluster("8xA100"), "bf16").basis
    assert all(text.startswith("modelled: ") for key, text in other.items() if key != "launch")
    assert "modelled: InfiniBand" in Rates.of(cluster("16xH200"), "bf16").basis["collective"]
    assert Rates.of(NODE, "fp32").basis["attention"].startswith("modelled: ")


def test_what_cannot_be_rated_says_so() -> None:
    with pytest.raises(BadInput, match="needs a device"):
        Rates.of(Cluster(memory_gib=80), "bf16")
    with pytest.raises(BadInput, match="no such products"):
        Rates.of(cluster("8xA100"), "fp8")


def test_a_step_slows_beside_a_collective_and_by_launches() -> None:
    assert 1.2 < RATES.contention < 1.5  # in steps; beside products alone it is 1.14
    assert 1e-6 < RATES.launch < 1e-4


@pytest.mark.alone
def test_a_question_takes_microseconds() -> None:
    p, span = Product(1, 8192, 4096, 4096), GroupSpan(64, 8)
    best = 1.0
    for _ in range(5):
        start = time.process_time()
        for _ in range(1000):
            RATES.product(p)
            RATES.collective("all_reduce", span, 10**8)
            RATES.attention(10**12, 10**7, backward=True, causal=True)
            RATES.moved(10**8)
        best = min(best, time.process_time() - start)
    assert best / 4000 < 20e-6


# ---- curves --------------------------------------------------------------------------------------------------------


def test_a_curve_smooths_what_was_disturbed_and_goes_on_straight() -> None:
    curve = Curve.of([(10, 3.0), (20, 2.0), (40, 4.0), (40, 6.0)])
    assert [curve(s) for s in (0, 10, 20, 30, 40, 60)] == [2.0, 2.0, 2.0, 3.5, 5.0, 8.0]
    assert [curve.stretched(2)(s) for s in (10, 40)] == [2.0, 8.0]
    assert Curve.of([(8, 2.0)])(16) == 4.0


def test_devices_at_work_share_what_a_node_copies() -> None:
    """Of eight that were measured, and of one: none is faster than one alone, and all together no faster than eight."""
    memory = dict(KNOWN.memory)
    for op_name, way in (("to_host", "d2h"), ("from_host", "h2d")):
        rates = {n: 1e-9 / Rates.of(cluster(f"{n}xH200"), "bf16").copy(op_name, 1) for n in (1, 2, 4, 8)}
        assert rates[1] == pytest.approx(memory[f"{way}_one"]) and rates[8] == pytest.approx(memory[f"{way}_all"])
        for n, rate in rates.items():
            assert rate <= memory[f"{way}_one"] * (1 + 1e-9) and n * rate <= 8 * memory[f"{way}_all"] * (1 + 1e-9)
        assert rates[1] >= rates[2] >= rates[4] >= rates[8]
    assert 1e-9 / Rates.of(cluster("4x8xH200"), "bf16").copy("to_host", 1) == pytest.approx(memory["d2h_all"])


def test_a_node_that_was_measured_with_all_at_once_is_as_it_was_measured() -> None:
    """One of four, and a domain of many hosts: as many as were measured share a host."""
    node = replace(NODE, curves=replace(KNOWN, devices=4))
    for found in (replace(node, gpus=4, gpus_per_node=4), replace(node, gpus=64, gpus_per_node=64)):
        assert 1e-9 / Rates.of(found, "bf16").copy("to_host", 1) == pytest.approx(dict(KNOWN.memory)["d2h_all"])
    few, many = (Rates.of(cluster(name), "bf16").copy("to_host", 1) for name in ("8xGB200", "72xGB200"))
    assert few == many
