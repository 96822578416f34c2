"""What a run has where nobody says, on a card that is described here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penteract.cli.resolve import gpu_defaults
from penteract.cli.resolve.card_cluster import Card, planned_seconds
from penteract.cli.resolve.gpu_defaults import HARDLY, ROOM, card_here, settle_defaults
from penteract.config.hardware import cluster
from penteract.config.layout import COLLECTIVES, EVERY_FUSION, FUSIONS
from penteract.config.resolve.resolved_run import Resolved, resolve
from penteract.config.resolve.write_run_file import to_toml
from penteract.engine.doctor.machine import Gpus, GpuState
from penteract.units import GIB

H200 = Card(name="H200", free=140 * GIB, capability=(9, 0), packages=frozenset({"triton", "flash-attn-4"}))


def settled(card: Card | None, *words: str, preset: str = "llama-3.2-1b") -> tuple[Resolved, str]:
    def again(more: list[str]) -> Resolved:
        return resolve(None, preset, [*more, *words])

    return settle_defaults(again([]), card, again)


def test_a_cpu_keeps_what_it_has() -> None:
    made, line = settled(None)
    assert line == ""
    assert made == resolve(None, "llama-3.2-1b")
    assert card_here("cpu") is None


def of_host(monkeypatch: pytest.MonkeyPatch, way: str, *, launched: bool = False) -> Card:
    """The card of a host with two GPUs that reach each other so."""
    one = GpuState(index=0, name="H200", memory=140 * GIB, free=139 * GIB, capability=(9, 0))
    two = GpuState(index=1, name="H200", memory=140 * GIB, free=138 * GIB, capability=(9, 0))
    found = Gpus(source="nvidia-smi", loaded=True, devices=(one, two), matrix=(("X", way), (way, "X")))
    monkeypatch.setattr(gpu_defaults, "DRIVER", Path(__file__))
    monkeypatch.setattr("penteract.engine.doctor.probe.gpus.gpus", lambda _: found)
    card = card_here("auto", launched=launched)
    assert card is not None
    return card


def test_collectives_are_beside_products_where_nvlink_joins_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    joined, apart = (of_host(monkeypatch, way) for way in ("NV18", "PCIe"))
    assert (joined.free, joined.peers, apart.peers) == (138 * GIB, 2, 0)
    for card, word, wanted in (
        (joined, "parallel.tp=2", "overlapped"), (joined, "parallel.cp=2", "direct"),
        (joined, "parallel.dp=2", "library"), (joined, "parallel.tp=4", "library"), (apart, "parallel.tp=2", "library"),
    ):  # fmt: skip
        assert settled(card, word)[0].run.layout.collectives == wanted  # with cp alone, no products are in parts
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert of_host(monkeypatch, "NV18").peers and not of_host(monkeypatch, "NV18", launched=True).peers


@pytest.mark.parametrize(("length", "wanted"), [(256, "library"), (8192, "overlapped")])
def test_the_collectives_are_those_of_the_least_planned_time(
    monkeypatch: pytest.MonkeyPatch, length: int, wanted: str
) -> None:
    """A short step waits for the host, and overlapped collectives are more calls."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    words = ["--parallel.tp=2", f"--batch.sequence_length={length}", "--batch.micro_batch_size=1"]
    words += ["--batch.global_batch_size=1"]
    made, line = settled(of_host(monkeypatch, "NV18"), *words)
    times = {
        kind: planned_seconds(replace(made.run, layout=made.run.layout.put(collectives=kind)), cluster("2xH200"))
        for kind in COLLECTIVES
    }
    assert made.run.layout.collectives == wanted == min(times, key=lambda kind: times[kind])
    assert ("collectives" in line) == (wanted != "library")
    named, _ = settled(of_host(monkeypatch, "NV18"), *words, "--kernels.collectives=direct")
    assert named.run.layout.collectives == "direct"
    unknown, _ = settled(replace(of_host(monkeypatch, "NV18"), name="some other"), *words)  # of which no plan is made
    assert unknown.run.layout.collectives == "overlapped"


def test_a_gpu_gets_the_fastest_kernels_and_the_largest_micro_batch_that_fits() -> None:
    made, line = settled(H200)
    lay = made.run.layout
    assert (lay.attention, lay.elementwise, lay.fuse, lay.loss) == ("fa4_documents", "triton", FUSIONS, "chunked")
    assert made.run.precision.policy.compute == "bf16"
    assert lay.micro_batch_size > 1
    assert "micro_batch_size" in line and "attention fa4_documents" in line
    assert made.origins["kernels.attention"] == "chosen for H200"
    small, _ = settled(Card(name="small", free=30 * GIB, capability=(9, 0), packages=H200.packages))
    assert small.run.layout.micro_batch_size < lay.micro_batch_size


def test_saves_in_the_background_are_the_default() -> None:
    made, line = settled(H200)
    assert made.run.checkpoint.asynchronous and "asynchronous" not in line
    assert not settled(H200, "--checkpoint.asynchronous=false")[0].run.checkpoint.asynchronous


def test_a_file_in_which_nobody_decided_it_leaves_it_to_the_host(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    for words, is_open in (((), True), (("checkpoint.asynchronous=true",), False)):
        file.write_text(to_toml(resolve(None, "tiny", [*words])))
        found = resolve(file, None)
        assert found.run.checkpoint.asynchronous and found.is_open("checkpoint.asynchronous") is is_open


def test_a_resumed_run_keeps_what_its_file_says(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(to_toml(resolve(None, "tiny")))
    before = resolve(file, None)
    assert settle_defaults(before, H200, lambda more: resolve(file, None, more), resumed=True) == (before, "")


def test_gate_and_up_are_one_op_with_swiglu_where_the_package_is_there() -> None:
    both = Card(name="H200", free=140 * GIB, capability=(9, 0), packages=H200.packages | {"quack-kernels"})
    made, line = settled(both)
    assert made.run.layout.fuse == EVERY_FUSION
    assert '"glu"' in line
    assert settled(both, "--precision.dtype=fp8_tensorwise")[0].run.layout.fuse == FUSIONS
    older = Card(name="A100", free=70 * GIB, capability=(8, 0), packages=both.packages)
    assert settled(older)[0].run.layout.fuse == FUSIONS


@pytest.mark.parametrize(
    ("card", "attention"),
    [
        (H200, "fa4"),
        (Card(name="H100", free=70 * GIB, capability=(9, 0), packages=frozenset({"triton"})), "cudnn"),
        (Card(name="A100", free=70 * GIB, capability=(8, 0), packages=H200.packages), "cudnn"),
    ],
)
def test_attention_is_what_the_card_and_its_packages_have(card: Card, attention: str) -> None:
    made, _ = settled(card, "--data.pack_documents=false")
    assert made.run.layout.attention == attention


def test_a_card_without_triton_has_torchs_kernels() -> None:
    made, _ = settled(Card(name="bare", free=70 * GIB, capability=(9, 0), packages=frozenset()))
    assert (made.run.layout.attention, made.run.layout.elementwise, made.run.layout.fuse) == ("flash", "reference", ())


ALL = replace(H200, packages=H200.packages | {"quack-kernels"})
EXPERTS = ("--model.layers=8", "--parallel.dp=2", "--parallel.ep=2", "--parallel.zero=1", "--memory.recompute=none",
           "--batch.sequence_length=4096", "--batch.global_batch_size=8", "--data.pack_documents=false")  # fmt: skip


def of_experts(card: Card, *words: str) -> tuple[str, int, str]:
    """The rows of experts and the micro-batch of a run on two such cards, and the line about it."""
    made, line = settled(card, *EXPERTS, *words, preset="qwen3-30b-a3b")
    return made.run.layout.expert_rows, made.run.layout.micro_batch_size, line


def test_rows_of_experts_are_padded_where_tokens_are_gathered() -> None:
    rows, size, line = of_experts(ALL)
    assert (rows, size) == ("padded", 4) and line.endswith(", micro_batch_size 4, expert_rows padded")
    made, _ = settled(ALL, *EXPERTS, preset="qwen3-30b-a3b")
    assert made.origins["parallel.expert_rows"] == "chosen for H200"
    assert 'expert_rows = "padded"' in to_toml(made)
    fp8 = ("--precision.dtype=fp8_rowwise", "--precision.fp8_experts=true")
    budget = ("--memory.recompute=budget", "--memory.budget=0.8")  # which recomputation would pay for
    for words in (
        ("--parallel.ep_method=all_to_all",), ("--parallel.ep=1",), ("--kernels.experts=reference",), fp8, budget,
        ("--parallel.expert_rows=exact",),
    ):  # fmt: skip
        rows, _, line = of_experts(ALL, *words)
        assert rows == "exact" and "expert_rows" not in line


def test_padded_rows_cost_a_run_neither_its_micro_batch_nor_its_memory() -> None:
    grouped = (*EXPERTS, "--kernels.experts=quack")
    exact, padded = (
        settled(ALL, *grouped, f"--parallel.expert_rows={rows}", preset="qwen3-30b-a3b")[0].run
        for rows in ("exact", "padded")
    )
    need, more = (gpu_defaults._allocated(run, run.layout) for run in (exact, padded))
    assert need < more
    between = replace(ALL, free=int((need + more) / 2 / ROOM))
    for words in ((), ("--batch.micro_batch_size=4",)):
        assert of_experts(between, *words)[:2] == ("exact", 4)
        assert of_experts(replace(ALL, free=int(more / ROOM) + 1), *words)[:2] == ("padded", 4)
    assert of_experts(between, "--batch.micro_batch_size=1")[:2] == ("padded", 1)


def test_rows_are_exact_where_a_plan_has_padded_ones_slower() -> None:
    """torch's products by groups copy the whole register. A card without a plan has exact ones, too."""
    assert of_experts(H200)[0] == "exact"
    assert of_experts(replace(ALL, name="some other"))[0] == "exact"


WHOLE = "--data.pack_documents=false"


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ((WHOLE,), "bitwise"), ((), "off"), (("--batch.sequence_length=256",), "bitwise"),
        ((WHOLE, "--kernels.determinism=off"), "off"), (("--kernels.determinism=bitwise",), "bitwise"),
        ((WHOLE, "--kernels.attention=cudnn"), "off"), ((WHOLE, "--kernels.elementwise=reference"), "off"),
        ((WHOLE, "--kernels.attention=reference"), "off"), ((WHOLE, "--parallel.dp=2"), "off"),
        ((WHOLE, "--precision.dtype=fp8_tensorwise", "--batch.sequence_length=1024"), "bitwise"),
        ((WHOLE, "--precision.dtype=fp8_tensorwise"), "off"),
    ],
    ids=str,
)  # fmt: skip
def test_a_run_has_the_same_bits_again_where_that_was_seen_and_costs_little(
    words: tuple[str, ...], wanted: str
) -> None:
    """A step with documents would take longer, unless it is short of attention; in FP8 attention is more of it."""
    made, line = settled(H200, *words)
    assert made.run.layout.determinism == wanted
    chosen = wanted == "bitwise" and "--kernels.determinism=bitwise" not in words
    assert ("determinism bitwise" in line) == chosen
    if chosen:
        nodes = cluster(f"{made.run.layout.world}xH200")
        other = replace(made.run, layout=made.run.layout.put(determinism="off"))
        assert planned_seconds(made.run, nodes) <= HARDLY * planned_seconds(other, nodes)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("--parallel.tp=2", "--kernels.collectives=overlapped"), "bitwise"),
        (("--parallel.tp=2", "--kernels.collectives=direct"), "off"),
        (("--parallel.tp=2", "--optimizer.kind=muon"), "off"), (("--parallel.dp=2",), "off"),
        (("--parallel.dp=2", "--parallel.zero=3"), "off"), (("--parallel.cp=2",), "off"),
        (("--parallel.pp=2", "--batch.global_batch_size=8"), "off"), (("--parallel.tp=4",), "off"),
    ],
    ids=str,
)  # fmt: skip
def test_two_ranks_of_one_host_have_the_same_bits_again(words: tuple[str, ...], wanted: str) -> None:
    """Where it was run, and took hardly longer. Ranks that share parameters reduce gradients beside attention,
    which takes longer in order then."""
    together = replace(H200, peers=2, host_ranks=4)
    assert settled(together, WHOLE, *words)[0].run.layout.determinism == wanted
    assert settled(replace(together, host_ranks=1), WHOLE, *words)[0].run.layout.determinism == "off"


def test_ranks_are_known_to_share_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert of_host(monkeypatch, "NV18").host_ranks == 2
    assert of_host(monkeypatch, "NV18", launched=True).host_ranks == 1
    for here, known in (("2", 2), ("1", 1), ("many", 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
        assert of_host(monkeypatch, "NV18").host_ranks == 2
        assert of_host(monkeypatch, "NV18", launched=True).host_ranks == known


@pytest.mark.parametrize(("name", "capability"), [("some other", (9, 0)), ("A100", (8, 0))])
def test_other_cards_do_not_promise_the_same_bits(name: str, capability: tuple[int, int]) -> None:
    made, _ = settled(replace(H200, name=name, capability=capability), WHOLE)
    assert made.run.layout.determinism == "off"


def test_what_is_said_is_kept() -> None:
    made, line = settled(
        H200, "--kernels.attention=reference", "--kernels.fuse=none", "--precision.dtype=fp32",
        "--batch.micro_batch_size=2",
    )  # fmt: skip
    lay = made.run.layout
    assert (lay.attention, lay.fuse, lay.micro_batch_size) == ("reference", (), 2)
    assert made.run.precision.dtype == "fp32"
    assert line == "Chosen for H200 with 140.00 GiB free: elementwise triton"


def test_an_old_card_computes_as_before() -> None:
    made, _ = settled(
        Card(name="V100", free=30 * GIB, capability=(7, 0), packages=frozenset({"triton"})), preset="tiny"
    )
    assert made.run.precision.policy.compute == "fp32"
    assert made.run.layout.attention == "reference"


def test_predictions_leave_room() -> None:
    assert 0.8 < ROOM < 1
