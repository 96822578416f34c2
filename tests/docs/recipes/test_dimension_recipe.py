"""The recipe for a dimension is followed: FFN columns over neighbours of dp·cp that hold other tokens.

Their file would be `parallel/ffn.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest

from layouts import Case, Verdict, run_case
from penteract.config.files import keys as file_keys
from penteract.config.files.sections import Parallel
from penteract.config.hardware import cluster
from penteract.config.layout import Layout
from penteract.config.mesh import AXES, Axis, Mesh
from penteract.config.model import ModelSpec
from penteract.config.optimizers import PLAIN
from penteract.config.precision.policy import RECIPES
from penteract.config.resolve import resolved_run as resolving
from penteract.config.resolve.write_run_file import template, to_toml
from penteract.engine.comm.groups import ProcessGroups
from penteract.errors import BadInput
from penteract.model import block
from penteract.ops.do import Do, Value, single_collective
from penteract.ops.params import Param, Shard
from penteract.readings.composed import Composer
from penteract.readings.costs.rates import Rates
from penteract.readings.time import ops
from penteract.readings.time.cost import DIMENSION
from penteract.readings.time.lower_bounds import bounds
from penteract.readings.time.step import StepClock
from penteract.step import program
from pool import Pool
from readings.test_composed import check as equals_the_walk
from tiny import SIZES

DENSE = ModelSpec(**SIZES)


@dataclass(frozen=True, kw_only=True)
class Wider(Layout):
    """`config/layout.py` with one more degree, which folds over dp·cp."""

    ffn: int = 1


FFN = Axis(lambda lay: getattr(lay, "ffn", 1), lambda lay: lay.tp, crosses=True)  # an entry of `AXES`
enter_ffn = single_collective(
    "enter_ffn", "ffn", "all_gather", "reduce_scatter"
)  # [S@cp, B, D] of each -> of all, one after another
leave_ffn = single_collective("leave_ffn", "ffn", "reduce_scatter", "all_gather")


def columns(do: Do, m: ModelSpec, name: str, x: Value, ffn_size: int) -> Value:
    """As `mlp` in `model/mlp.py`, with columns over `ffn` besides."""

    def cut(which: str, shape: tuple[int, int], dim: int) -> Param:
        shards = (Shard(dim, "ffn"),)
        scale = m.residual_std if dim else m.initial_std
        return Param(f"{name}.{which}.weight", shape, shards, scale=scale, matrix=True)

    up, down = (ffn_size, m.hidden_size), (m.hidden_size, ffn_size)
    hg, hu = do.fork(do.redistribute(enter_ffn, x))
    h = do.swiglu(do.linear(hg, cut("gate", up, 0)), do.linear(hu, cut("up", up, 0)))
    return do.redistribute(leave_ffn, do.linear(h, cut("down", down, 1)))


@dataclass(frozen=True, kw_only=True)
class WiderParallel(Parallel):
    """`config/files/sections.py` with its key."""

    ffn: int = 1


@contextmanager
def ffn_known() -> Iterator[None]:
    axes = (*ops.AXES, "ffn")
    with (
        patch.object(program, "REDISTRIBUTIONS", (*program.REDISTRIBUTIONS, enter_ffn, leave_ffn)),
        patch.dict(AXES, {"ffn": FFN}),
        patch.dict(DIMENSION, {"ffn": "tensor"}),
        patch.object(ops, "AXES", axes),
        patch.object(bounds, "AXES", axes),
        patch.object(block, "mlp", columns),
    ):
        yield


def run_wider(rank: int, groups: ProcessGroups, case: Case) -> Verdict:
    with ffn_known():
        return run_case(rank, groups, case)


WIDER = [
    Wider(dp=2, ffn=2),
    Wider(dp=2, cp=2, ffn=2, micro_batch_size=2, gradient_accumulation_steps=2, zero=3),
    Wider(dp=2, pp=2, ffn=2, gradient_accumulation_steps=2, zero=1),
    Wider(dp=4, ffn=4, recompute=("*",)),
    Wider(dp=2, ffn=2, recompute=("enter_ffn", "swiglu")),
]


@contextmanager
def key_known() -> Iterator[None]:
    with (
        patch.dict(file_keys.SECTIONS, {"parallel": WiderParallel}),
        patch.dict(file_keys._ABOUT, {"parallel.ffn": ("FFN columns over dp·cp", 1, 2**48)}),
        patch.object(resolving, "Layout", Wider),
    ):
        file_keys.keys.cache_clear()
        yield
    file_keys.keys.cache_clear()


def test_a_dimension_has_a_key_of_run_files(tmp_path: Path) -> None:
    """Read, shown with its meaning, written and read again."""
    with key_known():
        found = resolving.resolve(overrides=["--parallel.dp=4", "--parallel.ffn=2"])
        assert found.run.layout == Wider(dp=4, ffn=2, **{"micro_batch_size": 4, "loss": "chunked"})
        assert "# ffn = 1  # FFN columns over dp·cp" in template()
        (tmp_path / "run.toml").write_text(to_toml(found))
        assert resolving.resolve(tmp_path / "run.toml").run == found.run
    with pytest.raises(BadInput, match="unknown key"):
        resolving.resolve(overrides=["--parallel.ffn=2"])


@pytest.mark.parametrize("layout", WIDER, ids=repr)
def test_a_dimension_is_an_axis_and_where_it_is_crossed(pool: Pool, layout: Wider) -> None:
    """Gradients are the oracle's; wires, FLOPs and kept bytes are those priced; who reduces follows from the cuts."""
    red = [f"rank {rank}: {v}" for rank, v in enumerate(pool.run(run_wider, Case(DENSE, layout))) if v.red]
    assert not red, "\n".join(red)


def test_a_dimension_is_priced_by_layers_and_timed() -> None:
    with ffn_known():
        assert Mesh(WIDER[1]).group("ffn", 3) == (2, 3)
        equals_the_walk(DENSE, WIDER[2], 16, RECIPES["bf16"], PLAIN)
        node = cluster("8xH100")
        steps = StepClock(Composer(DENSE, 16, "bf16"), node, Rates.of(node, "bf16"))
        assert 0 < steps.seconds(Wider(dp=2)) < steps.seconds(Wider(dp=2, ffn=2))
    assert "ffn" not in AXES
