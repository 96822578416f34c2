"""What `penteract bench` does with a sweep that there is: status, show, compare."""

from __future__ import annotations

import json as to_json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from penteract.cli.benching.running import as_dict, run_folder, show_ranking
from penteract.cli.benching.sweep_options import OUT
from penteract.cli.benching.sweep_progress import StopRequests, SweepProgress
from penteract.cli.benching.sweep_tables import counts, progress, show
from penteract.cli.resolve.planning.progress_line import on_a_terminal
from penteract.errors import BadInput, DiskFailure
from penteract.measure.bench.alternated import make_pairs, pairs_of
from penteract.measure.bench.sweep_run import runs_now
from penteract.measure.results.comparison import CONFIDENCE, SweepComparison, compare, judge_pairs
from penteract.measure.results.csv_rows import to_csv
from penteract.measure.results.heat_map import heat_map
from penteract.measure.results.heat_map_svg import to_svg
from penteract.measure.schemas.sweep_folder import SweepFolder
from penteract.planner.report.trace import check_file
from penteract.units import LARGE_FACTOR

_REFRESH_S = 1.0


def status(
    folder: Annotated[Path, Parameter(help="Of a sweep.")], /, *,
    json: Annotated[bool, Parameter(negative="", help="Print one JSON object, once.")] = False,
    once: Annotated[bool, Parameter(negative="", help="On a terminal too.")] = False,
) -> int:  # fmt: skip
    """Show how far a sweep is: on a terminal live, until it ends or Ctrl-C; elsewhere once."""
    sweep_folder = SweepFolder(folder)
    sweep = sweep_folder.read()
    if json:
        print(
            to_json.dumps(
                {"folder": str(folder), "running": runs_now(sweep_folder), "ended": sweep.ended, **asdict(sweep)}
            )
        )
        return 0
    if on_a_terminal() and not once:
        with StopRequests() as stop, SweepProgress(live=True) as line:
            while not sweep.ended and not stop.asked and runs_now(sweep_folder):
                line(sweep)
                time.sleep(_REFRESH_S)
                sweep = sweep_folder.read()
    show(progress(sweep), counts(sweep))
    if not sweep.ended:
        show(
            "it is running"
            if runs_now(sweep_folder)
            else f"no process of this host runs it: `penteract bench {folder}` goes on"
        )
    return 0


def show_results(
    folder: Annotated[Path, Parameter(help="Of a sweep.")], /, *,
    csv: Annotated[Path | None, Parameter(help="Write one line a case.")] = None,
    plot: Annotated[Path | None, Parameter(help="Write heat maps over dp, tp and pp, as SVG.")] = None,
    json: Annotated[bool, Parameter(negative="", help="Print one JSON object.")] = False,
) -> int:  # fmt: skip
    """Rank what was measured beside what was predicted, and say how good the plan was."""
    for path, flag in ((csv, "--csv"), (plot, "--plot")):
        if path is not None:
            check_file(path, flag)
    sweep = SweepFolder(folder).read()
    if csv is not None:
        _write(csv, to_csv(sweep))
    if plot is not None:
        _write(plot, to_svg(heat_map(sweep)))
    if json:
        print(to_json.dumps(as_dict(SweepFolder(folder), sweep)))
        return 0
    show_ranking(sweep)
    show("", counts(sweep))
    return 0


def compare_sweeps(
    first: Annotated[Path, Parameter(help="The folder of a sweep: before.")],
    second: Annotated[Path, Parameter(help="The folder of a sweep: after.")], /, *,
    pairs: Annotated[int | None, Parameter(help="Run each case so many times in both, in turns: A B B A.")] = None,
    confidence: Annotated[float, Parameter(help="Of the answer.")] = CONFIDENCE,
    out: Annotated[Path | None, Parameter(help="With --pairs: the folder of these runs.")] = None,
    json: Annotated[bool, Parameter(negative="", help="Print one JSON object.")] = False,
) -> int:  # fmt: skip
    """Say whether the second sweep is slower than the first, or whether it is noise.

    By Wilcoxon's signed ranks of the cases that both have. Exit codes: 1 slower, 0 not.
    """
    if not 0.5 < confidence < 1:
        raise BadInput("USAGE", "not a confidence", where="--confidence", found=confidence, allowed="over 0.5, below 1")
    if pairs is not None and not 1 <= pairs <= 200:
        raise BadInput("USAGE", "not a number of pairs", where="--pairs", found=pairs, allowed="1 to 200")
    one, other = SweepFolder(first), SweepFolder(second)
    if pairs is None and first.exists() and first.resolve() == second.resolve():
        fix = "name another; --pairs 5 runs each case again in turns, which shows how much is noise"
        raise BadInput("COMPARE", "the same sweep twice", found=f"{first} and {second}", fix=fix)
    found = compare(one.read(), other.read(), confidence)
    if pairs is not None:
        folder = SweepFolder(out or Path(OUT) / f"{first.name}-against-{second.name}")
        make_pairs(folder, one, other, found.pairs, pairs)
        if code := run_folder(folder, json=json, tell=not json):
            return code
        found = judge_pairs(*pairs_of(folder.read()), confidence)
    _show_comparison(found, json=json, again=pairs is None)
    return 1 if found.verdict == "slower" else 0


def _show_comparison(found: SweepComparison, *, json: bool, again: bool) -> None:
    if json:
        rows = [{"first": p.first.case.name, "second": p.second.case.name, "slower": p.slower} for p in found.pairs]
        print(to_json.dumps(asdict(found) | {"pairs": rows, "line": found.line}))
        return
    for p in found.pairs:
        change = f"{p.slower - 1:+.1%}" if p.slower < LARGE_FACTOR else f"{p.slower:.1f} times"
        show(f"{change:>10}  {p.second.case.name}  {p.second.case.layout_text}")
    if found.missing:
        show(f"not compared: {', '.join(found.missing[:8])}{', …' * (len(found.missing) > 8)}")
    show(found.line)
    if found.of == "steps":
        again_line = f"; --pairs {found.needed} runs them again in turns" if again else ""
        show(f"fewer than {found.needed} pairs of cases: this is noise within a run, not between runs{again_line}")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DiskFailure.of(error, path) from None
