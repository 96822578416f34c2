"""The explorer as files for any web server, under any path: the page, the planner's sources, and a Python for browsers.

In the page a worker runs the same answers as the server does. Those to the opening question are in the files, so that
they show at once; opened from a disk, where browsers load no modules, the page shows the first as a picture.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from html import escape
from pathlib import Path
from typing import Any

from penteract.errors import BadInput, DiskFailure, PenteractError
from penteract.explore.answering import answer
from penteract.explore.measured_sweeps.read_sweeps import SweepFolders, copied_files
from penteract.explore.schemas.page_schema import VERSION, Question
from penteract.explore.training_runs.read_profiles import ProfileFolders
from penteract.measure.schemas.profile import FILE

_PACKAGE = Path(__file__).parents[1]
_EXPLORE = Path(__file__).parent
# Of the sources: what needs more than the standard library.
_LEFT_OUT = (
    "engine", "cli", "slurm", "explore/server", "explore/assets", "explore/pyodide",
    *(f"measure/{room}" for room in ("bench", "calibrate", "profile", "rehearse", "report")),
)  # fmt: skip
# Answers that are made at export.
_FIRST = ("opening", "memory", "step", "fits", "schedule", "schedules", "search", "what_if", "compare", "ranks", "runs",
          "bench", "profile")  # fmt: skip
_POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; worker-src 'self'; base-uri 'none'; form-action 'none'"
)
SWEEPS, PROFILES = "sweeps", "profiles"  # in the archive of sources: the folders of an exported page
_DATE = (2000, 1, 1, 0, 0, 0)  # of files in the archive: the same export gives the same bytes


def export_site(
    folder: Path, opening: Question, sweeps: SweepFolders | None = None, profiles: ProfileFolders | None = None
) -> None:
    """Write the site into `folder`, which must not exist or be empty, with what is read of `sweeps` and `profiles`.

    Raises BadInput and DiskFailure."""
    data = (_data(sweeps) if sweeps else {}) | (_profiles(profiles) if profiles else {})
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput("FILE", "it exists already", where="--export", found=folder, fix="name a new or an empty folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copytree(_EXPLORE / "assets", folder / "assets", ignore=shutil.ignore_patterns("index.html"))
        shutil.copytree(_EXPLORE / "pyodide", folder / "pyodide")
        first = {kind: _rows(kind, opening, sweeps, profiles) for kind in _FIRST}
        (folder / "first.json").write_text(json.dumps(first), encoding="utf-8")
        (folder / "index.html").write_text(_page(first), encoding="utf-8")
        _write_sources(folder / "penteract.zip", data)
    except OSError as error:
        raise DiskFailure("DISK", error.strerror or "cannot be written", where=f"--export {folder}") from None


def _rows(kind: str, opening: Question, sweeps: SweepFolders | None, profiles: ProfileFolders | None) -> list[Any]:
    request = {"version": VERSION, "kind": kind, "question": opening, "pp_rank": None}
    rows = list(answer(request, opening, sweeps=sweeps, profiles=profiles))
    if rows and rows[0]["kind"] == "error":
        raise BadInput("EXPORT", "the opening layout cannot be shown", where="--layout", found=rows[0]["text"])
    return rows


def _data(sweeps: SweepFolders) -> dict[str, bytes]:
    """The files of the sweeps, by their path in the archive. Raises BadInput."""
    try:
        found = {f"{SWEEPS}/{name}": content for name, content in copied_files(sweeps)}
    except (OSError, PenteractError) as error:
        what = error.what if isinstance(error, PenteractError) else error.strerror or str(error)
        raise BadInput("FOLDER", "a sweep cannot be read", where="--sweeps", found=what) from None
    if not found:
        raise BadInput("FOLDER", "no sweep in it", where="--sweeps", found=sweeps.folder.name,
                       fix="name a folder of sweeps, such as sweeps")  # fmt: skip
    return found


def _profiles(profiles: ProfileFolders) -> dict[str, bytes]:
    """The files of the profiles, by their path in the archive. Raises BadInput."""
    try:
        found = {f"{PROFILES}/{name}/{FILE}": profiles.content(name) for name in profiles.written()}
    except (OSError, PenteractError) as error:
        what = str(error) if isinstance(error, PenteractError) else error.strerror or str(error)
        raise BadInput("FOLDER", "a profile cannot be read", where="--profiles", found=what) from None
    if not found:
        raise BadInput("FOLDER", "no profile in it", where="--profiles", found=profiles.name,
                       fix="penteract profile latest makes one")  # fmt: skip
    return found


def _write_sources(path: Path, data: dict[str, bytes]) -> None:
    """The sources that answer, with their data files, and further data."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(_PACKAGE.rglob("*")):
            inside = file.relative_to(_PACKAGE)
            left_out = any(inside.as_posix().startswith(f"{name}/") for name in _LEFT_OUT)
            if file.is_file() and not left_out and "__pycache__" not in inside.parts:
                entry = zipfile.ZipInfo((Path("penteract") / inside).as_posix(), _DATE)
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, file.read_bytes())
        for name in sorted(data):
            entry = zipfile.ZipInfo(name, _DATE)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data[name])


def _page(first: dict[str, list[Any]]) -> str:
    """The served page, with a policy of its own, and what it shows until its modules run."""
    meta = '<meta name="answers"'
    text = (_EXPLORE / "assets" / "index.html").read_text(encoding="utf-8")
    text = text.replace('content="served"', 'content="static"')
    text = text.replace(meta, f'<meta http-equiv="content-security-policy" content="{_POLICY}">\n    {meta}')
    return text.replace('<p class="waiting">Loading the explorer …</p>', _still(first["memory"][0]))


def _still(memory: dict[str, Any]) -> str:
    """The answer to the opening question without any script."""
    figures = memory["figures"]
    if figures is None:
        rows = "".join(f"<li>{escape(rule['text'])}</li>" for rule in memory["broken"])
        return f'<div class="waiting"><ul>{rows}</ul></div>'
    owners = "".join(
        f'<li class="owner-{owner["name"]}"><i class="swatch"></i>{owner["label"]} <b>{owner["amount"]["text"]}</b> '
        f"<small>{escape(owner['share'])}</small></li>"
        for owner in figures["owners"]
    )
    return (
        f'<div class="waiting still"><p>{escape(figures["headline"])}</p><p class="big">{figures["total"]["text"]}</p>'
        f'<p>{escape(figures["verdict"])}</p>{_bar(figures)}<ul class="legend">{owners}</ul>'
        "<p>Made at export. The page runs from a web server; opened from a disk it stays as it is: "
        "<code>python -m http.server</code> in this folder serves it; <code>penteract explore</code> needs no files."
        f'</p><p><code class="command">{escape(memory["command"])}</code></p></div>'
    )


def _bar(figures: dict[str, Any]) -> str:
    """The owners' bytes side by side, and how far tensors may go; the axis is the page's."""
    wide, parts, at = 1000, "", 0.0
    for owner in figures["owners"]:
        width = wide * owner["amount"]["bytes"] / figures["axis"]["most"]
        parts += f'<rect class="owner owner-{owner["name"]}" x="{at:.1f}" y="0" width="{width:.1f}" height="48"/>'
        at += width
    usable = figures["card"]["usable"]
    if figures["card"]["drawn"]:
        x = wide * usable["bytes"] / figures["axis"]["most"]
        parts += f'<line class="usable" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="66"/>'
        parts += f'<text x="{x - 6:.1f}" y="64" text-anchor="end">usable {usable["text"]}</text>'
    return (
        f'<svg class="chart" viewBox="0 0 {wide} 70" role="img" aria-label="{escape(figures["verdict"])}">{parts}</svg>'
    )
