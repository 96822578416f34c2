"""Buckets: every parameter once, shards equal and whole together, and the same bucket for all of its holders."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hypothesis import given

from layouts import Case
from penteract.ops.params import Param
from penteract.parallel.data import UNIT, Bucket, buckets
from penteract.spec.layout import Layout
from penteract.spec.mesh import Mesh
from penteract.spec.precision import RECIPES
from strategies import cases


@given(case=cases(max_ranks=8))
def test_shards_of_a_bucket_are_equal_and_make_it_whole(case: Case) -> None:
    for zero in (0, 1):
        of = replace(case, layout=replace(case.layout, zero=zero))
        programs = [of.compile(rank) for rank in {0, case.layout.world - 1}]
        for p in programs:
            assert sorted(q.name for b in p.buckets for q in b.params) == sorted(q.name for q in p.params)
            for b in p.buckets:
                used = sum(q.numel(p.mesh) for q in b.params)
                assert b.shards == (len(b.holders) if zero else 1)
                assert used <= b.size < used + (b.shards * UNIT if b.shards > 1 else 1)
                shards = [b.shard(rank) for rank in b.holders] if zero else [b.shard(p.rank)]
                assert {len(s) for s in shards} == {b.shard_size}
                assert [i for s in shards for i in s] == list(range(b.size))


def test_what_stages_share_is_packed_alike_by_all() -> None:
    """Two stages hold a and b among others, and meet them in different orders."""
    mesh = Mesh(Layout(dp=2, pp=2, bucket_bytes=0, zero=1))
    a, b, first, last = (Param(n, (6, 5)) for n in ("a", "b", "first", "last"))
    homes = {"a": (0, 1), "b": (0, 1), "first": (0,), "last": (1,)}

    def shared(params: Iterable[Param], rank: int) -> list[Bucket]:
        made = buckets(params, homes, mesh, rank, RECIPES["fp32"])
        assert [x.across_stages for x in made] == [False, True, True]
        return [x for x in made if x.across_stages]

    assert shared([b, first, a], 0) == shared([last, a, b], 2)
