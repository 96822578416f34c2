"""`penteract report`: how far predictions are from what was measured."""

from __future__ import annotations

from os.path import relpath
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from penteract.errors import BadInput, DiskFailure
from penteract.measure.report.accuracy_page import accuracy_page, plots, summary_line
from penteract.measure.report.accuracy_record import AccuracyRecord
from penteract.measure.report.accuracy_row import AccuracyRow, baseline_of, worse_than
from penteract.measure.report.own_pages import refuse_foreign
from penteract.measure.report.own_records import own_rows
from penteract.measure.report.published_sets import published_errors
from penteract.measure.report.sweep_rows import sweep_rows
from penteract.planner.report.trace import check_file
from penteract.units import printable

EXAMPLES = (
    "penteract report",
    "penteract report --sweeps my-sweep --out mine.md --record mine.json",
    "penteract report --published ../shared/data",
)


def report(
    *,
    records: Annotated[Path, Parameter(help="The folder of records, in a checkout of the repository.")] = Path(
        "benchmarks/results"
    ),
    sweeps: Annotated[
        tuple[Path, ...], Parameter(help="Folders of sweeps of `penteract bench` to read, too.", consume_multiple=True)
    ] = (),
    published: Annotated[
        Path | None,
        Parameter(help="A folder of published measurements of other projects: only the errors of each set are kept."),
    ] = None,
    out: Annotated[Path, Parameter(help="The page to write; its plots are beside it.")] = Path("docs/accuracy.md"),
    record: Annotated[Path, Parameter(help="The file of each row's error: compared with, then written anew.")] = Path(
        "benchmarks/results/accuracy.json"
    ),
    debug: Annotated[bool, Parameter(negative="", help="Show the traceback of an error.")] = False,
) -> int:
    """Write a page of predicted against measured memory and step time, of every row that was recorded.

    Today's planner plans each row again. Rows that are predicted worse than in --record are named. A page that a report
    wrote is written anew; another file is never overwritten.
    """
    if out.suffix != ".md":
        raise BadInput("USAGE", "the page is Markdown", where="--out", found=printable(str(out)), allowed="*.md")
    if out.is_file():  # before rows are planned, which takes a while
        refuse_foreign(out)
    before = AccuracyRecord.read(record)
    rows = [*own_rows(records), *(row for folder in sweeps for row in sweep_rows(folder))]
    if not rows:
        raise BadInput("RECORDS", "nothing that was measured", where=f"--records {printable(str(records))}",
                       found="no record of penteract's, and no case of a sweep that is done",
                       fix="run it in a checkout, or name --sweeps FOLDER")  # fmt: skip
    sets = published_errors(published) if published else before.published if before else {}
    made = AccuracyRecord.of_json(AccuracyRecord(rows=tuple(rows), published=sets).to_json())  # the page is the file's
    worse = worse_than(baseline_of(before.rows), rows) if before else []
    texts = {out: accuracy_page(made, out.stem, Path(relpath(record, out.parent)).as_posix()), record: made.to_json()}
    texts |= {out.with_name(f"{out.stem}_{quantity}.svg"): svg for quantity, svg in plots(made).items()}
    for path in texts:
        if not path.exists() or path.is_dir():
            check_file(path, "--record" if path == record else "--out")
        elif path != record:
            refuse_foreign(path)
    for path, text in texts.items():
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise DiskFailure.of(error, path) from None
    _print(rows, worse, made, out)
    return 0


def _print(rows: list[AccuracyRow], worse: list[str], made: AccuracyRecord, out: Path) -> None:
    same = [row for row in rows if row.same_program]
    print(f"{out}: {len(rows)} rows" + (f". {summary_line(made)}" if same else ""))
    if worse:
        print(f"{len(worse)} errors have grown:", *worse, sep="\n  ")
