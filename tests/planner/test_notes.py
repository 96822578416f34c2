"""What a plan warns of beside its numbers."""

from __future__ import annotations

from penteract import plan
from penteract.planner.plan import PLAIN_KERNELS, SMALL_BLOCKS
from penteract.planner.report.explain import explain


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


def test_batches_that_would_do_better_are_named() -> None:
    """The nearest that data parallelism alone divides; and that a larger one fills more, where pipeline ranks wait or
    ranks share a sequence."""

    def told(gpus: str, batch: str) -> str:
        found = plan("llama-3.2-1b", gpus, sequence_length=4096, batch=batch)
        return " ".join(explain(found, found.best).lines())

    odd = told("6xH200", "64seqs")
    assert "dp=6 is not possible" in odd and "(--batch 60seqs or 66seqs allow dp=6)" in odd
    few = told("8xH200", "4seqs")
    assert "(--batch 8seqs allows dp=8)" in few and "The batch is 0.5 sequences a GPU, fewer than one" in few
    even = told("8xH200", "64seqs")
    assert "larger --batch" not in even and "is not possible" not in even
