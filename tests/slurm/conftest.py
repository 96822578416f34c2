"""A Slurm for these tests; where there can be none, they fail and say why. Only `make test-slurm` collects them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm.cluster import Cluster, memory_cgroups, missing


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    began = time.monotonic()
    if why := missing():
        pytest.exit(f"no Slurm can be started here: {why}", returncode=1)
    with Cluster(tmp_path_factory.mktemp("slurm") / "of", cgroups=memory_cgroups()) as cluster:
        print(f"Slurm is up after {time.monotonic() - began:.0f} s, memory limited by "
              f"{'control groups' if cluster.cgroups else 'its accounting'}")  # fmt: skip
        yield cluster


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    """Of a failure, what the daemons said."""
    report = yield
    cluster = getattr(item, "funcargs", {}).get("slurm")
    if report.failed and isinstance(cluster, Cluster):
        report.sections.append(("Slurm's daemons", cluster.logs()))
    return report


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slurm: Cluster) -> Path:
    """A working folder, from which this Slurm is asked."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    return tmp_path
