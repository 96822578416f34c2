"""SWEEP.toml as a question.

    run = "base.toml"            # or preset = "tiny", or a model's name; as `penteract train` takes them
    gpus = "8xH200"              # what is predicted; a file of `penteract calibrate` too. Without it: memory alone
    ranks = 8                    # of each case; dp is what is left. By default the GPUs of `gpus`
    steps = 10                   # timed, after `warmup = 3`
    limit = 600                  # seconds of a case
    budget = 60                  # GPU-minutes of the sweep
    data = "random"              # or "run": the run file's

    [set]                        # keys of a run file, for all cases
    batch.global_batch_size = 64

    [grid]                       # one case for each combination
    parallel.tp = [1, 2, 4]
    parallel.zero = [0, 1]

    [[case]]                     # and single ones
    parallel.pp = 2
    limit = 60

or, in place of run, set, grid and case:

    [plan]                       # the first layouts of `penteract plan`, with its options
    model = "llama-3.2-1b"
    gpus = "4xH200"
    seq = 8192
    batch = "16seqs"
    top = 20
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from penteract.config.files.keys import find_key
from penteract.config.files.parse_toml import parse_toml
from penteract.config.files.read import origins_in, read_text
from penteract.config.files.schema import Number, Origin, Table, Text, place
from penteract.config.files.values import show
from penteract.config.resolve.write_run_file import toml_value
from penteract.errors import BadInput
from penteract.measure.bench.cases.sweep_question import ExplicitCase, PlanQuestion, SweepQuestion

MOST_STEPS, LONGEST_S, MOST_MINUTES, MOST_RANKS = 10_000, 30 * 86_400.0, 1e9, 2**20


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of some texts."""

    choices: tuple[str, ...]

    def check(self, value: object, path: str, origin: Origin) -> str:
        """The text."""
        if value not in self.choices:
            raise BadInput("VALUE", "not a value for this key", where=place(path, origin), found=show(value),
                           allowed=" or ".join(self.choices))  # fmt: skip
        return str(value)


@dataclass(frozen=True, slots=True)
class RunKeys:
    """A table of keys of a run file, nested or dotted; -> key -> value, flat. `lists`: each has several values."""

    lists: bool = False
    others: tuple[str, ...] = ()  # keys that are no run file's

    def check(self, value: object, path: str, origin: Origin) -> dict[str, Any]:
        """The keys, whose values a run file would take."""
        found = dict[str, Any]()
        for key, one in _flat(value, path, origin):
            at = origin(f"{path}.{key}") or path
            if key in self.others:
                found[key] = one
                continue
            find_key(key, at)
            if self.lists and (not isinstance(one, list) or not one):
                raise BadInput("VALUE", "a grid has a list of values for each key", where=f"{key} ({at})",
                               found=show(cast("object", one)), fix=f"{key} = [{toml_value(one)}]")  # fmt: skip
            found[key] = one
        return found


@dataclass(frozen=True, slots=True)
class CaseTables:
    """The [[case]] tables."""

    def check(self, value: object, path: str, origin: Origin) -> tuple[ExplicitCase, ...]:
        """Each as a case."""
        if not isinstance(value, list):
            raise BadInput("VALUE", "cases are a list of tables", where=place(path, origin), found=show(value),
                           fix="[[case]]")  # fmt: skip
        return tuple([self._one(one, path, origin) for one in cast("list[object]", value)])

    def _one(self, value: object, path: str, origin: Origin) -> ExplicitCase:
        found = RunKeys(others=("limit",)).check(value, path, origin)
        limit = found.pop("limit", None)
        if limit is not None:
            limit = _LIMIT.check(limit, f"{path}.limit", origin)
        return ExplicitCase(values=found, limit=limit)


_LIMIT = Number(float, 1e-3, LONGEST_S)
_STEPS = Number(int, 1, MOST_STEPS)
_PLAN = Table({"model": Text(), "gpus": Text()}, {
    "top": Number(int, 1, 10_000), "seq": Number(int, 1, 2**30), "batch": Text(), "fix": Text(), "precision": Text(),
    "optimizer": Text(), "headroom": Number(float, 0, 0.99), "packages": Text(),
})  # fmt: skip
FILE = Table({}, {
    "name": Text(), "run": Text(), "preset": Text(), "gpus": Text(), "ranks": Number(int, 1, MOST_RANKS),
    "steps": _STEPS, "warmup": Number(int, 1, MOST_STEPS), "limit": _LIMIT, "budget": Number(float, 0, MOST_MINUTES),
    "headroom": Number(float, 0, 0.99), "data": OneOf(("random", "run")), "set": RunKeys(), "grid": RunKeys(lists=True),
    "case": CaseTables(), "plan": _PLAN,
})  # fmt: skip
OF_CASES = ("gpus", "ranks", "headroom")  # a plan has its own, in its table
_OF_RUNS = ("run", "preset", "set", "grid", "case", *OF_CASES)


def read_sweep(path: Path) -> SweepQuestion:
    """The question of a file; files that it names are looked for beside it. Raises BadInput with the line."""
    text = read_text(path)
    try:
        tree = parse_toml(text)
    except ValueError as error:
        raise BadInput("TOML", str(error), where=str(path), fix="correct the syntax; the guide shows a sweep") from None
    found: dict[str, Any] = FILE.check(tree, "", origins_in(text, path.name))
    if "plan" in found and (both := [key for key in _OF_RUNS if key in found]):
        raise BadInput("SWEEP", "a plan's layouts, or runs of your own", where=str(path),
                       found=f"plan and {', '.join(both)}", fix="leave one of them out")  # fmt: skip
    if "run" in found and "preset" in found:
        raise BadInput("SWEEP", "a run starts from one place", where=str(path), found="run and preset",
                       fix="leave one of them out")  # fmt: skip
    if not {"plan", "grid", "case"} & found.keys():
        raise BadInput("SWEEP", "no cases", where=str(path), found=", ".join(found) or "nothing",
                       allowed="[plan], [grid] or [[case]]", fix="the guide shows a sweep")  # fmt: skip
    for table, key in ((found, "run"), (found, "gpus"), (found.get("plan", {}), "gpus")):
        if (name := table.get(key, "")).endswith(".toml"):
            table[key] = str(path.parent / name)
    if (plan := found.pop("plan", None)) is not None:
        found["plan"] = PlanQuestion(**plan)
    found["grid"] = {key: tuple(values) for key, values in found.pop("grid", {}).items()}
    found["words"] = tuple(f"{key}={toml_value(value)}" for key, value in found.pop("set", {}).items())
    found["cases"] = found.pop("case", ())
    found.setdefault("name", path.stem)
    return SweepQuestion(**found)


def is_sweep(path: Path) -> bool:
    """Whether a TOML file is a sweep, not a run file. Raises BadInput if it cannot be read."""
    try:
        return bool({"plan", "grid", "case", "set"} & parse_toml(read_text(path)).keys())
    except ValueError:
        return True  # reading it says what is wrong


def _flat(value: object, path: str, origin: Origin) -> Iterator[tuple[str, object]]:
    """The leaves of nested tables, by dotted key."""
    if not isinstance(value, Mapping):
        raise BadInput("VALUE", "not a value for this key", where=place(path, origin), found=show(value),
                       allowed="a table of keys of a run file")  # fmt: skip
    for name, one in cast("Mapping[str, object]", value).items():
        if isinstance(one, Mapping):
            yield from ((f"{name}.{rest}", leaf) for rest, leaf in _flat(cast("object", one), path, origin))
        else:
            yield name, one
