"""A profile as one HTML file without scripts: the verdict and the timelines as SVG, everything else as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from penteract.measure.profile.show.pictures import COLOURS, timelines, waterfall_picture
from penteract.measure.profile.show.profile_text import price_of, show
from penteract.measure.schemas.profile import MeasuredMemory, OpRow, ProfileFile
from penteract.measure.schemas.profile_parts import LABELS
from penteract.units import show_bytes, show_flops

_STYLE = """
:root { --ink: #1c2430; --soft: #5b6675; --line: #dfe4ea; --paper: #fff; --band: #f5f7f9; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ee; --soft: #9aa4b2; --line: #333c48; --paper: #14181d; --band: #1b2027; } }
body { margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; }
p { margin: .4rem 0; } .soft { color: var(--soft); } svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; } svg .soft { fill: var(--soft); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { padding: .2rem .5rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { color: var(--soft); font-weight: 500; } th:first-child, td:first-child { text-align: left; }
td.name { text-align: left; font-family: ui-monospace, monospace; font-size: 12px; white-space: normal; }
tr:nth-child(even) td { background: var(--band); } .mark { color: #b3541e; } .wide { overflow-x: auto; }
.key { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em; border-radius: 2px; }
details summary { cursor: pointer; color: var(--soft); }
"""


def page(profile: ProfileFile) -> str:
    """The whole file."""
    body = "\n".join(_body(profile))
    title = escape(f"Profile of {profile['run']['model']}")
    return (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
            f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n'
            f"<body>\n{body}\n</body></html>\n")  # fmt: skip


def _body(profile: ProfileFile) -> Iterator[str]:
    run, made, step = profile["run"], profile["made"], profile["step"]
    yield f"<h1>{escape(run['model'])}: {show(step['measured'])} a step</h1>"
    tokens = f"{run['tokens']:,} tokens in sequences of {run['sequence_length']}".replace(",", " ")
    about = [
        run["text"],
        f"{run['world']} rank{'s' * (run['world'] != 1)}",
        tokens,
        run["precision"],
        made["device"],
        made["date"],
        f"torch {made['torch']}",
    ]
    yield f'<p class="soft">{escape(" · ".join(about))}</p>'
    least, most = show(min(step["bare"])), show(max(step["bare"]))
    basis, slower = escape(profile["basis"]["about"]), f"{step['slowdown']:.2f}"
    count = len(step["bare"])
    yield (f"<p>Median of {count} bare steps, {least} to {most}; under the profiler {slower} times as long."
           f" Predicted {show(step['predicted'])}, from {basis}.</p>")  # fmt: skip
    yield "<h2>Verdict</h2>"
    yield waterfall_picture(profile["waterfall"])
    yield _advice(profile)
    if timeline := profile.get("timeline"):
        yield "<h2>Timeline of a step</h2>"
        yield _legend()
        yield timelines(profile, timeline)
    yield "<h2>Ops in the order of a step</h2>"
    ceilings, found = profile["basis"]["ceilings"], profile["unmatched"]
    product, copy = show_flops(round(ceilings["product"])), ceilings["copy"] / 1e9
    yield (f'<p class="soft">Ceilings, measured here: products of {escape(ceilings["dtype"])} {product}/s, copies '
           f"{copy:,.0f} GB/s. Unmatched: {found['measured_share']:.1%} of the measured step, "
           f"{found['predicted_share']:.1%} of the predicted one.</p>")  # fmt: skip
    for pp_rank in sorted({row["pp_rank"] for row in profile["ops"]}):
        yield _ops([row for row in profile["ops"] if row["pp_rank"] == pp_rank])
    yield "<h2>Ranks</h2>"
    yield _ranks(profile)
    yield "<h2>Memory</h2>"
    yield _memory(profile["memory"])


def _advice(profile: ProfileFile) -> str:
    rows = [
        [escape(one["what"]), show(one["gain"]), f"{one['gain'] / profile['step']['measured']:.1%}",
         escape(price_of(one))]
        for one in profile["advice"]
    ]  # fmt: skip
    return table(["What would gain", "of a step", "share", ""], rows, names=(0, 3)) if rows else ""


def _legend() -> str:
    keys = (f'<span class="key" style="background:{c}"></span>{escape(LABELS[part])}' for part, c in COLOURS.items())
    return f'<p class="soft">{"".join(keys)}</p>'


def _ops(rows: Sequence[OpRow]) -> str:
    marks = {"both": "", "predicted": "not measured", "measured": "not predicted"}
    cells = [
        [escape(row["name"]), escape(row["stream"]), str(row["calls"]), show(row["predicted"]), show(row["measured"]),
         f"{row['share']:.1%}", f"{row['reached']:.0%} of {row['ceiling']}" if row["reached"] else "",
         f"{show(row['least'])} to {show(row['most'])}" if row["least"] < row["most"] else "",
         f'<span class="mark">{marks[row["matched"]]}</span>', _kernels(row)]
        for row in rows
    ]  # fmt: skip
    head = ["op", "stream", "calls", "predicted", "measured", "share", "ceiling", "ranks", "", "kernels"]
    return (f"<p>Pipeline rank {rows[0]['pp_rank']}, on rank {rows[0]['rank']}: the one with the most work</p>"
            + table(head, cells, names=(0, 1, 9)))  # fmt: skip


def _kernels(row: OpRow) -> str:
    if not row["kernels"]:
        return ""
    inside = "<br>".join(f"{k['calls']} {escape(k['name'])} {show(k['picoseconds'])}" for k in row["kernels"])
    return f"<details><summary>{len(row['kernels'])}</summary>{inside}</details>"


def _ranks(profile: ProfileFile) -> str:
    parts = [part for part in LABELS if any(row["parts"].get(part) for row in profile["ranks"])]
    rows = [
        [f"rank {row['rank']}, pipeline rank {row['pp_rank']}", show(row["work"]), show(row["waits"]),
         *(show(row["parts"].get(part, 0)) for part in parts)]
        for row in profile["ranks"]
    ]  # fmt: skip
    return table(["profiled steps", "works", "waits", *(LABELS[part] for part in parts)], rows)


def _memory(memory: Sequence[MeasuredMemory]) -> str:
    owners = list(dict.fromkeys(owner for row in memory for owner in (*row["owners"], *row["process"])))
    rows = [
        [f"rank {row['rank']}", show_bytes(row["peak"]), show_bytes(row["predicted"]),
         *(show_bytes({**row["owners"], **row["process"]}.get(owner, 0)) for owner in owners), escape(row["at"])]
        for row in memory
    ]  # fmt: skip
    fullest = max(memory, key=lambda row: row["peak"])
    live = [[escape(row["name"]), str(row["count"]), show_bytes(row["bytes"])] for row in fullest["live"]]
    about = ("storages that torch's dispatcher handed out, counted" if fullest["basis"] == "storages"
             else "the history of torch's allocator")  # fmt: skip
    return (f'<p class="soft">By {about}: here each tensor has memory of its own, to see its owner. '
            'A run puts all into one planned block, with gaps: that is what train reports.</p>'
            + table(["", "peak", "planned", *map(escape, owners), "at"], rows, names=(len(owners) + 3,))
            + f"<p>Registers alive at the peak of rank {fullest['rank']}</p>"
            + table(["made by", "count", "bytes"], live, names=(0,)))  # fmt: skip


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, names: Sequence[int] = ()) -> str:
    """A table of cells that are HTML already. `names`: columns of text."""
    first = "".join(f"<th>{cell}</th>" for cell in head)
    kinds = [' class="name"' if i in names else "" for i in range(len(head))]
    body = "\n".join(
        "<tr>" + "".join(f"<td{kind}>{cell}</td>" for kind, cell in zip(kinds, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{first}</tr></thead><tbody>\n{body}\n</tbody></table></div>'
