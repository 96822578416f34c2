"""ARCHITECTURE.md is held against the code: layers, redistributions, ops."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from penteract.config.layout import CP_METHODS, Layout
from penteract.config.mesh import Mesh
from penteract.config.model import LatentSpec, ModelSpec, MoESpec
from penteract.model.decoder import stage
from penteract.ops.declarations import OPS
from penteract.ops.do import Do, Redistribution
from penteract.ops.tape import Call, OpCall

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "penteract"
PAGE = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in ("ARCHITECTURE.md", "docs/internals.md"))
NOTHING = "–"

DENSE = ModelSpec(layers=2, hidden_size=64, heads=8, kv_heads=4, head_size=8, ffn_size=64, vocab_size=64)
MOE = replace(DENSE, moe=MoESpec(experts=4, top_k=2, ffn_size=32, shared_ffn_size=32))
LATENT = replace(
    MOE, kv_heads=8, mtp_layers=1,
    latent=LatentSpec(kv_rank=16, plain_size=4, rope_size=4, value_size=8, query_rank=16),
)  # fmt: skip
LAYOUTS = (
    Layout(),
    Layout(tp=2, pp=2),
    Layout(tp=2, loss="chunked"),
    *(Layout(cp=4, cp_method=method) for method in CP_METHODS),
    Layout(dp=2, tp=2, cp=2, ep=4),
    Layout(dp=2, tp=2, ep=2, expert_tp=2),
    Layout(dp=2, ep=2, ep_method="all_gather"),
)

Row = tuple[str, ...]


def table(heading: str) -> list[Row]:
    """The rows of the table under a heading, cells without their backticks."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [tuple(cell.strip().replace("`", "") for cell in line.strip("|").split("|")) for line in lines]


class Listening(Do):
    """Records as ever, and remembers every redistribution that was crossed over more than one rank."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.crossed: list[
            tuple[Redistribution, OpCall, str]
        ] = []  # the redistribution, its op on the tape, and the file that crosses it

    def redistribute(self, redistribution: Redistribution, *ins: Any) -> Any:
        before = len(self.tape.ops)
        out = super().redistribute(redistribution, *ins)
        if len(self.tape.ops) > before:
            where = Path(sys._getframe(1).f_code.co_filename).relative_to(SOURCE).as_posix()
            self.crossed.append((redistribution, self.tape.ops[before], where))
        return out


def modules(*packages: str) -> Iterator[tuple[str, ModuleType]]:
    for package in packages:
        for found in pkgutil.iter_modules([str(SOURCE / package)]):
            yield (
                f"{package}/{found.name}.py",
                importlib.import_module(f"penteract.{package.replace('/', '.')}.{found.name}"),
            )


def defined() -> dict[int, str]:
    """Redistributions that stand in a module of `parallel` or `model`: id -> file."""
    found: dict[int, str] = {}
    for file, module in modules("parallel", "model"):
        for value in vars(module).values():
            if isinstance(value, Redistribution):
                found.setdefault(id(value), file)
    return found


def issued(calls: tuple[Call, ...]) -> str:
    """The collectives that calls put on the wire, each once, in order."""
    kinds = [f"{c.site.op_name} {c.site.attrs['axis']}" for c in calls if c.phase == "start"]
    return ", ".join(dict.fromkeys(kinds)) or NOTHING


def recorded() -> tuple[dict[Row, set[str]], set[int]]:
    """(file, redistribution, forward, backward) -> the files that cross it, over models and layouts; and the
    redistributions themselves."""
    home, rows, seen = defined(), dict[Row, set[str]](), set[int]()
    for m in (DENSE, MOE, LATENT):
        for layout in LAYOUTS:
            if layout.ep > 1 and m.moe is None:
                continue
            for number in range(layout.stages):
                do = Listening(Mesh(layout))
                stage(do, m, number, 64)
                for redistribution, op, where in do.crossed:
                    assert op.program is not None
                    made = redistribution.forward.__module__.removeprefix("penteract.").replace(".", "/") + ".py"
                    row = (
                        home.get(id(redistribution), made),
                        redistribution.name,
                        issued(op.program.forward),
                        issued(op.program.backward),
                    )
                    if row[2:] == (NOTHING, NOTHING):
                        continue  # over one rank: ops alone
                    rows.setdefault(row, set()).add(where)
                    seen.add(id(redistribution))
    return rows, seen


def test_redistributions() -> None:
    """Every row is what some recorded program does, and every recorded program has its row."""
    rows, seen = recorded()
    assert set(defined()) <= seen, "a redistribution that no model crosses"
    listed = {row[:4]: set(row[4].split(", ")) for row in table("Redistributions")}
    assert listed == rows


def test_words() -> None:
    def kept(names: tuple[str, ...], waits: bool = False) -> str:
        return ", ".join([*names, *(["waits"] if waits else [])]) or NOTHING

    listed = [(op_name, for_input, for_weight) for op_name, _, for_input, for_weight in table("Ops")]
    declarations = [(op_name, op.declaration) for op_name, op in OPS.items()]
    assert listed == [(w, kept(b.input_keeps), kept(b.weight_keeps, b.deferrable)) for w, b in declarations]


BESIDE_OPS = (
    "registry", "traffic", "one_pass", "one_pass_experts", "wide_product", "narrow_router", "grouped_experts",
)  # others  # fmt: skip


def test_words_have_their_bodies_in_the_file_of_the_same_name() -> None:
    declared = dict[str, set[str]]()
    folders = ("", "/moe", "/fused_attention", "/quantised")
    for file, module in (found for folder in folders for found in modules(f"ops/declarations{folder}")):
        for name, table in vars(module).items():
            if name.isupper() and type(table) is dict and Path(file).stem not in BESIDE_OPS:
                declared.setdefault(Path(file).stem, set()).update(table)
    ran = dict[str, set[str]]()
    for op_name, op in OPS.items():
        (module,) = {name.partition(":")[0] for name in op.implementations[-1].kernels.values()}
        ran.setdefault(module.rpartition(".")[2], set()).add(op_name)
    assert declared == ran


def test_layers() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(c["layers"] for c in contracts if c["type"] == "layers")
    assert PAGE.split("```layers\n")[1].split("\n```")[0].splitlines() == layers


def test_files_that_it_names_exist() -> None:
    names = set(re.findall(r"`([a-z_]+/[\w/]*\.py)`", PAGE))
    assert names
    assert [n for n in names if not ((SOURCE / n).is_file() or (ROOT / n).is_file())] == []


def test_files_that_docstrings_and_the_changelog_name_exist() -> None:
    """In backticks; from the root, from the package, or from a package that the file lies in."""
    sources = [*SOURCE.rglob("*.py"), ROOT / "CHANGELOG.md"]
    stale = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources
        for name in re.findall(r"`([a-z_]+/[\w/]*\.py)`", path.read_text(encoding="utf-8"))
        if not any((folder / name).is_file() for folder in (*path.parents, SOURCE))
    ]
    assert stale == []


TIME = SOURCE / "readings" / "time"


def test_time_lists_its_files() -> None:
    listed = [name for files, _ in table("Time") for name in files.split(", ")]
    assert sorted(listed) == sorted(p.name for p in TIME.rglob("[a-z]*.py"))


def test_a_dimension_names_no_cost() -> None:
    """A dimension says who holds what and who talks to whom; what that takes is counted elsewhere."""
    said = {
        (path.name, token.string)
        for path in (SOURCE / "parallel").glob("*.py")
        for token in tokenize.generate_tokens(path.open(encoding="utf-8").readline)
        if token.type == tokenize.NAME and token.string.lower() in ("flops", "bytes", "seconds")
    }
    assert not said


def test_sizes() -> None:
    """Habits: a file under 300 lines, a function under 60. Offenders are shown; far ones fail."""
    over: list[tuple[str, int]] = []
    far: list[str] = []
    for path in SOURCE.rglob("*.py"):
        name, text = path.relative_to(SOURCE).as_posix(), path.read_text(encoding="utf-8")
        functions = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
        sizes = [(name, len(text.splitlines()), 300, 400)]
        sizes += [(f"{name}:{f.name}", (f.end_lineno or f.lineno) - f.lineno + 1, 60, 90) for f in functions]
        over += [(what, size) for what, size, habit, _ in sizes if size > habit]
        far += [f"{what}: {size}" for what, size, _, limit in sizes if size > limit]
    print("longer than the habit:", *sorted(over), sep="\n  ")
    assert not far
