"""The wheel alone, in a Python that has what it asks for and no torch: it prices, and says what training needs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE")


@dataclass(frozen=True)
class Installed:
    """The wheel, the sources that it was built from, and a Python that it is installed in."""

    wheel: Path
    sources: Path
    python: Path

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Python's answer to `words`, in a folder that has no sources, with nothing inherited but the path."""
        return subprocess.run(
            [self.python, *words], cwd=self.wheel.parent, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True,
            check=False,
        )  # fmt: skip

    def says(self, code: str) -> str:
        done = self.run("-c", code)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Built from a copy of the sources, as an earlier build beside them would leave what was deleted in the wheel.

    What the wheel asks for is copied from this Python: no network is needed, and nothing else is there.
    """
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"
    shutil.copytree(ROOT / "src", sources / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in BUILT_FROM:
        shutil.copy(ROOT / name, sources)
    subprocess.run([*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, sources], check=True)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv", symlinks=True, with_pip=False)
    python = folder / "venv" / "bin" / "python"
    subprocess.run([*PIP, "--python", python, "install", "--no-index", "--no-deps", wheel], check=True)
    (packages,) = (folder / "venv" / "lib").glob("python3.*/site-packages")
    for name in asked_for(wheel):
        copy(metadata.distribution(name), packages)
    return Installed(wheel, sources / "src", python)


def asked_for(wheel: Path) -> set[str]:
    """Names of all that the wheel's own metadata asks for, and what those ask for; no extra."""
    names: set[str] = set()
    (told,) = metadata.Distribution.discover(name="penteract", path=[str(wheel)])
    rest = list(told.requires or ())
    while rest:
        needed = Requirement(rest.pop())
        if needed.name not in names and (needed.marker is None or needed.marker.evaluate({"extra": ""})):
            names.add(needed.name)
            rest += metadata.requires(needed.name) or ()
    return names


def copy(installed: metadata.Distribution, packages: Path) -> None:
    """What a distribution has installed beside other packages: no scripts, no caches."""
    for file in installed.files or ():
        if ".." not in file.parts and "__pycache__" not in file.parts:
            (packages / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(str(file.locate()), packages / file)


def test_there_is_no_torch(installed: Installed) -> None:
    code = (
        "from importlib.util import find_spec as f; print([f(n) is not None for n in ('torch', 'numpy', 'penteract')])"
    )
    assert installed.says(code) == "[False, False, True]"
    assert "site-packages" in installed.says("import penteract; print(penteract.__file__)")


def test_every_file_of_the_package_is_in_it(installed: Installed) -> None:
    """Data files too: the catalogue is one of them."""
    ours = {str(p.relative_to(installed.sources)) for p in files(installed.sources / "penteract")}
    theirs = {name for name in zipfile.ZipFile(installed.wheel).namelist() if ".dist-info/" not in name}
    assert ours == theirs


def files(folder: Path) -> Iterator[Path]:
    return (p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts)


def test_help_names_the_verbs(installed: Installed) -> None:
    for words in (("-m", "penteract", "--help"), (str(installed.python.with_name("penteract")), "--help")):
        done = installed.run(*words)
        assert done.returncode == 0, done.stderr
        assert all(verb in done.stdout for verb in ("train", "init", "doctor"))


def test_it_prices_as_the_sources_do(installed: Installed) -> None:
    code = (
        "from penteract import Layout, estimate; from penteract.config.resolve.presets import preset; "
        "print(estimate(preset('llama-3.1-8b').model, Layout(tp=8), sequence_length=8192).allocated)"
    )
    where = {"PYTHONPATH": str(installed.sources)}
    here = subprocess.run([sys.executable, "-c", code], env=where, capture_output=True, check=True)
    assert int(installed.says(code)) == int(here.stdout)


def test_it_plans(installed: Installed) -> None:
    """With the catalogue that is inside it."""
    words = ["plan", "llama-3.1-8b", "--gpus", "8xH200", "--seq", "8192", "--batch", "1Mi", "--json"]
    done = installed.run("-m", "penteract", *words)
    assert done.returncode == 0, done.stderr
    best = json.loads(done.stdout)["layouts"][0]["layout"]
    assert best["dp"] * best["tp"] * best["pp"] * best["cp"] == 8
    code = "from penteract import plan; print(len(plan('llama-3.1-8b', '8xH200', layout='tp=8').layouts))"
    assert installed.says(code) == "1"


def test_the_catalogue_is_in_it(installed: Installed) -> None:
    inside = zipfile.ZipFile(installed.wheel).namelist()
    assert [name for name in inside if name.startswith("penteract/config/catalog/") and name.endswith(".toml")]


def test_training_names_what_it_needs(installed: Installed) -> None:
    done = installed.run("-m", "penteract", "train")
    assert done.returncode == 2
    assert "training needs torch" in done.stderr and "pip install" in done.stderr


def test_the_doctor_finds_no_torch(installed: Installed) -> None:
    done = installed.run("-m", "penteract", "doctor", "--json")
    assert done.returncode == 2
    bad = [row for row in json.loads(done.stdout)["findings"] if row["state"] == "bad"]
    assert "needs torch" in bad[0]["what"]
    assert bad[0]["fix"] == "pip install 'penteract[train]'"
