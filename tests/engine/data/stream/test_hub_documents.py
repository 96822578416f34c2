"""Rows of the hub: with something in the place of the library, and with the library where it is installed."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from listed_rows import ListedRows
from penteract.engine.data.corpus import StreamedCorpus
from penteract.engine.data.stream.hub_documents import HubDocuments
from penteract.errors import BadInput, CorruptData, DiskFailure


def test_without_the_library_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(BadInput, match=r'fix: pip install "penteract\[hf\]"'):
        HubDocuments(StreamedCorpus("a", ""))


def load_dataset(name: str, config: str | None, *, split: str, streaming: bool, revision: str | None) -> ListedRows:
    assert (split, streaming) == ("train", True)
    if name == "none":
        raise FileNotFoundError(f"no dataset {name}")
    texts = [{"text": f"{name} {config} {revision} {i}"} for i in range(5)]
    return ListedRows([*texts, {"kernel": 1}, ConnectionError("unplugged\nand more")])


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset, __version__="3"))


@pytest.mark.usefixtures("listed")
def test_datasets_are_streamed() -> None:
    source = HubDocuments(StreamedCorpus("a", "c"))
    texts = source.open()
    assert next(texts) == "a c None 0"
    assert next(source.open()) == "a c None 0"  # readers do not share a position
    position = json.loads(json.dumps(texts.position()))
    assert [*itertools.islice(texts, 4)] == [f"a c None {i}" for i in range(1, 5)]
    with pytest.raises(CorruptData, match="row 5 · found kernel"):
        next(texts)
    assert next(source.open(position)) == "a c None 1"
    assert next(HubDocuments(StreamedCorpus("a", "")).open()) == "a None None 0"
    assert next(HubDocuments(StreamedCorpus("a", "c", "v2")).open()) == "a c v2 0"
    others = StreamedCorpus("a", ""), StreamedCorpus("a", "c"), StreamedCorpus("b", ""), StreamedCorpus("a", "", "v2")
    assert len({HubDocuments(other).name for other in others}) == 4


@pytest.mark.usefixtures("listed")
def test_what_the_library_raises_is_one_line() -> None:
    with pytest.raises(BadInput, match="could not open the dataset · hf:none · found no dataset none"):
        HubDocuments(StreamedCorpus("none", ""))
    with pytest.raises(BadInput, match=r"could not open the dataset · hf:none at revision v2 · found"):
        HubDocuments(StreamedCorpus("none", "", "v2"))
    source = HubDocuments(StreamedCorpus("a", ""))
    with pytest.raises(DiskFailure, match="could not read the dataset · hf:a, row 6 · found unplugged · fix"):
        next(source.open({"row": 6, "state": {"at": 6}, "version": "3"}))


@pytest.mark.usefixtures("listed")
def test_rows_are_read_over_where_another_version_noted_the_position() -> None:
    source = HubDocuments(StreamedCorpus("a", ""))
    texts = source.open({"row": 2, "state": {"of": "before"}, "version": "2"})
    assert next(texts) == "a None None 2"
    position = texts.position()
    assert position == {"row": 3, "state": None, "version": ""}
    assert next(source.open(position)) == "a None None 3"


@pytest.mark.usefixtures("listed")
@pytest.mark.parametrize(
    "position",
    [
        {},
        {"row": "x", "version": "3"},
        {"row": None},
        {"row": -3},
        {"row": 2, "version": "3"},
        {"row": 2, "version": "3", "state": None},
        {"row": 2, "version": "3", "state": "x"},
    ],
)
def test_a_damaged_position_is_refused(position: dict[str, object]) -> None:
    with pytest.raises(CorruptData, match="position in its dataset is damaged · hf:a"):
        HubDocuments(StreamedCorpus("a", "")).open(position)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_the_library_reads_on_from_a_position(tmp_path: Path, kind: str) -> None:
    """Its own position, in the middle of a file and at its end."""
    pytest.importorskip("datasets", reason="penteract[hf] is not installed")
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for file in range(3):
        rows = [{"text": f"document {100 * file + i}", "other": i} for i in range(100)]
        if kind == "jsonl":
            (tmp_path / f"part-{file}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        else:
            parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / f"part-{file}.parquet")
    source = HubDocuments(StreamedCorpus(str(tmp_path), ""))
    whole = list(source.open())
    assert whole == [f"document {i}" for i in range(300)]
    for before in (0, 1, 57, 100, 101, 250, 299, 300):
        texts = source.open()
        for _ in itertools.islice(texts, before):
            pass
        position = json.loads(json.dumps(texts.position()))
        assert next(texts, None) == next(iter(whole[before:]), None)
        assert list(source.open(position)) == whole[before:]
        texts = source.open(position | {"version": "an older one"})
        assert [*itertools.islice(texts, 7)] == whole[before : before + 7]
        assert list(source.open(texts.position())) == whole[before + 7 :]
