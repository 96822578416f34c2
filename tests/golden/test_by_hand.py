"""The golden numbers by hand: closed forms from published shapes and data sheets, none of the program's code.

Letters: L layers, h hidden, f ffn, a heads, k KV heads, c head size, v vocabulary, s sequence, T tokens of a step;
t = tp, p = pp, d = dp. Parameters and activations are bf16 (2 bytes); gradients and two moments
fp32, as are master weights, whose upper half is the parameter.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

FOLDER = Path(__file__).parent / "layouts"
H100 = H200 = 1978.9e12 / 2  # dense bf16: half of the data sheet's rate with sparsity
S = 8192
T = 2**20


class Llama(NamedTuple):
    """Llama 3, 2407.21783, table 3."""

    L: int
    h: int
    f: int
    a: int
    k: int = 8
    c: int = 128
    v: int = 128_256

    @property
    def matrices(self) -> int:
        """Of a layer: queries and their output, keys and values, gate, up and down."""
        return 2 * self.h * self.a * self.c + 2 * self.h * self.k * self.c + 3 * self.h * self.f

    @property
    def parameters(self) -> int:
        """Two tables, matrices and two norms a layer, the last norm."""
        return 2 * self.v * self.h + self.L * (self.matrices + 2 * self.h) + self.h

    def kept(self, t: int = 1) -> int:
        """Bytes that a layer keeps of a sequence for its backward, over t ranks: inputs and outputs of two norms,
        queries and attention's output, keys and values, gate, up and their product; in fp32 two norms' statistics and
        attention's log-sum-exp."""
        halves = 4 * self.h + 2 * self.a * self.c + 2 * self.k * self.c + 3 * self.f
        return S * (2 * halves + 4 * (2 + self.a)) // t

    def flops(self, attention: float) -> float:
        """Of a token: 6 for each parameter that it is multiplied with (no lookup, no norm), and 12·L·a·c·s of scores
        and values over the whole sequence, of which a causal mask leaves half."""
        return 6 * (self.v * self.h + self.L * self.matrices) + attention * 12 * self.L * self.a * self.c * S


B8 = Llama(L=32, h=4096, f=14_336, a=32)
B70 = Llama(L=80, h=8192, f=28_672, a=64)


def golden(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))


def test_published_sizes() -> None:
    """As the model cards have them: 8.03B and 70.6B."""
    assert (B8.parameters, B70.parameters) == (8_030_261_248, 70_553_706_496)


# ---- dp = 8, ZeRO 1: everything whole but the optimizer ------------------------------------------------------------


def test_8b_states() -> None:
    n, memory = B8.parameters, golden("8b_dp8_zero1")["memory"]
    assert memory["parameters"] == 2 * n
    assert memory["gradients"] == 4 * n
    assert memory["optimizer"] == 10 * n // 8
    whole = golden("8b_dp8_zero0")["memory"]
    assert whole["optimizer"] == 10 * n
    assert (whole["parameters"], whole["gradients"]) == (2 * n, 4 * n)
    assert whole["activations"] == memory["activations"]


def test_8b_activations() -> None:
    """What layers keep. Around the loss, logits of a chunk, of 8,192 tokens, become their gradient where they lie;
    beside them at most six tensors of [s, h] at the ends. No kernel allocates the logits in fp32, 4·s·v."""
    memory, chunk = golden("8b_dp8_zero1")["memory"], 2 * min(S, 8192) * B8.v
    rest = memory["activations"] - B8.L * B8.kept()
    assert 0.9 * chunk <= rest <= chunk + 6 * 2 * S * B8.h
    assert memory["other"] < 4 * S * B8.v / 8
    whole = golden("8b_dp8_recompute_full")["memory"]["activations"]
    inputs, layer = B8.L * 2 * S * B8.h, B8.kept()
    assert inputs + chunk <= whole <= inputs + max(chunk + 6 * 2 * S * B8.h, 2 * layer)


def test_8b_utilisation() -> None:
    """MFU = FLOPs of the tokens over those that the GPU could have done."""
    told = golden("8b_dp8_zero1")
    rate = T / told["step"] / 8
    assert told["tokens_per_s_per_gpu"] == pytest.approx(rate, rel=1e-6)
    assert told["mfu"] == pytest.approx(rate * B8.flops(1) / H200, rel=1e-4)
    assert told["mfu_causal"] == pytest.approx(rate * B8.flops(0.5) / H200, rel=1e-4)


def test_8b_parts() -> None:
    """Products at 55 to 85 % of the peak, attention at 40 to 85 %: its backward makes the scores again, 14 for 12.
    AdamW reads and writes 32 bytes a parameter of its shard (fp32 gradient twice, for its norm too; two moments and
    both halves of the master weights both ways) at no more than 4.8 TB/s."""
    parts = golden("8b_dp8_zero1")["step_parts"]
    products, scores = T / 8 * B8.flops(0) / H200, T / 8 * (B8.flops(0.5) - B8.flops(0)) * 14 / 12 / H200
    assert 0.55 < products / parts["compute"] < 0.85
    assert 0.4 < scores / parts["attention"] < 0.85
    assert 1 < parts["update"] / (32 * B8.parameters / 8 / 4.8e12) < 1.5


# ---- tp = 8, pp = 2, dp = 4, ZeRO 1: matrices over 16 ranks, norms whole -------------------------------------------


def test_70b_states() -> None:
    """The first stage has a table and half of the layers, the last the other table, the other half and the last norm;
    each matrix over t ranks, each norm on all of them. ZeRO 1 cuts over the ranks that hold the same: a matrix over
    d, a norm over d·t."""
    m, t, d = B70, 8, 4
    matrices, norms = (m.v * m.h + 40 * m.matrices) // t, 40 * 2 * m.h
    first = matrices + norms
    told = golden("70b_64xh100")
    assert told["memory"]["parameters"] == 2 * first
    assert told["memory"]["gradients"] == 4 * first
    assert told["memory"]["optimizer"] == 10 * (matrices // d + norms // (d * t))
    assert told["allocated_by_pipeline_rank"][0] == told["memory"]["allocated"]


def test_70b_activations() -> None:
    """1F1B keeps two micro-batches on the first of two stages and one on the last, each of 40 layers; the rest is a
    layer's worth of temporary, and what one more tensor of a layer would be. Logits of a chunk take no more than
    that."""
    told, (first, last) = golden("70b_64xh100"), golden("70b_64xh100")["allocated_by_pipeline_rank"]
    kept = 40 * B70.kept(t=8)
    assert 0 <= told["memory"]["activations"] - 2 * kept <= 4 * B70.kept(t=8)
    assert last - first == pytest.approx(-kept, abs=4 * B70.kept(t=8))


def test_70b_step() -> None:
    """Each stage waits for the other's first forward and last backward: (p - 1)/m of its own time at least. And s·h
    values in bf16 go over tp 10 times a layer (around two regions there and back, forward and backward; and two inputs
    gathered again): what of it is waited for is less than all of it at half of NVLink's 450 GB/s."""
    told = golden("70b_64xh100")
    parts, micro_batches = told["step_parts"], T // S // 4
    busy = told["step"] - parts["pipeline"] - parts["data"] - parts["update"]
    assert 1 / micro_batches <= parts["pipeline"] / busy <= 4 / micro_batches
    wires = micro_batches * 40 * 10 * 2 * S * B70.h * 7 / 8
    assert 0 < parts["tensor"] <= wires / 225e9
    assert told["mfu"] == pytest.approx(told["tokens_per_s_per_gpu"] * B70.flops(1) / H100, rel=1e-4)


# ---- all of them ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_sums(name: str) -> None:
    """Kinds of memory sum to the fullest rank's, parts of a step to the step; no step is below its bound, none does
    more than the peak, and none that recomputes nothing does more than the model asks."""
    told = golden(name)
    memory = told["memory"]
    assert memory.pop("allocated") == sum(memory.values()) == max(told["allocated_by_pipeline_rank"])
    assert sum(told["step_parts"].values()) == pytest.approx(told["step"], rel=1e-5)
    assert min(told["step_parts"].values()) > 0
    assert told["step_at_least"] <= told["step"]
    assert 0 < told["mfu_causal"] < told["mfu"] <= told["hfu"] < 1
    assert (told["hfu"] > told["mfu"]) == (told["layout"]["recompute"] == "full")


def test_pipelines_of_one_node() -> None:
    """1F1B keeps p micro-batches on the first stage, of 32/p layers. All forward, all backward keeps all m on every
    stage, most on the last with the head's input, and saves no time but a message's: under 1F1B stages wait for each
    other's in turns. More chunks wait less and keep more; weight
    gradients that wait fill the bubble."""
    plain, gpipe, chunks, bubble = (
        golden(f"8b_pp4_{name}") for name in ("1f1b", "gpipe", "interleaved_vpp2", "zb_h1")
    )  # fmt: skip
    micro_batches = plain["gradient_accumulation_steps"]
    last = micro_batches * (8 * B8.kept() + 2 * S * B8.h)
    assert 1 < plain["memory"]["activations"] / (4 * 8 * B8.kept()) < 1.1
    assert 1 < gpipe["memory"]["activations"] / last < 1.05
    assert gpipe["allocated_by_pipeline_rank"][-1] == gpipe["memory"]["allocated"]
    assert plain["step"] <= gpipe["step"] * 1.0002
    for better in (chunks, bubble):
        assert better["step"] < plain["step"]
        assert better["memory"]["activations"] > plain["memory"]["activations"]


def test_a_tied_table_is_on_both_ends() -> None:
    """Llama 3.2 3B over four stages (28 layers, h 3072, f 8192, 24 heads): the first and the last hold the one table,
    and with dp = 2 these are four ranks to cut its optimizer over."""
    m = Llama(L=28, h=3072, f=8192, a=24)
    table, layers = m.v * m.h, 7 * (m.matrices + 2 * m.h)
    told = golden("3b_tied_pp4")
    assert told["memory"]["parameters"] == 2 * (table + layers)
    assert told["memory"]["gradients"] == 4 * (table + layers)
    assert told["memory"]["optimizer"] == 10 * (table // 4 + layers // 2)
    first, second, *_ = told["allocated_by_pipeline_rank"]
    more = (2 + 4 + 12 / 4) * table + 7 * m.kept()  # of states, and one micro-batch in flight
    assert first - second == pytest.approx(more, rel=0.05)
