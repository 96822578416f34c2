"""The explorer as files for any web server, under any path: the page, the planner's sources, and Pyodide, a Python for
browsers.

A web worker of the page runs the code in `answers/`, as the server does. The answers about the layout that the page
opens with are computed at export, so that they show at once. Where the page is opened as a local file, browsers load no
modules: it then shows the memory of that layout as a still figure.
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
# Folders of the package that the browser does not need, or cannot import because they need more than the standard
# library.
_LEFT_OUT = (
    "engine", "cli", "slurm", "explore/server", "explore/assets", "explore/pyodide",
    *(f"measure/{room}" for room in ("bench", "calibrate", "profile", "rehearse", "report")),
)  # fmt: skip
# Kinds of answers that are computed at export (`page_schema.py`).
_AT_EXPORT = ("opening", "memory", "step", "fits", "schedule", "schedules", "search", "what_if", "compare", "ranks",
          "runs", "bench", "profile")  # fmt: skip
_CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; worker-src 'self'; base-uri 'none'; form-action 'none'"
)
SWEEPS, PROFILES = "sweeps", "profiles"  # folders of measured data in `penteract.zip`
_DATE = (2000, 1, 1, 0, 0, 0)  # of all files in `penteract.zip`, so that equal exports have equal bytes


def export_site(
    folder: Path, opening: Question, sweeps: SweepFolders | None = None, profiles: ProfileFolders | None = None
) -> None:
    """Write the site into `folder`, which must not exist or be empty. The page opens with the layout of `opening`, and
    shows the `sweeps` and `profiles`, which are copied into it.

    Raises BadInput for a folder with files, a layout that cannot be shown, and data that cannot be read; DiskFailure.
    """
    data = (_sweeps(sweeps) if sweeps else {}) | (_profiles(profiles) if profiles else {})
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput("FILE", "it exists already", where="--export", found=folder, fix="name a new or an empty folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copytree(_EXPLORE / "assets", folder / "assets", ignore=shutil.ignore_patterns("index.html"))
        shutil.copytree(_EXPLORE / "pyodide", folder / "pyodide")
        answers = {kind: _rows(kind, opening, sweeps, profiles) for kind in _AT_EXPORT}
        (folder / "first.json").write_text(json.dumps(answers), encoding="utf-8")
        (folder / "index.html").write_text(_page(answers), encoding="utf-8")
        _write_sources(folder / "penteract.zip", data)
    except OSError as error:
        raise DiskFailure.of(error, f"--export {folder}") from None


def _rows(kind: str, opening: Question, sweeps: SweepFolders | None, profiles: ProfileFolders | None) -> list[Any]:
    """The lines of one answer about the opening layout, as JSON values. Raises BadInput if it is an error."""
    request = {"version": VERSION, "kind": kind, "question": opening, "pp_rank": None}
    rows = list(answer(request, opening, sweeps=sweeps, profiles=profiles))
    if rows and rows[0]["kind"] == "error":
        raise BadInput("EXPORT", "the opening layout cannot be shown", where="--layout", found=rows[0]["text"])
    return rows


def _sweeps(sweeps: SweepFolders) -> dict[str, bytes]:
    """Path in `penteract.zip` -> content, of the files of the sweeps. Raises BadInput if there are none, or one cannot
    be read."""
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
    """Path in `penteract.zip` -> content, of the files of the profiles. Raises BadInput as `_sweeps` does."""
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
    """Write `penteract.zip`: the package without `_LEFT_OUT`, and `data` by path."""
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


def _page(answers: dict[str, list[Any]]) -> str:
    """The HTML: as the server sends it, with a content security policy, and a still figure until its modules run."""
    meta = '<meta name="answers"'
    text = (_EXPLORE / "assets" / "index.html").read_text(encoding="utf-8")
    text = text.replace('content="served"', 'content="static"')
    text = text.replace(
        meta, f'<meta http-equiv="content-security-policy" content="{_CONTENT_SECURITY_POLICY}">\n    {meta}'
    )
    return text.replace('<p class="waiting">Loading the explorer …</p>', _still_figure(answers["memory"][0]))


def _still_figure(memory: dict[str, Any]) -> str:
    """The answer about memory as HTML without scripts: its bytes by owner, or the rules that the layout breaks."""
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
    """An SVG of the owners' bytes side by side, with a line at the memory that tensors may take. Its axis is that of
    the page's own figure."""
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
