"""From a question to cases: files, grids and plans, what is refused, and what is predicted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penteract.api import plan
from penteract.cli.app import main
from penteract.cli.benching.slurm_jobs import cases_of_jobs
from penteract.cli.benching.sweep_options import SweepOptions, question_of, read_grid
from penteract.cli.resolve.overrides import split_overrides
from penteract.config.hardware import cluster
from penteract.config.resolve.resolved_run import resolve
from penteract.config.rules.kernel_packages import PACKAGES, packages_here
from penteract.errors import BadInput
from penteract.measure.bench import sweep_run
from penteract.measure.bench.cases.case_cost import gpu_seconds
from penteract.measure.bench.cases.case_prediction import Predictor
from penteract.measure.bench.cases.sweep_cases import expand
from penteract.measure.bench.cases.sweep_file import is_sweep, read_sweep
from penteract.measure.bench.cases.sweep_question import ExplicitCase, PlanQuestion, SweepQuestion
from penteract.measure.bench.sweep_run import make, settings_of
from penteract.measure.schemas.sweep_folder import SweepFolder

SMALL = ("batch.sequence_length=64", "batch.global_batch_size=8", "batch.micro_batch_size=1")
GRID = {"parallel.tp": (1, 2, 3), "parallel.zero": (0, 1)}
TINY = SweepQuestion(name="t", preset="tiny", words=SMALL, grid=GRID, ranks=4)


def test_a_grid_is_each_combination_that_breaks_no_rule() -> None:
    made = expand(TINY, Predictor())
    assert [one.case.name for one in made.cases] == ["001_tp1_zero0", "002_tp1_zero1", "003_tp2_zero0", "004_tp2_zero1"]
    assert [name for name, _ in made.refused] == ["tp3_zero0", "tp3_zero1"] and all(why for _, why in made.refused)
    assert {one.case.ranks for one in made.cases} == {4} and made.cases[2].run.run.layout.dp == 2
    assert made.cases[3].case.varied == {"parallel.tp": 2, "parallel.zero": 1}
    with pytest.raises(BadInput, match="each combination of the grid breaks a rule"):
        expand(replace(TINY, grid={"parallel.tp": (3,)}), Predictor())
    with pytest.raises(BadInput, match="more cases than a sweep holds"):
        expand(replace(TINY, grid={"training.seed": tuple(range(10_001))}), Predictor())


def test_a_combination_that_is_the_program_of_an_earlier_one_is_no_case() -> None:
    """ZeRO 1 where no two ranks hold the same parameters; under tensor parallelism norms are on all, and sharded."""
    asked = replace(TINY, ranks=2, grid={"parallel.pp": (1, 2), "parallel.tp": (1, 2), "parallel.zero": (0, 1)})
    made = expand(asked, Predictor())
    assert [one.case.name for one in made.cases] == [
        "001_pp1_tp1_zero0", "002_pp1_tp1_zero1", "003_pp1_tp2_zero0", "004_pp1_tp2_zero1", "005_pp2_tp1_zero0",
    ]  # fmt: skip
    same = "the same program as 005_pp2_tp1_zero0"
    assert [one for one in made.refused if "same" in one[1]] == [("pp2_tp1_zero1", same)]
    tied = replace(asked, words=(*SMALL, "model.tied=true"), grid={"parallel.pp": (2,), "parallel.zero": (0, 1)})
    assert len(expand(tied, Predictor()).cases) == 2  # both stages hold the table


def test_what_is_said_twice_or_chooses_another_kernel_is_a_case() -> None:
    twice = replace(TINY, grid={"parallel.tp": (2, 2)})
    kernels = replace(TINY, grid={"kernels.attention": ("reference", "flash")}, words=(*SMALL, "precision.dtype=bf16"))
    written = tuple(ExplicitCase(values={"parallel.zero": zero}, limit=None) for zero in (0, 1))
    for asked in (twice, kernels, replace(TINY, ranks=1, grid={}, cases=written)):
        assert len(expand(asked, Predictor()).cases) == 2


def test_a_written_case_that_breaks_a_rule_is_refused_by_number() -> None:
    cases = (ExplicitCase(values={"parallel.pp": 2}, limit=5.0), ExplicitCase(values={"parallel.tp": 3}))
    with pytest.raises(BadInput, match="case 2:"):
        expand(replace(TINY, grid={}, cases=cases), Predictor())
    (one,) = expand(replace(TINY, grid={}, cases=cases[:1]), Predictor()).cases
    assert (one.case.origin, one.case.limit_s, one.case.name) == ("case", 5.0, "001_pp2")


def test_a_run_is_written_in_full(tmp_path: Path) -> None:
    made = expand(TINY, Predictor())
    folder = SweepFolder(tmp_path / "s")
    make(folder, settings_of(TINY, made, ""), made)
    for one in made.cases:
        assert resolve(folder.case(one.case.name).run_file, "").run == one.run.run
        assert folder.case(one.case.name).case() == one.case


def test_whether_a_sweep_is_of_cpus_is_known_before_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no GPU is here, it is, unless it names GPUs or runs as jobs of nodes that are not asked."""
    made = expand(TINY, Predictor())
    (tmp_path / "driver").touch()
    for driver, on_cpus in ((tmp_path / "none", True), (tmp_path / "driver", False)):
        monkeypatch.setattr(sweep_run, "DRIVER", driver)
        assert (
            settings_of(TINY, made, "").on_cpus == settings_of(replace(TINY, gpus="here"), made, "").on_cpus == on_cpus
        )
        assert not settings_of(replace(TINY, gpus="4xH100"), made, "").on_cpus
        assert not settings_of(TINY, made, "", "slurm").on_cpus
        chosen = replace(TINY, words=(*SMALL, "precision.device=cpu"))
        assert settings_of(chosen, expand(chosen, Predictor()), "", "slurm").on_cpus


def test_a_plans_kernels_are_those_of_the_packages_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed here, named, or in a container, of which nobody knows."""

    def attention(packages: str = "", *words: str) -> str:
        asked = PlanQuestion(model="llama-3.2-1b", gpus="1xH200", batch="8seqs", top=1, packages=packages)
        (case,) = cases_of_jobs(SweepQuestion(name="p", plan=asked), words).cases
        return case.run.run.layout.attention

    monkeypatch.setattr("penteract.measure.bench.cases.sweep_cases.packages_here", lambda: PACKAGES)
    assert attention() == "fa4"
    assert attention("none") == "cudnn" == attention("", "slurm.container=image.sqsh")
    assert attention("flash-attn-4", "slurm.container=image.sqsh") == "fa4"


def test_predictions_are_the_plans(tmp_path: Path) -> None:
    asked = SweepQuestion(name="p", plan=PlanQuestion(model="llama-3.2-1b", gpus="4xH200", batch="16seqs", top=3))
    made = expand(asked, Predictor(cluster("4xH200")))
    planned = plan("llama-3.2-1b", "4xH200", batch="16seqs", top=3, packages=packages_here())
    assert len(made.cases) == 3
    for one, timed in zip(made.cases, planned.layouts, strict=True):
        predicted = one.case.predicted
        assert one.run.run.layout == timed.layout
        assert predicted.step_s == timed.time.seconds and predicted.allocated_bytes == timed.estimate.allocated
        assert predicted.tokens_per_s_per_gpu == planned.rate(timed) and predicted.usable_bytes == planned.ask.usable
        assert predicted.mfu is not None and 0.2 < predicted.mfu < 1
        settings = settings_of(asked, made, "")
        assert gpu_seconds(one.case, settings) == pytest.approx(4 * (30 + 13 * timed.time.seconds))


def test_what_does_not_fit_is_skipped_by_name(tmp_path: Path) -> None:
    asked = replace(TINY, grid={"parallel.tp": (1, 2)})
    made = expand(asked, Predictor(room=lambda run: 2**22 * run.layout.tp**3))
    folder = SweepFolder(tmp_path / "s")
    make(folder, settings_of(asked, made, ""), made)
    one, two = folder.read().rows
    assert (one.status.state, two.status.state) == ("skipped", "pending")
    assert one.status.error is not None and one.status.error["allowed"] == "4.00 MiB"


def test_a_device_without_such_products_has_memory_alone() -> None:
    asked = replace(TINY, grid={"precision.dtype": ("fp8_tensorwise",)}, words=(*SMALL, "model.vocab_size=512"))
    (one,) = expand(asked, Predictor(cluster("4xA100-80GB"))).cases
    assert one.case.predicted.step_s is None and one.case.predicted.allocated_bytes
    assert one.case.predicted.basis.startswith("memory alone: ")


FILE = """
name = "both"
run = "base.toml"
gpus = "4xH200"
steps = 12
limit = 60
budget = 30
data = "run"
[set]
batch.global_batch_size = 64
memory.recompute = ["swiglu"]
[grid]
parallel.tp = [1, 2]
"parallel.zero" = [0, 1]
[[case]]
parallel = {pp = 2}
limit = 5
"""


def test_a_sweeps_file(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text(FILE)
    asked = read_sweep(path)
    assert (asked.name, asked.run, asked.steps, asked.budget, asked.data) == (
        "both",
        str(tmp_path / "base.toml"),
        12,
        30.0,
        "run",
    )
    assert asked.words == ("batch.global_batch_size=64", 'memory.recompute=["swiglu"]')
    assert asked.grid == {"parallel.tp": (1, 2), "parallel.zero": (0, 1)}
    assert asked.cases == (ExplicitCase(values={"parallel.pp": 2}, limit=5.0),)
    assert is_sweep(path) and replace(asked, limit=1.0, budget=1.0).digest == asked.digest
    assert replace(asked, steps=10).digest != asked.digest
    before = asked.digest
    (tmp_path / "base.toml").write_text("[parallel]\ntp = 2\n")
    assert asked.digest != before and not is_sweep(tmp_path / "base.toml")
    path.write_text('[plan]\nmodel = "llama-3.2-1b"\ngpus = "4xH200"\ntop = 5\n')
    assert read_sweep(path).plan == PlanQuestion(model="llama-3.2-1b", gpus="4xH200", top=5)
    with pytest.raises(BadInput, match=r"the table \[plan\] says that"):
        question_of(str(path), options(gpus="8xH200"))
    path.write_text('[plan]\nmodel = "llama-3.2-1b"\ngpus = "ours.toml"\n')
    assert (found := read_sweep(path).plan) and found.gpus == str(tmp_path / "ours.toml")


@pytest.mark.parametrize(("text", "says"), [
    ("[grid", "TOML"), ("", "no cases"), ("stepz = 1\n[grid]\n", "did you mean steps"),
    ("[grid]\nparallel.tpp = [1]\n", "parallel.tpp"), ("[grid]\nparallel.tp = 2\n", "a list of values for each key"),
    ("[grid]\nparallel.tp = []\n", "a list of values"), ("grid = 1\n", "a table of keys"),
    ("case = 1\n", "cases are a list of tables"), ("[[case]]\nlimit = -1\n", "not a value"),
    ("[plan]\nmodel = 'a'\n", "a key is missing"), ("[plan]\nmodel='a'\ngpus='b'\n[grid]\n", "a plan's layouts"),
    ("ranks=2\n[plan]\nmodel='a'\ngpus='b'\n", "a plan's layouts"),
    ("run='a'\npreset='b'\n[[case]]\n", "starts from one place"), ("data='x'\n[[case]]\n", "random or run"),
    ("steps = 0\n[[case]]\n", "not a value"), ("[[case]]\nparallel.tp.x = 1\n", "parallel.tp.x"),
])  # fmt: skip
def test_what_a_file_may_not_say(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "s.toml"
    path.write_text(text)
    with pytest.raises(BadInput, match=says):
        read_sweep(path)


def options(*grid: str, words: tuple[str, ...] = (), top: int | None = None, **settings: object) -> SweepOptions:
    return SweepOptions(grid=grid, top=top, plan={}, settings=settings, words=words)


def test_options_make_the_same_questions(tmp_path: Path) -> None:
    asked = question_of("tiny", options("tp=1/2", "memory.recompute=none/full", words=SMALL, ranks=2, steps=20))
    assert asked.grid == {"parallel.tp": (1, 2), "memory.recompute": ("none", "full")}
    assert (asked.preset, asked.ranks, asked.steps, asked.words) == ("tiny", 2, 20, SMALL)
    asked = question_of("llama-3.2-1b", options(top=7, gpus="4xH200", headroom=0.1))
    assert asked.plan == PlanQuestion(model="llama-3.2-1b", gpus="4xH200", top=7, headroom=0.1)
    assert asked.name == "llama-3.2-1b"
    (tmp_path / "my.toml").write_text("")
    assert question_of(str(tmp_path / "my.toml"), options("tp=1/2")).name == "my"
    words = ["bench", "tiny", "--grid", "parallel.tp=1/2", "parallel.pp=2", "--batch.micro_batch_size", "1"]
    assert split_overrides(words) == (words[:4], ["parallel.pp=2", "--batch.micro_batch_size=1"])


@pytest.mark.parametrize(("target", "given", "says"), [
    ("tiny", options(), "one case is no sweep"), ("tiny", options("tp"), "a grid's key takes values"),
    ("tiny", options("tp=1", "parallel.tp=2"), "given twice"), ("tiny", options("tpp=1"), "unknown key"),
    ("tiny", options("tp=1/x"), "not a value"), ("tiny", options("tp=1", steps=0), "--steps"),
    ("llama-3.2-1b", options(top=3), "a plan needs a model and GPUs"), ("tiny", options("tp=1", limit=-1.0), "--limit"),
    ("a", options("tp=1", top=3, gpus="4xH200"), "a plan's layouts, or a grid"),
    ("a", options(top=3, gpus="4xH200", words=("parallel.tp=2",)), "taken as they are"),
])  # fmt: skip
def test_what_options_may_not_say(target: str, given: SweepOptions, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        question_of(target, given)


@pytest.mark.parametrize("words", [["slurm.partition=gpu"], ["--slurm.nodes", "2"], ["--usd-per-gpu-hour", "2"]])
def test_what_jobs_need_is_refused_where_there_are_none(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "tiny", "--grid", "tp=1/2", "--dry-run", *words]) == 2
    assert "only jobs of Slurm need that" in capsys.readouterr().err


def test_the_packages_of_kernels_are_named_and_those_of_other_gpus_no_case(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "llama-3.2-1b", "--grid", "kernels.attention=fa4/cudnn", "batch.global_batch_size=8", "--dry-run"]
    line = "Needs flash-attn-4 on the GPUs' hosts: pip install 'penteract[gpu]'\n"
    assert main([*words, "--gpus", "2xH200"]) == 0
    told = capsys.readouterr().out
    assert line in told and "2 cases to run" in told
    assert main([*words, "--gpus", "2xA100"]) == 0
    told = capsys.readouterr().out
    assert "not a case: attention-fa4: the attention kernel 'fa4' is for other GPUs, kernels.attention\n" in told
    assert line not in told and "1 case to run" in told
    assert main([*words[:2], "--top", "2", "--gpus", "2xA100", "--fix", "attention=fa4", "--dry-run"]) == 2
    assert "error[KERNEL]: the attention kernel 'fa4' is for other GPUs · --fix attention" in capsys.readouterr().err


def test_a_grid_of_words() -> None:
    assert read_grid(["reshard_after_step=true/false"]) == {"parallel.reshard_after_step": (True, False)}


def test_values_of_a_grid_that_are_joined_by_commas_get_their_fix() -> None:
    with pytest.raises(BadInput) as bad:
        read_grid(["tp=1,2"])
    assert (bad.value.found, bad.value.fix) == ('"1,2"', "--grid parallel.tp=1/2")


def test_random_samples_fill_their_sequences() -> None:
    """So a kernel that takes whole sequences alone is no fault of a case."""
    packed = [
        one.run.run.data.pack_documents
        for data in ("random", "run")
        for one in expand(replace(TINY, data=data, grid={"parallel.tp": (1,)}), Predictor()).cases
    ]
    assert packed == [False, True]
    own = replace(TINY, words=(*SMALL, "data.pack_documents=true"), grid={"parallel.tp": (1,)})
    assert expand(own, Predictor()).cases[0].run.run.data.pack_documents
