"""Run folders named on a command line, checked before anything starts."""

from __future__ import annotations

from pathlib import Path

from penteract.engine.run_folder import checkpoint_folder
from penteract.errors import BadInput
from penteract.units import printable

_MARK = "run.toml"  # a folder with this file is a run


def find_run(name: str, out: str, *, flag: str, needs: str) -> Path:
    """The run folder called `name`: a path, or "latest" for the newest one in the folder `out` that holds `needs`.

    Raises BadInput when there is none, or when it is no run.
    """
    if name == "latest":
        return _latest(Path(out), flag, needs)
    folder = Path(name)
    try:
        is_folder, is_run = folder.is_dir(), (folder / _MARK).is_file()
    except (OSError, ValueError):
        is_folder = is_run = False
    if is_run:
        return folder
    what = f"a folder without {_MARK} is no run" if is_folder else "no such folder"
    raise BadInput(
        "RUN", what, where=flag, found=printable(name, 120), fix=f"{flag} latest, or the path of a run in {out}/"
    )


def has_checkpoint(run: Path) -> bool:
    """Whether a folder is a run that can go on."""
    return (run / _MARK).is_file() and _has(run, "checkpoints/latest")


def _has(run: Path, needs: str) -> bool:
    """Whether a run holds `needs`. Checkpoints that lie elsewhere and are missing count: an earlier run must not be
    taken in its place."""
    return (run / needs).exists() or (needs.startswith("checkpoints") and checkpoint_folder.is_missing(run))


def _latest(out: Path, flag: str, needs: str) -> Path:
    """`out`/latest if it holds `needs`, else the newest run that does. A run that was refused as it started holds
    neither metrics nor checkpoints, so it is none of them."""
    link = out / "latest"
    if (link / _MARK).is_file() and _has(link, needs):
        return link.resolve()
    runs = [path for path in out.iterdir() if (path / _MARK).is_file()] if out.is_dir() else []
    able = [path.resolve() for path in runs if _has(path, needs)]
    if not able:
        fix = "train one first: penteract train"
        raise BadInput("RUN", "there is no run yet", where=flag, found=f"latest in {out}/", fix=fix)
    return max(able, key=lambda path: ((path / _MARK).stat().st_mtime, path.name))
