"""Compiled kernels of FlashAttention-4 are kept where only this user can write."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from penteract.engine.kernels.fused_attention import fa4
from penteract.engine.kernels.fused_attention.compiled import ENABLED, FOLDER, keep_compiled

HOPPER = (9, 0)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files; the environment says nothing, and is restored."""
    for name in (ENABLED, FOLDER):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_private_folder_is_made(temporary: Path) -> None:
    keep_compiled(HOPPER)
    folder = Path(os.environ[FOLDER])
    assert os.environ[ENABLED] == "1"
    assert folder.parent.parent == temporary and folder.name == "flash_attention_90"
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("name", [ENABLED, FOLDER])
def test_the_environment_stands(name: str, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "0")
    keep_compiled(HOPPER)
    assert [os.environ.get(n) for n in (ENABLED, FOLDER)] == ["0" if n == name else None for n in (ENABLED, FOLDER)]
    assert not list(temporary.iterdir())


def _writable(at: Path) -> None:
    at.mkdir()
    at.chmod(0o777)


def _link(at: Path) -> None:
    (at.parent / "elsewhere").mkdir(mode=0o700)
    at.symlink_to(at.parent / "elsewhere")


@pytest.mark.parametrize("planted", [_writable, _link, Path.touch], ids=["writable", "link", "file"])
def test_a_folder_that_others_may_fill_is_not_used(planted: Callable[[Path], None], temporary: Path) -> None:
    planted(temporary / f"penteract-{os.getuid()}")
    keep_compiled(HOPPER)
    assert ENABLED not in os.environ and FOLDER not in os.environ


def test_it_is_told_before_the_package_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[str | None]()

    def imported(name: str) -> None:
        seen.append(os.environ.get(FOLDER))

    monkeypatch.setattr(fa4, "import_module", imported)
    fa4.library.__wrapped__()
    assert seen[0] is not None and seen[0].endswith("flash_attention_90")
