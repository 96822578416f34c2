"""Draws the package tree, a square for each file, and the imports between packages, from the code alone.

    python docs/structure.py                     docs/images/structure_after.svg, from src/
    python docs/structure.py --before 775ee51    docs/images/structure_before.svg, from that commit
    python docs/structure.py --calls [COMMIT]    the files on the way of two values: the call stacks of a run and a plan

A row is a folder: its squares are its Python files, larger for more lines, and one outlined square for each sub-folder.
Arcs are imports: on the right between packages, on the left between the folders of one package. Packages and folders
are sorted so that imports go down where they can; those that go up are red.
"""

from __future__ import annotations

import argparse
import ast
import os
import runpy
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

HERE = Path(__file__).parent
_STYLE = runpy.run_path(str(HERE / "picture.py"))
text, INK, FAINT, BOX, PAPER, MONO = (_STYLE[n] for n in ("text", "INK", "FAINT", "BOX", "PAPER", "MONO"))
BLUE, RED, GREEN = "#2f6fbb", "#c8553d", "#3a8f5c"
MANY = 16  # entries of a folder; tests/docs/test_words.py holds it

WIDTH, ROW, NAME, SQUARES, COUNTS, ARCS = 1000, 22, 140, 296, 762, 800
Edges = Counter[tuple[str, str]]


@dataclass(frozen=True)
class Folder:
    """A folder with Python files: its path below the package, the lines of each file and of `__init__.py`, and how many
    folders it has."""

    path: str
    lines: tuple[int, ...]
    init: int
    folders: int

    @property
    def entries(self) -> int:
        return len(self.lines) + self.folders


def folders(root: Path) -> dict[str, Folder]:
    """Every folder below `root` that has Python files, by its path; `__init__.py` is the folder itself, no entry."""
    found = dict[str, Folder]()
    for at in sorted({p.parent for p in root.rglob("*.py")}):
        files = sorted(p for p in at.glob("*.py") if p.name != "__init__.py")
        lines = tuple(sorted((len(p.read_text(encoding="utf-8").splitlines()) for p in files), reverse=True))
        inner = sum(any(q.rglob("*.py")) for q in at.iterdir() if q.is_dir())
        init = len((at / "__init__.py").read_text(encoding="utf-8").splitlines())
        path = at.relative_to(root).as_posix()
        found[path] = Folder(path, lines, init, inner)
    return found


def imports(root: Path) -> Iterator[tuple[str, str]]:
    """(file, imported file or folder), as paths below `root` without suffix. The code imports by absolute names."""
    modules = {p.relative_to(root).with_suffix("").as_posix().removesuffix("/__init__") for p in root.rglob("*.py")}
    for path in sorted(root.rglob("*.py")):
        here = path.relative_to(root).with_suffix("").as_posix().removesuffix("/__init__")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = list[str]()
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{a.name}" for a in node.names]
            elif isinstance(node, ast.Import):
                names = [a.name for a in node.names]
            for name in names:
                to = name.removeprefix("penteract.").replace(".", "/")
                if name.startswith("penteract.") and (hit := to if to in modules else to.rpartition("/")[0]) in modules:
                    yield here, hit


def between(edges: list[tuple[str, str]], inside: str, names: set[str]) -> Edges:
    """How many imports lead from one of `names`, folders directly in `inside` ("" is the package), to another."""
    prefix = f"{inside}/" if inside else ""
    out = Edges()
    for a, b in edges:
        if a.startswith(prefix) and b.startswith(prefix):
            one, other = (x.removeprefix(prefix).partition("/")[0] for x in (a, b))
            if one != other and one in names and other in names:
                out[one, other] += 1
    return out


def ordered(names: set[str], edges: Edges) -> list[str]:
    """Names so that imports lead down. Of a cycle, the import with the fewest statements is left to lead up."""
    edges = Edges(edges)
    while True:
        graph = {n: sorted({b for a, b in edges if a == n}) for n in sorted(names, reverse=True)}
        try:
            return list(TopologicalSorter(graph).static_order())[::-1]
        except CycleError as e:
            cycle = e.args[1]
            ways = {(a, b) for pair in pairwise(cycle) for a, b in (pair, pair[::-1])}
            del edges[min(ways & edges.keys(), key=lambda way: (edges[way], way))]


def squares(folder: Folder, y: float) -> list[str]:
    """A square for each file, its area by lines, and an outlined one for each sub-folder."""
    out, x = list[str](), float(SQUARES)
    for n in folder.lines:
        side = max(2.0, min(14.0, (n / 300) ** 0.5 * 11))
        out.append(f"<rect x='{x:.1f}' y='{y - side / 2:.1f}' width='{side:.1f}' height='{side:.1f}' fill='{BLUE}'/>")
        x += side + 1.2
    for _ in range(folder.folders):
        out.append(f"<rect x='{x:.1f}' y='{y - 4:.1f}' width='8' height='8' fill='none' stroke='{INK}'/>")
        x += 10.4
    return out


def arcs(edges: Edges, at: dict[str, float], x: float, reach: float) -> list[str]:
    """Imports as arcs away from x, to the right for a positive reach: the wider, the more statements; red leads up."""
    out, far = list[str](), max((abs(at[a] - at[b]) for a, b in edges), default=1)
    for (a, b), n in sorted(edges.items()):
        y1, y2 = at[a], at[b]
        bend = x + reach * (0.16 + 0.84 * abs(y2 - y1) / far) * 4 / 3
        colour, opacity = (FAINT, 0.55) if y2 > y1 else (RED, 0.9)
        out.append(
            f"<path d='M{x},{y1:.1f} C{bend:.1f},{y1:.1f} {bend:.1f},{y2:.1f} {x},{y2:.1f}' fill='none' "
            f"stroke='{colour}' stroke-opacity='{opacity}' stroke-width='{min(5.0, 0.7 + n**0.5 / 4):.1f}' "
            f"marker-end='url(#{colour[1:]})'>"
            f"<title>{a} imports {b} {n} times</title></path>"
        )
    return out


def _marker(colour: str) -> str:
    return (
        f"<marker id='{colour[1:]}' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='8' markerHeight='8' orient='auto' "
        f"markerUnits='userSpaceOnUse'><path d='M0,0 L8,4 L0,8 z' fill='{colour}'/></marker>"
    )


def _row(folder: Folder, y: float) -> list[str]:
    """One folder: its name, its squares, its entries and lines."""
    depth = folder.path.count("/")
    name = folder.path.rpartition("/")[2] + "/"
    bold = {"size": 15, "fill": INK} if depth == 0 else {"size": 13, "fill": INK if depth == 1 else FAINT}
    many = RED if folder.entries > MANY else FAINT
    return [
        text(NAME + 16 * depth, y + 4.5, name, anchor="start", **bold),
        *squares(folder, y),
        text(COUNTS - 52, y + 4.5, str(folder.entries), size=13, fill=many, anchor="end"),
        text(COUNTS, y + 4.5, f"{sum(folder.lines) + folder.init:,}", size=13, fill=FAINT, anchor="end"),
    ]


def _below(found: dict[str, Folder], inside: str) -> set[str]:
    prefix = f"{inside}/" if inside else ""
    return {p.removeprefix(prefix) for p in found if p.startswith(prefix) and p != inside and p != "."} & {
        p.removeprefix(prefix).partition("/")[0] for p in found
    }


def picture(root: Path, title: str) -> str:
    """The SVG as text, of the package at `root`."""
    found, edges = folders(root), list(imports(root))
    names = _below(found, "")
    packages = between(edges, "", names)
    at, y, parts = dict[str, float](), 96.0, list[str]()
    for package in ordered(names, packages):
        parts.append(
            f"<line x1='{NAME}' y1='{y - 13}' x2='{COUNTS}' y2='{y - 13}' stroke='{FAINT}' stroke-opacity='0.3'/>"
        )
        at[package], inner_at = y, dict[str, float]()
        parts += _row(found[package], y)
        y += ROW
        inner = _below(found, package)
        inner_edges = between(edges, package, inner)
        for name in ordered(inner, inner_edges):
            inner_at[name] = y
            for path in sorted(p for p in found if p == f"{package}/{name}" or p.startswith(f"{package}/{name}/")):
                parts += _row(found[path], y)
                y += ROW
        parts += arcs(inner_edges, inner_at, NAME + 12, -105)
        y += 5
    parts += arcs(packages, at, ARCS, 185)
    files = [n for f in found.values() for n in (*f.lines, f.init)]
    most = max((f for f in found.values() if f.path != "."), key=lambda f: f.entries)
    summary = (
        f"{len(files)} files in {len(found)} folders, {sum(files):,} lines, {sum(files) / len(files):.0f} a file; "
        f"the fullest folder, {most.path}/, has {most.entries} entries"
    )
    height = round(y + 10)
    size = f"viewBox='0 0 {WIDTH} {height}' width='{WIDTH}' height='{height}'"
    return "\n".join([
        f"<svg xmlns='http://www.w3.org/2000/svg' {size}>",
        f"<defs>{_marker(FAINT)}{_marker(RED)}</defs><rect width='{WIDTH}' height='{height}' fill='{PAPER}'/>",
        text(20, 26, title, size=17, anchor="start"),
        text(20, 48, summary, size=13, fill=FAINT, anchor="start"),
        text(20, 74, "imports inside", size=12, fill=FAINT, anchor="start"),
        text(SQUARES, 74, "a square a file, outlined a folder", size=12, fill=FAINT, anchor="start"),
        text(COUNTS - 52, 74, "entries", size=12, fill=FAINT, anchor="end"),
        text(COUNTS, 74, "lines", size=12, fill=FAINT, anchor="end"),
        text(ARCS, 74, "imports between packages", size=12, fill=FAINT, anchor="start"),
        *parts, "</svg>", "",
    ])  # fmt: skip


# Loaded by every Python process of the run: writes the files of the package on the call stack at the first collective
# of a trainer's step, where the launcher starts ranks, and where the time of a matrix product is asked for.
_PROBE = """
import os, sys
WANTED = {("subprocess.py", "_execute_child"), ("compat.py", "reduce_scatter"), ("rates.py", "product")}
def probe(frame, event, arg):
    code, files = frame.f_code, []
    if event == "call" and (os.path.basename(code.co_filename), code.co_name) in WANTED:
        while frame:
            path = frame.f_code.co_filename
            short = path.split("/src/penteract/")[-1]
            if short != path and short not in files:
                files.insert(0, short)
            frame = frame.f_back
        with open(os.environ["STACKS"], "a") as out:
            print(code.co_name, *files, file=out)
sys.setprofile(probe)
"""
_PLAN = ("plan", "llama-3.1-8b", "--gpus", "8xH200", "--seq", "8192", "--batch", "1Mi")
_TRAIN = ("train", "--steps", "1", "--parallel.tp", "2")


def calls(source: Path) -> dict[str, list[str]]:
    """The files on the call stack of each stop of two values, as the code at `source` (a `src/`) runs them."""
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        (at / "sitecustomize.py").write_text(_PROBE, encoding="utf-8")
        stacks = at / "stacks"
        env = {**os.environ, "PYTHONPATH": f"{at}:{source}", "STACKS": str(stacks)}
        for arguments in (_TRAIN, _PLAN):
            command = [sys.executable, "-m", "penteract", *arguments]
            subprocess.run(command, cwd=at, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        lines = [line.split() for line in stacks.read_text(encoding="utf-8").splitlines()]
    # Sampling and a step both end in collectives: the step's stack has the trainer.
    steps = [x for x in lines if x[0] != "reduce_scatter" or any(f.endswith("trainer.py") for f in x)]
    most = Counter(tuple(x) for x in steps)
    return {
        stop: [*max((x for x in most if x[0] == stop), key=lambda x: most[x])[1:]]
        for stop in ("_execute_child", "reduce_scatter", "product")
    }


def unpacked(commit: str, to: str) -> Path:
    """`src/` of a commit, written below the folder `to`."""
    archive = subprocess.run(["git", "archive", commit, "src"], cwd=HERE.parent, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", to], input=archive, check=True)
    return Path(to) / "src"


def main() -> None:
    """Draw a picture, or print call stacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", metavar="COMMIT")
    parser.add_argument("--calls", metavar="COMMIT", nargs="?", const="")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        commit = asked.before or asked.calls
        source = unpacked(commit, folder) if commit else HERE.parent / "src"
        if asked.calls is not None:
            for stop, files in calls(source).items():
                print(f"{stop}: {len(files)} files\n  " + "\n  ".join(files))
            return
        name, title = ("before", f"Before, at {asked.before}") if asked.before else ("after", "Now")
        drawn = picture(source / "penteract", f"{title}: src/penteract")
        (HERE / "images" / f"structure_{name}.svg").write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
