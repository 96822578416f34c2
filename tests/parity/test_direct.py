"""Ranks of one host that read each other's registers: the library's collectives, and the step of one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given

from draws import draws
from layouts import Case, run_directly
from penteract.config.layout import Layout
from penteract.engine.comm.direct.direct_group import DirectGroup
from penteract.engine.comm.direct.host_peers import HostPeers
from penteract.engine.comm.distributed import Gloo
from penteract.engine.comm.groups import ProcessGroups, Round
from penteract.parallel.direct import KINDS
from pool import Pool
from strategies import cases


def both_ways(rank: int, groups: ProcessGroups, layout: Layout, dtype: torch.dtype) -> list[str]:
    """Each collective of the layout's world, by gloo and directly, twice: the second overwrites what the first read."""
    n, found = layout.world, list[str]()
    ranks, memory = tuple(range(n)), HostPeers()
    groups.make([Round((ranks,)), Round((ranks,), "direct")])
    block = memory.block(4096 * n)
    direct, library = DirectGroup(memory.open(block, ranks, groups.of(ranks, "direct"), 0)), Gloo(rank, groups)
    dice = torch.Generator().manual_seed(rank)
    for kind in sorted(KINDS) * 2:
        x = block[64 : 64 + 24 * n * dtype.itemsize].view(dtype)
        x.copy_(torch.randn(24 * n, generator=dice, dtype=torch.float64))
        parts = {"all_gather": n * n, "reduce_scatter": 1, "all_to_all": n}[kind]
        mine, theirs = (torch.full((24 * parts,), torch.nan, dtype=dtype) for _ in range(2))
        assert direct.takes(kind, x) and not direct.takes(kind, mine)
        direct.start(kind, x, mine).wait()
        library.finish(library.start(kind, ranks, x.clone(), theirs, {}))
        near = (mine.double() - theirs.double()).abs().max().item() <= (0.1 if dtype == torch.bfloat16 else 1e-12)
        if not (torch.equal(mine, theirs) or (kind == "reduce_scatter" and near)):
            found.append(kind)
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_they_do_what_the_library_does(pool: Pool, n: int, dtype: torch.dtype) -> None:
    assert pool.run(both_ways, Layout(dp=n), dtype) == [[]] * n


@draws(4, wide=40)
@given(case=cases(max_ranks=4))
def test_a_step_that_reads_directly_is_that_of_one_process(pool: Pool, case: Case) -> None:
    lay = case.layout if case.layout.reads_directly else replace(case.layout, collectives="direct")
    case = replace(case, layout=lay)
    assume(lay.tp > 1 or (lay.cp > 1 and lay.cp_method != "ring"))
    found = pool.run(run_directly, case)
    assert not [f"rank {rank}: {v}" for rank, (v, _) in enumerate(found) if v.red], case
    assert all(number > 0 for _, number in found), case
