"""What is read from a sweep: the ranking, the plan's verdict, tables, heat maps, and which of two is slower."""

from __future__ import annotations

import csv
import io
import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import product
from math import log
from pathlib import Path
from random import Random
from statistics import median

import pytest

from measured_sweeps import GIB, case, result, row, sweep
from penteract.cli.app import main
from penteract.cli.benching.sweep_tables import ranked, show, unfinished
from penteract.errors import BadInput
from penteract.measure.bench.alternated import make_pairs, pairs_of
from penteract.measure.results.colour_scale import colour, luminance
from penteract.measure.results.comparison import compare, judge_pairs, pair
from penteract.measure.results.csv_rows import to_csv
from penteract.measure.results.heat_map import heat_map
from penteract.measure.results.heat_map_svg import to_svg
from penteract.measure.results.ranking import numbers_of, rank, verdict
from penteract.measure.results.signed_rank import least_pairs, signed_rank
from penteract.measure.schemas.sweep import CaseStatus, Sweep
from penteract.measure.schemas.sweep_folder import SweepFolder

GOOD = sweep(
    row(case(1, dp=8, step_s=1.0), [1.3] * 10, mfu=0.41),  # the plan's first, 30 % slower than planned
    row(case(2, dp=4, tp=2, step_s=1.1), [1.0] * 10, mfu=0.5),  # the best
    row(case(3, dp=2, tp=2, pp=2, step_s=1.2), [1.25] * 10, mfu=0.4),
    row(case(4, dp=1, tp=8, step_s=2.0), state="out of memory"),
    row(case(5, dp=1, tp=4, pp=2, step_s=0.1), [0.1] * 10, void="the loss is not finite at step 2"),
    row(case(6, dp=2, tp=4, step_s=1.5), state="skipped"),
)


def test_cases_are_ranked_by_what_was_measured() -> None:
    rows = rank(numbers_of(GOOD))
    assert [(int(r.case.name), r.place, r.planned, r.right) for r in rows] == [
        (2, 1, 2, True), (3, 2, 3, True), (1, 3, 1, False)
    ]  # fmt: skip
    assert rows[2].time_error == pytest.approx(0.3 / 1.3) and rows[0].memory_error == pytest.approx(1 / 11)
    found = verdict(rows)
    assert found is not None and (found.first, found.best, found.right, found.predicted) == ("001", "002", 2, 3)
    assert found.regret == pytest.approx(1 - 1 / 1.3) and found.best_in_first
    assert found.time is not None and found.time[1] == pytest.approx(0.3 / 1.3)
    assert verdict([]) is None


def test_what_is_left_of_a_sweep_is_listed_with_about_what_it_costs(capsys: pytest.CaptureFixture[str]) -> None:
    ended = row(case(1, dp=2, step_s=1.0), [1.3] * 10)
    left = sweep(ended, row(case(2, tp=2, step_s=9.0), state="pending"), budget=5.0)
    show(*unfinished(left))
    counted, names, only, cost = capsys.readouterr().out.splitlines()
    assert counted == "a sweep: 2 cases: 1 done, 1 pending · 2.0 GPU-minutes" and "GPU-min" in names
    assert only.split()[:2] == ["2", "002"]
    assert cost == "1 case to run, 3 + 10 steps each: about 8.0 GPU-minutes of a budget of 5, with 30 s a start"
    unknown = sweep(row(replace(case(1), predicted=replace(case(1).predicted, step_s=None)), state="pending"))
    show(*unfinished(replace(unknown, settings=replace(unknown.settings, on_cpus=True))))
    told = capsys.readouterr().out
    assert "about 0.4 process-minutes, for starts alone, 3 s each: steps are not predicted" in told
    assert "GPU" not in told
    show(*unfinished(sweep(ended)))
    assert capsys.readouterr().out.splitlines()[1:] == ["0 cases to run"]


def test_a_case_within_the_spread_of_a_faster_one_is_tied_with_it() -> None:
    noisy = [0.95, *[1.0] * 7, 1.05, 1.05]
    rows = rank(numbers_of(sweep(
        row(case(1), [s * 1.04 for s in noisy]), row(case(2), noisy), row(case(3), [s * 1.12 for s in noisy]),
        row(case(4), [s * 1.16 for s in noisy]), row(case(5), [2.0] * 10), row(case(6), [2.001] * 10),
    )))  # fmt: skip
    assert [(int(r.case.name), r.place, r.tied) for r in rows] == [
        (2, 1, 1), (1, 2, 1), (3, 3, 3), (4, 4, 3), (5, 5, 5), (6, 6, 6)
    ]  # fmt: skip


def test_a_case_of_wild_steps_ties_with_none_and_is_not_ranked(capsys: pytest.CaptureFixture[str]) -> None:
    """A third slower is no noise because of one case of three steps."""
    wild = row(case(1, step_s=1.0), [0.9, 1.0, 2.0])
    found = sweep(wild, row(case(2, step_s=1.1), [1.0] * 10), row(case(3, step_s=1.2), [1.36, 1.36, 1.37]))
    rows = rank(numbers_of(found))
    assert [(int(r.case.name), r.tied, r.vague) for r in rows] == [(2, 1, False), (3, 2, False), (1, 3, True)]
    said = verdict(rows)
    assert said is not None and (said.best, said.first, said.regret) == ("002", "002", 0.0)
    show(*ranked(found, rows))
    out = capsys.readouterr().out
    assert "1=" not in out and "that is noise" not in out and out.count("too few steps to rank") == 1
    alike = rank(numbers_of(sweep(wild, row(case(2), [1.05] * 10))))
    assert [(r.tied, r.vague) for r in alike] == [(1, False), (1, False)]


def test_a_table_says_what_is_noise_and_has_no_empty_column(capsys: pytest.CaptureFixture[str]) -> None:
    cpu = sweep(row(case(1, step_s=None), [1.0, 0.9, 1.1] * 4), row(case(2, step_s=None), [1.01, 0.9, 1.1] * 4))
    show(*ranked(cpu, rank(numbers_of(cpu))))
    head, first, second, legend = capsys.readouterr().out.splitlines()
    assert head.split() == ["#", "case", "layout", "tok/s/GPU", "step", "spread", "memory", "planned", "error"]
    assert (first.split()[0], second.split()[0]) == ("1", "1=")
    assert legend == "A number with = is slower than the case of that number by less than their spread: that is noise"
    show(*ranked(GOOD, rank(numbers_of(GOOD))))
    out = capsys.readouterr().out
    assert "MFU" in out and "plan's #" in out and legend not in out


def test_what_was_not_predicted_is_not_judged() -> None:
    found = verdict(rank(numbers_of(sweep(row(case(1, step_s=None), [1.0] * 10)))))
    assert found is not None and (found.regret, found.best_in_first, found.time, found.predicted) == (
        None,
        None,
        None,
        0,
    )


def test_a_best_outside_of_the_first_three_is_said() -> None:
    slow = [row(case(n, dp=n, step_s=n / 10), [2.0] * 10) for n in (1, 2, 3)]
    found = verdict(rank(numbers_of(sweep(*slow, row(case(9, dp=9, step_s=5.0), [1.0] * 10)))))
    assert found is not None and found.best_in_first is False and found.regret == pytest.approx(0.5)


def test_a_line_a_case() -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(GOOD))))
    assert [r["case"] for r in rows] == [f"00{n}" for n in range(1, 7)]
    assert (rows[0]["dp"], rows[0]["step_s"], rows[0]["mfu"], rows[0]["error"]) == ("8", "1.3", "0.41", "")
    assert (rows[3]["state"], rows[3]["step_s"], rows[3]["error"]) == ("out of memory", "", "it broke")
    assert rows[4]["void"] and float(rows[0]["allocated_bytes"]) == 11 * GIB
    assert len({len(r) for r in rows}) == 1 and None not in rows[3]


def test_a_cell_is_the_fastest_case_of_its_mesh() -> None:
    maps = heat_map(sweep(*GOOD.rows, row(case(7, dp=8), [1.1] * 10, mfu=0.45), row(case(8, dp=8), state="failed")))
    assert (maps.pp, maps.dp, maps.tp) == ((1, 2), (1, 2, 4, 8), (1, 2, 4, 8))
    cell = maps.cells[1, 8, 1]
    assert (cell.row.case.number, cell.others, cell.values["MFU, %"]) == (7, 2, 45.0)
    words = {mesh: cell.word for mesh, cell in maps.cells.items() if cell.word}
    assert words == {(1, 1, 8): "OOM", (2, 1, 4): "void", (1, 2, 4): "too big"}
    assert heat_map(sweep(row(case(1), state="lost"))).metrics == ("tokens/s per GPU",)


def test_the_picture_has_each_number_and_each_word() -> None:
    maps = heat_map(GOOD)
    root = ET.fromstring(to_svg(maps))
    texts = [e.text for e in root.iter() if e.tag.endswith("text")]
    for text in ("tokens/s per GPU", "memory, GiB", "MFU, %", "128", "98.5", "50", "OOM", "void", "pp = 2", "tp = 8"):
        assert text in texts, text
    cells = [e for e in root.iter() if e.tag.endswith("}g")]
    assert len(cells) == 3 * len(GOOD.rows)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for e in root.iter():
        if "x" in e.attrib:
            assert 0 <= float(e.attrib["x"]) <= width and 0 <= float(e.attrib["y"]) <= height
    assert all(luminance(colour(n / 50)) < luminance(colour((n + 1) / 50)) for n in range(50))


@pytest.mark.parametrize("n", [1, 3, 6, 9])
def test_signed_ranks_count_all_signs(n: int) -> None:
    draw = Random(n)
    values = [draw.gauss(0.3, 1.0) for _ in range(n)]
    order = sorted(range(n), key=lambda i: abs(values[i]))
    ranks = {i: place for place, i in enumerate(order, 1)}
    seen = sum(ranks[i] for i in range(n) if values[i] > 0)
    sums = [
        sum(r for r, sign in zip(range(1, n + 1), signs, strict=True) if sign) for signs in product((0, 1), repeat=n)
    ]
    found = signed_rank(values)
    assert found.p_above == sum(s >= seen for s in sums) / 2**n
    assert found.p_below == sum(s <= seen for s in sums) / 2**n
    means = sorted((a + b) / 2 for i, a in enumerate(values) for b in values[i:])
    assert found.middle == median(means) and found.low <= found.middle <= found.high


@pytest.mark.parametrize(
    ("values", "above"),
    [([1, 2, 3, 4, 0], 2 / 32), ([1, -1], 3 / 4), ([1, 1, 1, 1, 1, -1], 7 / 64), ([2, 2, 3, 4, 5], 1 / 32)],
)
def test_a_chance_is_never_told_as_smaller_than_it_is(values: list[float], above: float) -> None:
    """Of ties and zeros, by hand: a zero adds half of its rank whatever the signs, ties share theirs."""
    assert signed_rank(values).p_above == above
    assert signed_rank([-value for value in values]).p_below == above


def test_an_interval_holds_the_truth_as_often_as_it_says() -> None:
    draw, held, n = Random(5), 0, 400
    for _ in range(n):
        found = signed_rank([draw.gauss(0.2, 1.0) for _ in range(10)])
        assert found.confidence >= 0.95
        held += found.low <= 0.2 <= found.high
    assert 0.93 <= held / n <= 0.99


def _many(factor: float, noise: float, seed: int, cases: int = 8) -> Sweep:
    draw = Random(seed)
    return sweep(*(row(case(n, dp=n), [factor * n * (1 + noise * draw.gauss(0, 1)) for _ in range(10)])
                   for n in range(1, cases + 1)))  # fmt: skip


def test_slower_is_told_from_noise() -> None:
    before = _many(1.0, 0.01, 1)
    slower = compare(before, _many(1.05, 0.01, 2))
    assert (slower.verdict, slower.of, len(slower.pairs)) == ("slower", "cases", 8)
    assert slower.low > 1.03 and slower.high < 1.07 and "95%" in slower.line and "8 pairs of cases" in slower.line
    assert "noise: no difference is shown at 95% confidence; the second looks as fast, " in compare(before, before).line
    assert "slower: the second takes 15 times as long at 95% confidence" in compare(before, _many(15.0, 0.01, 2)).line
    assert compare(before, _many(0.95, 0.01, 3)).verdict == "faster"
    wrong = sum(compare(_many(1.0, 0.02, 2 * n), _many(1.0, 0.02, 2 * n + 1)).verdict == "slower" for n in range(200))
    assert wrong <= 0.08 * 200  # 5 % are allowed


def test_of_few_cases_steps_are_compared_and_that_is_said() -> None:
    found = compare(_many(1.0, 0.01, 1, cases=2), _many(1.1, 0.01, 2, cases=2))
    assert (found.verdict, found.of, found.number, found.needed) == ("slower", "steps", 20, 5)
    assert "steps" in found.line and least_pairs(0.99) == 7


def test_only_what_both_have_is_compared() -> None:
    before, after = _many(1.0, 0.01, 1), _many(1.0, 0.01, 2, cases=6)
    broken = sweep(*after.rows[1:], row(case(1, dp=1), state="failed"))
    found = compare(before, broken)
    assert len(found.pairs) == 5 and set(found.missing) == {"001", "007", "008"}
    with pytest.raises(BadInput, match="no measured case in common"):
        compare(before, sweep(row(case(1, dp=99), [1.0] * 10)))


def test_pairs_are_what_they_are_given_as() -> None:
    one, other = (row(case(n, dp=n), [1.0 + n / 10] * 10) for n in (1, 2))
    found = judge_pairs([pair(one, other)] * 5)
    assert found.verdict == "slower" and found.middle == pytest.approx(1.2 / 1.1) and found.p_slower == 1 / 32
    assert log(found.low) == pytest.approx(log(1.2 / 1.1))


def test_steps_of_unlike_ranks_are_compared_by_gpu() -> None:
    """Half of the GPUs at the same step is twice the speed of a GPU, by cases and by steps."""
    both = pair(row(case(1, ranks=8), [1.0] * 10), row(case(1, ranks=4), [1.0] * 10))
    found = judge_pairs([both])
    assert found.of == "steps" and both.slower == 0.5 and found.middle == pytest.approx(0.5)


def test_keys_that_vary_beside_the_layout_are_held_apart() -> None:
    """Of two optimizers on one layout, each failed in one sweep: nothing pairs one with the other."""
    kinds = [replace(case(n, dp=2), varied={"optimizer.name": name}) for n, name in ((1, "adamw"), (2, "muon"))]
    third = replace(case(3, dp=4), varied={"optimizer.name": "adamw"})
    before = sweep(row(kinds[0], [1.0] * 10), row(kinds[1], state="failed"), row(third, [1.0] * 10))
    after = sweep(row(kinds[0], state="failed"), row(kinds[1], [5.0] * 10), row(third, [1.0] * 10))
    found = compare(before, after)
    assert [p.first.case.name for p in found.pairs] == ["003"] and found.verdict == "noise"


def test_pairs_again_in_turns_are_of_these_sweeps_and_no_others(tmp_path: Path) -> None:
    one, other = (SweepFolder(tmp_path / name / "s") for name in "ab")
    for folder in (one, other):
        made = sweep(row(case(1, dp=8), [1.0] * 10))
        folder.case("001").make(made.rows[0].case, "")
        folder.write_settings(made.settings)
    pairs = compare(GOOD, GOOD).pairs[:1]
    turns = SweepFolder(tmp_path / "turns")
    make_pairs(turns, one, other, pairs, 2)
    names = turns.settings().cases
    assert names == ("001_001a", "001_001b", "001_002b", "001_002a")
    make_pairs(turns, one, other, pairs, 2)
    for second, count in ((other, 3), (one, 2)):
        with pytest.raises(BadInput, match="the folder holds other pairs"):
            make_pairs(turns, one, second, pairs, count)
    rows = [row(replace(case(n), name=name), [1.0 + n] * 10) for n, name in enumerate(names)]
    rows += [row(replace(case(9), name=f"1000_001{side}"), [1.0] * 10) for side in "ab"]
    found, missing = pairs_of(sweep(*rows))
    assert [p.slower for p in found] == [2.0, 3.0 / 4.0, 1.0] and not missing


def test_a_sweep_is_not_compared_with_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = SweepFolder(tmp_path / "one")
    made = sweep(row(case(1, dp=8), [1.0] * 10))
    folder.case("001").make(made.rows[0].case, "")
    folder.write_settings(made.settings)
    assert main(["bench", "compare", str(folder.path), f"{tmp_path}/./one"]) == 2
    assert capsys.readouterr().err.startswith("error[COMPARE]: the same sweep twice · found ")


def test_pairs_that_were_run_are_told_as_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All has been run, so nothing starts: the second is slower, though the sweeps say that both are alike."""
    one, other, turns = (SweepFolder(tmp_path / name) for name in ("one", "other", "turns"))

    def fill(folder: SweepFolder, name: str, steps: float) -> None:
        at = folder.case(name)
        at.write_result(result([steps] * 10, at.case()))
        at.write_status(CaseStatus(state="done", attempt=1, counted=1))

    for folder in (one, other):
        made = sweep(row(case(1, dp=8), [1.0] * 10))
        folder.case("001").make(made.rows[0].case, "")
        folder.write_settings(made.settings)
        fill(folder, "001", 1.0)
    make_pairs(turns, one, other, compare(one.read(), other.read()).pairs, 5)
    words = ["bench", "compare", str(one.path), str(other.path), "--pairs", "5", "--out", str(turns.path), "--json"]
    for name in turns.settings().cases:
        turns.case(name).write_status(CaseStatus(state="failed", attempt=1, counted=1))
    assert main(words) == 2 and "no measured case in common" in capsys.readouterr().err
    for name in turns.settings().cases:
        fill(turns, name, 1.0 + name.endswith("b"))
    assert main(words) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["of"], len(found["pairs"])) == ("slower", "cases", 5)
