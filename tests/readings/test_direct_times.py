"""Collectives in which ranks read each other's registers: their times, and what they make of a step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penteract.config.catalog import model
from penteract.config.hardware import Cluster, cluster
from penteract.config.layout import FUSIONS, Collectives, Layout
from penteract.readings.costs.rates import GroupSpan, Rates
from penteract.readings.estimator import Estimator
from penteract.readings.layers.layer_program import LayerType

SIZE = 2**26
LAYOUT = Layout(
    dp=2, tp=2, zero=1, micro_batch_size=2, attention="cudnn", loss="chunked", elementwise="triton", fuse=FUSIONS
)


def estimator(node: Cluster) -> Estimator:
    return Estimator(model("llama-3.1-8b"), node, 8192)


@pytest.mark.parametrize(("collectives", "per_node", "direct"), [
    ("library", 4, False), ("direct", 4, True), ("overlapped", 4, True), ("overlapped", 1, False),
])  # fmt: skip
def test_those_of_tensor_parallelism_inside_a_node_have_times_of_their_own(
    collectives: Collectives, per_node: int, direct: bool
) -> None:
    node = replace(cluster("4xH200"), gpus_per_node=per_node)
    prices, layout = estimator(node), replace(LAYOUT, collectives=collectives)
    device = prices.steps.device(layout)
    sites = prices.composer.layer_program(layout, LayerType("as layer 0", 0)).sites
    gathers = [s for s in sites if s.op_name == "all_gather" and s.attrs["axis"] == "tp"]
    assert gathers
    for site in gathers:
        size, span = device.bytes_of(site.outs[0]), GroupSpan(2, 2 if per_node == 1 else 1)
        kind = "direct_all_gather" if direct else "all_gather"
        assert device.collective(site) == prices.rates.collective(kind, span, size)


def test_a_file_of_before_they_were_measured_has_the_librarys() -> None:
    rates = Rates.of(cluster("8xH200"), "bf16")
    links = rates.interconnect
    measured = {key: curve for key, curve in links.measured.items() if not key[0].startswith("direct_")}
    older = replace(rates, interconnect=replace(links, measured=measured, costs={}))
    one = GroupSpan(2, 1)
    assert older.collective("direct_all_gather", one, SIZE) == older.collective("all_gather", one, SIZE)
    assert rates.collective("direct_all_gather", one, SIZE) < rates.collective("all_gather", one, SIZE)


def test_a_step_takes_less_beside_them_and_holds_little_more() -> None:
    prices = estimator(cluster("4xH200"))
    library, direct, overlapped = (
        prices.estimate(replace(LAYOUT, collectives=kind)) for kind in ("library", "direct", "overlapped")
    )
    seconds = [prices.time(one).seconds for one in (library, direct, overlapped)]
    assert seconds[2] < 0.97 * seconds[0] and seconds[2] < seconds[1] <= seconds[0]
    assert library.allocated == direct.allocated <= overlapped.allocated < 1.01 * library.allocated
    alone = replace(LAYOUT, dp=4, tp=1)  # without tensor parallelism the setting says nothing
    assert len({prices.time(prices.estimate(replace(alone, collectives=kind))).seconds
                for kind in ("library", "overlapped")}) == 1  # fmt: skip
