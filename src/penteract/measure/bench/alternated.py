"""Two sweeps run again as alternated pairs: A B B A A B …, so that heat and neighbours touch both alike."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from penteract.errors import BadInput
from penteract.measure.results.comparison import CasePair, pair
from penteract.measure.schemas.sweep import Sweep, SweepCase
from penteract.measure.schemas.sweep_folder import SweepFolder

_SIDES = ("a", "b")


def make_pairs(
    folder: SweepFolder, first: SweepFolder, second: SweepFolder, pairs: Sequence[CasePair], count: int
) -> None:  # fmt: skip
    """Write a sweep in which each pair runs `count` times, in fresh processes. A folder that has these stays as it is.

    Raises BadInput where the folder has others, DiskFailure, and what reading the two sweeps raises.
    """
    asked = digest(first, second, pairs, count)
    if folder.exists:
        if (there := folder.settings()).asked != asked:
            raise BadInput("SWEEP", "the folder holds other pairs", where=str(folder.path),
                           found=f"{there.name}, {len(there.cases)} runs", fix="--out another folder")  # fmt: skip
        return
    names = list[str]()
    for number, one in enumerate(pairs, 1):
        for turn in range(1, count + 1):
            sides = ((first, one.first.case), (second, one.second.case))
            for i in (0, 1) if turn % 2 else (1, 0):
                source, case = sides[i]
                name = f"{number:03d}_{turn:03d}{_SIDES[i]}_{case.name.partition('_')[2]}".rstrip("_")
                text = source.case(case.name).run_file.read_text(encoding="utf-8")
                folder.case(name).make(_renamed(case, name, len(names) + 1), text)
                names.append(name)
    settings = replace(
        first.settings(), name=f"{first.path.name} against {second.path.name}", cases=tuple(names),
        asked=asked, budget_gpu_minutes=None,
    )  # fmt: skip
    folder.write_settings(settings)


def digest(first: SweepFolder, second: SweepFolder, pairs: Sequence[CasePair], count: int) -> str:
    """What decides the cases."""
    names = [(one.first.case.name, one.second.case.name) for one in pairs]
    sweeps = [(str(at.path.resolve()), at.settings().asked) for at in (first, second)]
    return hashlib.sha256(repr((sweeps, names, count)).encode()).hexdigest()


def _renamed(case: SweepCase, name: str, number: int) -> SweepCase:
    return replace(case, name=name, number=number)


def pairs_of(sweep: Sweep) -> tuple[list[CasePair], list[str]]:
    """The pairs of such a sweep, and the names of cases that are in none because one of the two has no speed."""
    rows = {"_".join(row.case.name.split("_")[:2]): row for row in sweep.rows}  # as 001_001a
    pairs, missing = list[CasePair](), list[str]()
    for key in dict.fromkeys(key[:-1] for key in rows):
        a, b = (rows.get(f"{key}{side}") for side in _SIDES)
        if a is not None and b is not None and a.counts and b.counts:
            pairs.append(pair(a, b))
        else:
            missing += [row.case.name for row in (a, b) if row is not None]
    return pairs, missing
