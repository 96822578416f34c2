"""FP8 data of a shard: those that a linear would make of the whole weight, in the memory that is declared."""

from __future__ import annotations

import pytest
import torch

from op_kernels.fp8 import rounded
from penteract.config.precision.fp8 import Fp8
from penteract.engine.device.storages import Storages
from penteract.engine.dtypes import FORMATS
from penteract.engine.state.quantised_weights import QuantisedWeights, ShardValues
from penteract.ops.declarations.quantised import fp8 as declared
from penteract.ops.params import Param
from penteract.parallel.data import Bucket

ROWS, COLUMNS = 16, 48
SIZE = 2 * ROWS * COLUMNS


@pytest.mark.parametrize("powers", [False, True])
@pytest.mark.parametrize("chunk", [2**22, 100])
def test_shards_are_the_fp8_data_of_whole_weights(chunk: int, powers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two weights over three ranks: borders of shards lie within both."""
    monkeypatch.setattr(declared, "CHUNK", chunk)
    fp8 = Fp8(kind="tensorwise", gather=True, powers=powers)
    weights = torch.randn(2, ROWS * COLUMNS, generator=torch.Generator().manual_seed(3)).mul_(torch.tensor([[1], [9]]))
    params = tuple(Param(name, (ROWS, COLUMNS)) for name in "ab")
    b = Bucket(params, (0, ROWS * COLUMNS), SIZE, (0, 1, 2), True, False, (0, 1, 2), (0,), shards=3, gathered_as="fp8")
    largest = weights.abs().amax(1)
    whole, flat = torch.zeros(SIZE, dtype=torch.uint8), weights.view(-1)
    for rank in range(3):
        shard, parts = b.shard(rank), dict[str, ShardValues]()
        for q, at in zip(params, b.offsets, strict=True):
            begin, end = max(at, shard.start), min(at + ROWS * COLUMNS, shard.stop)
            if begin < end:
                parts[q.name] = ShardValues(begin - at, flat[begin:end])
        quantised = QuantisedWeights(fp8, "ab", parts, torch.device("cpu"))
        quantised.begin()
        own = [float(parts[name].values.abs().max()) if name in parts else 0.0 for name in "ab"]
        assert quantised.table[:, 0].tolist() == own
        quantised.table[:, 0] = largest  # as all of a stage agree on
        quantised.scale()
        with Storages() as storages:
            quantised.quantise_shard(b, shard, whole)
        assert storages.peak == declared.quantise_workspace(b.shard_size)
        assert storages.now == 0
    numbers = whole.view(FORMATS["e4m3"]).double().view(2, ROWS, COLUMNS)
    plain = Fp8(kind="tensorwise", powers=powers)
    for i, name in enumerate("ab"):
        wanted = rounded(weights[i].view(ROWS, COLUMNS).double(), plain, "e4m3")
        assert torch.equal(numbers[i] * quantised.scales[name].double(), wanted)
