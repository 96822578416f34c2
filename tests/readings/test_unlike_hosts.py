"""Steps in which the host of one rank sets the pace, and those of others get ever further ahead."""

from __future__ import annotations

from penteract.config.catalog import model
from penteract.config.hardware import cluster
from penteract.config.layout import FUSIONS, Layout
from penteract.readings.estimator import Estimator

LAYOUT = Layout(
    dp=4, pp=2, schedule="interleaved", vpp=3, micro_batch_size=2, gradient_accumulation_steps=4, zero=3,
    recompute=("*",), attention="cudnn", loss="chunked", elementwise="triton", fuse=FUSIONS,
)  # fmt: skip


def test_a_host_that_is_further_ahead_delays_no_step() -> None:
    steps = Estimator(model("gpt2"), cluster("8xH200"), 1024).steps
    ranks = steps.ranks(LAYOUT)
    settled, hosts = ranks.last, [(was.host, now.host) for was, now in zip(*ranks.carried[-2:], strict=True)]
    assert len(ranks.ends) < 200 and any(now < was < 0 for was, now in hosts)
    for _ in range(200):
        ranks.step()
        assert ranks.last == settled
