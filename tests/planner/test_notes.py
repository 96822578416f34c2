"""What a plan warns of beside its numbers."""

from __future__ import annotations

from penteract import plan
from penteract.planner.plan import PLAIN_KERNELS, SMALL_BLOCKS


def test_plain_kernels_are_slower_than_planned() -> None:
    plain, triton = (
        plan("llama-3.2-1b", "1xH200", sequence_length=4096, batch="4seqs", layout=f"dp=1,mbs=4{more}")
        for more in (",elementwise=reference", "")
    )
    assert PLAIN_KERNELS in plain.notes and PLAIN_KERNELS not in triton.notes


def test_blocks_that_are_too_small_for_the_fullest_rank() -> None:
    def asked(imbalance: float, capacity: int) -> bool:
        blocks = f"dp=4,ep=4,mbs=1,zero=1,ep_method=all_to_all,expert_rows=padded,capacity_percent={capacity}"
        found = plan("qwen3-30b-a3b", "4xH200", sequence_length=4096, batch="4seqs", layout=blocks, imbalance=imbalance)
        return SMALL_BLOCKS in found.notes

    assert [asked(1.0, 150), asked(1.5, 150), asked(1.6, 150), asked(1.6, 200)] == [False, False, True, False]
