"""A layout as the words of a command line."""

from __future__ import annotations

import dataclasses

from penteract.config.layout import Layout
from penteract.planner.ask import LAYOUT_SETTINGS, as_text, parse_settings


def test_a_layout_reads_back_as_it_is_written() -> None:
    lay = Layout(dp=2, tp=2, cp=2, cp_method="ring", schedule="gpipe", zero=3, shard_group=2, reduce_scatter_once=True,
                 recompute=("*",), recompute_every=2, recompute_else=("swiglu",), offload=("layer_inputs",),
                 micro_batch_size=3,
                 loss="reference", loss_chunk=64, bucket_bytes=0)  # fmt: skip
    text = as_text(lay, Layout())
    assert "elementwise" not in text
    assert "elementwise=reference" in as_text(lay, Layout(elementwise="triton"))  # where the GPU has kernels
    settings = parse_settings(text, flag="--layout", several=False)
    written = {name: value for name, (value,) in settings.items()}
    assert written == {"dp": 2, "tp": 2, "cp": 2, "cp_method": "ring", "schedule": "gpipe", "zero": 3,
                       "shard_group": 2, "reduce_scatter_once": True, "recompute": "full", "recompute_every": 2,
                       "recompute_else": "swiglu", "offload": "layer_inputs", "micro_batch_size": 3,
                       "loss": "reference",
                       "loss_chunk": 64, "bucket_bytes": 0}  # fmt: skip


def test_no_all_gather_is_named_where_there_is_none() -> None:
    ops = ("tp_all_gather", "rms_norm", "swiglu")
    texts = {tp: as_text(Layout(dp=2, tp=tp, recompute=ops), usual=Layout()) for tp in (1, 2)}
    assert ",recompute=rms_norm+swiglu" in texts[1]
    assert ",recompute=tp_all_gather+rms_norm+swiglu" in texts[2]
    assert "recompute" not in as_text(Layout(dp=2), usual=Layout())


def test_every_field_of_a_layout_is_a_setting() -> None:
    """But the accumulation steps, which follow from the batch."""
    assert {f.name for f in dataclasses.fields(Layout)} - {"gradient_accumulation_steps"} == {*LAYOUT_SETTINGS}
