"""Buckets: every parameter once, shards equal and whole together, and the same bucket for all of its reduce group."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hypothesis import given

from draws import draws
from layouts import Case
from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.config.precision.policy import RECIPES
from penteract.ops.params import Param, Shard
from penteract.parallel.bucket_plans import FsdpUnit
from penteract.parallel.data import SHARD_MULTIPLE, Bucket, buckets
from strategies import cases


@given(case=cases(max_ranks=8))
def test_shards_of_a_bucket_are_equal_and_make_it_whole(case: Case) -> None:
    lay = case.layout
    for p in [case.compile(rank) for rank in {0, lay.world - 1}]:
        assert sorted(q.name for b in p.buckets for q in b.params) == sorted(q.name for q in p.params)
        for b in p.buckets:
            used = sum(q.numel(p.mesh) for q in b.params)
            assert used <= b.size < used + (b.shards * SHARD_MULTIPLE if b.shards > 1 else 1)
            shards = [b.shard(rank) for rank in b.shard_ranks]
            assert {len(s) for s in shards} == {b.shard_size}
            assert [i for s in shards for i in s] == list(range(b.size))
            assert set(b.shard_ranks) & set(b.replicate_ranks) == {p.rank}
            assert len(b.shard_ranks) * len(b.replicate_ranks) == len(b.reduce_ranks)
            if not lay.shard_group:
                assert b.shard_ranks == (b.reduce_ranks if lay.zero else (p.rank,))


@draws(15, wide=200)
@given(case=cases(max_ranks=8))
def test_holders_agree_on_who_has_which_shard(case: Case) -> None:
    """The same buckets for all; each sharer has another shard, and replicas have the same."""
    programs = {rank: case.compile(rank) for rank in range(case.layout.world)}
    for p in programs.values():
        for i, b in enumerate(p.buckets):
            if b.across_pp_ranks:  # others number it otherwise
                continue
            for rank in b.shard_ranks:
                other = programs[rank].buckets[i]
                assert (other.params, other.size, other.shard_ranks) == (b.params, b.size, b.shard_ranks)
            for rank in b.replicate_ranks:
                assert programs[rank].buckets[i].shard(rank) == b.shard(p.rank)


def test_groups_are_neighbours_in_dp_and_cp() -> None:
    """Eight places in two groups of four: a matrix of the network, and one of experts over ep = 2."""
    mesh = Mesh(Layout(dp=4, cp=2, ep=2, tp=2, zero=3, shard_group=4))
    dense, experts = Param("a", (6, 5)), Param("b", (4, 6, 5), (Shard(0, "ep"),))
    units = [FsdpUnit((dense,)), FsdpUnit((experts,))]
    b, a = buckets(units, {"a": (0,), "b": (0,)}, mesh, 5, RECIPES["fp32"])
    assert a.shard_ranks == tuple(range(8)) and a.replicate_ranks == (5, 13)
    assert b.shard_ranks == (0, 1, 4, 5) and b.replicate_ranks == (5, 13)
    assert (a.unit, b.unit, a.cut_parameters, b.cut_gradients) == (0, 1, True, True)


def test_what_stages_share_is_packed_alike_by_all() -> None:
    """Two stages hold a and b among others, and meet them in different orders."""
    mesh = Mesh(Layout(dp=2, pp=2, bucket_bytes=0, zero=1))
    a, b, first, last = (Param(n, (6, 5)) for n in ("a", "b", "first", "last"))
    owning_pp_ranks = {"a": (0, 1), "b": (0, 1), "first": (0,), "last": (1,)}

    def shared(params: Iterable[Param], rank: int) -> list[Bucket]:
        made = buckets([FsdpUnit(tuple(params)[::-1])], owning_pp_ranks, mesh, rank, RECIPES["fp32"])
        assert [x.across_pp_ranks for x in made] == [False, True, True]
        return [replace(x, replicate_ranks=()) for x in made if x.across_pp_ranks]

    assert shared([b, first, a], 0) == shared([last, a, b], 2)
