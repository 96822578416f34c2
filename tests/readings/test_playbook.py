"""The Ultra-Scale Playbook's closed formulas as special cases of what the recorded program says.

Written by hand from the network and from the book, in its letters: h hidden, L layers, s sequence, b micro-batch,
a heads, v vocabulary, f ffn, t = tp, p = pp, m micro-batches, N parameters, T tokens. Where the book and the program
differ, a test says in what. Bytes are of bf16 with 32-bit statistics and gradients.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from penteract.config.layout import Layout
from penteract.config.model import ModelSpec, MoESpec
from penteract.config.precision.policy import RECIPES
from penteract.readings.explain.terms import TermKind
from penteract.readings.explain.why import Why, why

h, a, v, s, b = 64, 8, 192, 128, 3
c = h // a
GPT = ModelSpec(
    layers=4, hidden_size=h, heads=a, kv_heads=a, head_size=c, ffn_size=4 * h, vocab_size=v, max_positions=s,
    norm="layer", activation="gelu", positions="learned", tied=True, qkv_bias=True, output_bias=True, mlp_bias=True,
)  # fmt: skip
kv, f = 2, 160
LLAMA = ModelSpec(layers=4, hidden_size=h, heads=a, kv_heads=kv, head_size=c, ffn_size=f, vocab_size=v)
N_GPT = h * v + 4 * (12 * h * h + 13 * h) + 2 * h + s * h
N_LLAMA = 2 * h * v + 4 * (2 * h * h + 2 * h * kv * c + 3 * h * f + 2 * h) + h
ONE = Layout(micro_batch_size=b)


def told(m: ModelSpec, layout: Layout = ONE, rank: int = 0) -> Why:
    return why(m, layout, s, "bf16", rank)


def of_a_layer(kind: TermKind, m: ModelSpec, layout: Layout = ONE) -> int:
    """What one more layer adds."""
    return told(replace(m, layers=m.layers + 1), layout).total(kind) - told(m, layout).total(kind)


def wires(w: Why, *op_names: str) -> Counter[str]:
    """Bytes by collective, of the rows whose detail has all `op_names`."""
    found = Counter[str]()
    for row in w.rows:
        if row.kind == "wires" and all(op_name in row.detail for op_name in op_names):
            found[row.what] += row.value
    return found


# ---- parameters and what stays (§ first steps: memory for weights, gradients, optimizer) ---------------------------


def test_parameters() -> None:
    """GPT: N = hv + L(12h² + 13h) + 2h, tied, and here the learned positions that the book leaves out."""
    assert told(GPT).total("parameters") == 2 * N_GPT
    assert told(LLAMA).total("parameters") == 2 * N_LLAMA


@pytest.mark.parametrize(("m", "n"), [(GPT, N_GPT), (LLAMA, N_LLAMA)], ids=["gpt", "llama"])
def test_states(m: ModelSpec, n: int) -> None:
    """fp32: 4N + 4N + 8N. Mixed: the book has 16N, or 20N where a second copy of the gradients is summed in fp32; ours
    are summed in fp32 and have no 16-bit copy: 2N + 4N + 12N. By default master weights are split: 2N + 4N + 10N."""
    whole = why(m, ONE, s, "fp32")
    assert [whole.total(k) for k in ("parameters", "gradients", "optimizer")] == [4 * n, 4 * n, 8 * n]
    for policy, kept in ((replace(RECIPES["bf16"], master="fp32"), 12), (RECIPES["bf16"], 10)):
        mixed = why(m, ONE, s, policy)
        assert [mixed.total(k) for k in ("parameters", "gradients", "optimizer")] == [2 * n, 4 * n, kept * n]


def test_zero_1() -> None:
    """2Ψ + 4Ψ + 12Ψ/d in the book; less 2Ψ/d, as master weights are split. Up to padding."""
    d = 4
    cut = told(LLAMA, Layout(dp=d, zero=1))
    padding = Counter({r.kind: r.value for r in cut.rows if r.detail == "padding"})
    assert cut.total("parameters") - padding["parameters"] == 2 * N_LLAMA
    assert cut.total("gradients") - padding["gradients"] == 4 * N_LLAMA
    assert cut.total("optimizer") - padding["optimizer"] == 10 * N_LLAMA // d


def test_stages_of_a_pipeline() -> None:
    """An outer stage holds (N - 2vh)/p + vh, here with the last norm where it is."""
    p = 2
    for rank, more in ((0, 0), (1, h)):
        assert told(LLAMA, Layout(pp=p), rank).total("parameters") == 2 * (
            (N_LLAMA - h - 2 * v * h) // p + v * h + more
        )


# ---- activations ---------------------------------------------------------------------------------------------------


def test_activations_of_a_gpt_layer() -> None:
    """The book's sbh·(34 + 5as/h) less 5as/h, as attention recomputes its scores ("selective": 34sbh); less 2sbh, the
    two dropout masks, as there is no dropout. Beside it, what the book leaves out: four statistics a token, in fp32,
    and attention's log-sum-exp.

    Two norms' inputs and outputs 2·4sbh, q k v 6sbh, attention 2sbh, GELU in and out 16sbh."""
    kept = 32 * s * b * h + 4 * 4 * s * b + 4 * a * s * b
    assert of_a_layer("kept", GPT) == kept


def llama_layer(t: int = 1, cp: int = 1, whole_keys: bool = False) -> int:
    """Two norms' inputs and outputs 8h, q and o 4ac, k and v 4·kv·c, gate, up and their product 6f; rms of the two
    norms, log-sum-exp. Over t ranks with sequence parallelism all of it is cut; gathered keys are of all tokens."""
    keys = 4 * kv * c * (cp if whole_keys else 1)
    return s // cp * b * (8 * h + 4 * a * c + keys + 6 * f + 2 * 4 + 4 * a) // t


def test_activations_of_a_llama_layer() -> None:
    assert of_a_layer("kept", LLAMA) == llama_layer()


def test_activations_over_ranks() -> None:
    """TP with SP: all over t. CP: all over cp, but for keys and values where they are gathered. DP: none of it."""
    cases = {
        Layout(tp=2): llama_layer(t=2),
        Layout(cp=4): llama_layer(cp=4, whole_keys=True),
        Layout(cp=4, cp_method="ring"): llama_layer(cp=4),
        Layout(tp=2, cp=2, cp_method="ring"): llama_layer(t=2, cp=2),
        Layout(dp=4): llama_layer(),
        Layout(dp=4, zero=1): llama_layer(),
    }
    for layout, kept in cases.items():
        assert of_a_layer("kept", LLAMA, replace(layout, micro_batch_size=b)) == kept, layout


def test_holding_what_tp_gathered() -> None:
    """Without sequence parallelism in what is kept (the book's 10 + 24/t), each region's gathered input is whole. So it
    is gathered again in backward; kept instead, it takes 4sbh more, less the shard that nothing else reads then."""
    t = 2
    held = of_a_layer("kept", LLAMA, replace(ONE, tp=t, recompute=()))
    assert held - of_a_layer("kept", LLAMA, replace(ONE, tp=t)) == 4 * s * b * h - 4 * s * b * h // t


@pytest.mark.parametrize("m", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("t", [1, 2])
def test_full_recomputation(m: ModelSpec, t: int) -> None:
    """2sbhL: a layer keeps its input; over t ranks its share."""
    assert of_a_layer("kept", m, replace(ONE, tp=t, recompute=("*",))) == 2 * s * b * h // t


@pytest.mark.parametrize(("schedule", "flight"), [("1f1b", 4), ("gpipe", 8)])
def test_micro_batches_in_flight(schedule: str, flight: int) -> None:
    """1F1B keeps p micro-batches on the first stage, all forward all backward m. A layer's output is its neighbour's
    input, so the stage's own layers keep L/p times a layer's."""
    layout = Layout(
        pp=4, schedule=schedule, gradient_accumulation_steps=8, micro_batch_size=b  # type: ignore[arg-type]
    )  # fmt: skip
    deep = replace(LLAMA, layers=8)
    rows = [r for r in told(deep, layout).rows if r.kind == "kept" and "sent" not in r.detail]
    assert {r.flight for r in rows} == {flight}
    assert sum(r.value for r in rows) == flight * 2 * llama_layer()


# ---- what goes over wires ------------------------------------------------------------------------------------------


def test_data_parallel_volume() -> None:
    """An all-reduce of Ψ, here in fp32. ZeRO 1: a reduce-scatter of Ψ and an all-gather of Ψ, of parameters in 16 bits
    (the book's sheet says fp32, and an all-reduce; its text is right). An all-reduce is both halves: 2Ψ either way."""
    assert wires(told(LLAMA, Layout(dp=4)), "gradients of") == {"all_reduce": 4 * N_LLAMA}
    cut = told(LLAMA, Layout(dp=4, zero=1))
    assert wires(cut, "gradients of") == {"reduce_scatter": 4 * N_LLAMA}
    assert wires(cut, "updated") == {"all_gather": 2 * N_LLAMA}


@pytest.mark.parametrize(("recompute", "gathers"), [((), 4), (("tp_all_gather",), 6)])
def test_tensor_parallel_volume(recompute: tuple[str, ...], gathers: int) -> None:
    """8·L·s·b·h elements a step, four in each direction; the book's /t is what a rank puts in, a ledger's is the whole
    tensor. What is not held is gathered twice more."""
    layout = Layout(tp=2, recompute=recompute, micro_batch_size=b, gradient_accumulation_steps=2)
    more = wires(told(replace(LLAMA, layers=5), layout), "over tp")
    more.subtract(wires(told(LLAMA, layout), "over tp"))
    bytes_ = 2 * 2 * s * b * h
    assert +more == {"all_gather": gathers * bytes_, "reduce_scatter": 4 * bytes_}


def test_pipeline_volume() -> None:
    """4·m·s·b·h elements for a stage with two neighbours: a value and a gradient, in and out."""
    m = 5
    layout = Layout(pp=4, micro_batch_size=b, gradient_accumulation_steps=m)
    middle = told(LLAMA, layout, 1)
    assert wires(middle, "over pp") == {"send": 2 * m * 2 * s * b * h, "recv": 2 * m * 2 * s * b * h}
    cut = told(LLAMA, replace(layout, tp=2, cp=2), 4)
    assert wires(cut, "over pp").total() == wires(middle, "over pp").total() // 4


def test_context_parallel_volume() -> None:
    """Ring: (cp - 1)·b·(s/cp)·(keys and values) forward, as the book has it; backward the same again, and the gradients
    of both, which travel one step further to be home. Gather: keys and values whole, once each way. Ulysses: q, k, v
    and o of a rank's tokens, each way."""
    cp, layers = 4, LLAMA.layers
    share = 2 * b * (s // cp) * (2 * kv * c)
    ring = wires(told(LLAMA, Layout(cp=cp, cp_method="ring", micro_batch_size=b)), "ring over cp")
    steps = (cp - 1) + (cp - 1) + cp
    assert ring == {"send": layers * steps * share, "recv": layers * steps * share}
    gather = wires(told(LLAMA, Layout(cp=cp, micro_batch_size=b)), "over cp")
    assert gather == {"all_gather": layers * cp * share, "reduce_scatter": layers * cp * share}
    copied = 2 * b * (s // cp) * (2 * cp * c)  # two KV heads for four ranks: neighbours get copies
    ulysses = wires(told(LLAMA, Layout(cp=cp, cp_method="ulysses", micro_batch_size=b)), "over cp")
    assert ulysses == {"all_to_all": layers * 2 * (copied + 2 * b * (s // cp) * 2 * a * c)}


def test_expert_parallel_volume() -> None:
    """Each token's k copies there and back, forward and backward: 4·k·b·s·h, when every expert gets the same share."""
    k, experts = 2, 8
    m = replace(LLAMA, moe=MoESpec(experts=experts, top_k=k, ffn_size=96))
    found = wires(told(m, Layout(dp=4, ep=4, micro_batch_size=b)), "over ep")
    assert found == {"all_to_all_v": 4 * 4 * k * 2 * b * s * h, "all_to_all": 4 * 8 * experts}
    whole, cut = (told(m, Layout(dp=4, ep=ep)).total("parameters") for ep in (1, 4))
    of_experts = 2 * m.layers * experts * 3 * h * 96
    assert cut == whole - of_experts + of_experts // 4  # N - (1 - 1/ep)·N of the experts


# ---- work ----------------------------------------------------------------------------------------------------------


def test_work() -> None:
    """6·N·T + 12·L·h·s² a sequence. N counts the matrices that tokens are multiplied with: the head once, and no table
    that is looked up (the book's own numbers count both, or the head twice, by layout). And backward makes the scores
    again, which a step's work has and the model's has not: 14 for 12."""
    m = 3
    layout = Layout(dp=2, micro_batch_size=b, gradient_accumulation_steps=m)
    tokens = m * b * s
    for model, matrices in (
        (GPT, h * v + 4 * 12 * h * h),
        (LLAMA, h * v + 4 * (2 * h * h + 2 * h * kv * c + 3 * h * f)),
    ):
        assert told(model, layout).total("flops") == 6 * matrices * tokens + 14 * 4 * h * s * tokens


def test_work_of_full_recomputation() -> None:
    """A second forward, but for what nothing needs again: each layer's last matrix, and what is outside of layers."""
    again = told(LLAMA, replace(ONE, recompute=("*",))).total("flops") - told(LLAMA).total("flops")
    matrices = 2 * h * h + 2 * h * kv * c + 2 * h * f
    assert again == 4 * (2 * matrices * s * b + 4 * h * s * s * b)
