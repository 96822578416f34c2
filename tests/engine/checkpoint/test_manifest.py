"""A manifest says what was written, in few bytes; nothing is committed that its reader refuses; the old format is
read."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint.shards import load_whole, noise, same, save_all, save_whole
from faults.background import begun
from penteract.engine.checkpoint import Slice, check, latest, load, manifest, rank_file, verify
from penteract.engine.checkpoint.boxes import digest
from penteract.engine.checkpoint.packing import file_of
from penteract.engine.checkpoint.stored_boxes import row_bytes
from penteract.engine.session.checkpoints import ReadBack
from penteract.engine.session.saved import load_state
from penteract.errors import BadInput, CorruptData, DiskFailure, PenteractError

TENSORS = {"w": noise((7, 5), torch.float32, 1), "b": noise((9,), torch.bfloat16, 2)}
FORMAT_1 = Path(__file__).with_name("format_1.json")  # as it was written for the ranks of `old_ranks`
OLD: dict[str, torch.Tensor] = {
    "w": torch.arange(24.0).view(6, 4), "w/mean": torch.arange(24.0).view(6, 4),
    "b": torch.arange(5.0).bfloat16(), "steps": torch.tensor(7),
}  # fmt: skip


def old_ranks() -> list[list[Slice]]:
    w = OLD["w"]
    own = [Slice("w/mean", (6, 4), (0, 0), w), Slice("b", (5,), (0,), OLD["b"]), Slice("steps", (), (), OLD["steps"])]
    return [[Slice("w", (6, 4), (0, 0), w[:2]), Slice("w", (6, 4), (2, 0), w[2:3, :1]), *own],
            [Slice("w", (6, 4), (2, 1), w[2:3, 1:]), Slice("w", (6, 4), (3, 0), w[3:])]]  # fmt: skip


def of_format_1(folder: Path, text: str = "") -> Path:
    """A checkpoint of the first format: its files of tensors are what they are today."""
    at = save_all(folder, 3, old_ranks())
    (at / "rectangles.bin").unlink()
    (at / "manifest.json").write_text(text or FORMAT_1.read_text())
    return at


def with_digest(content: dict[str, Any]) -> str:
    """A manifest that claims to be whole, in no canonical form."""
    content.pop("digest", None)
    text = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps({"digest": digest(text), **content})


# ---- what was written is read ----------------------------------------------------------------------------------------


def test_a_checkpoint_of_the_first_format_is_read(tmp_path: Path) -> None:
    at = of_format_1(tmp_path)
    assert json.loads(FORMAT_1.read_text())["format"] == 1
    assert latest(tmp_path) == at
    verify(at)
    assert same(load_whole(at, OLD), OLD)
    half = torch.zeros(6, 2)
    assert load(at, [Slice("w", (6, 4), (0, 2), half)]) == {"step": 3, "note": "é", "rate": 0.1}
    assert half.equal(OLD["w"][:, 2:])
    for file in at.glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        with pytest.raises(CorruptData, match="its bytes are not"):
            verify(at)
        file.write_bytes(bytes([*data[:-1], data[-1] ^ 1]))
    verify(at)


def test_both_formats_have_the_same_rectangles(tmp_path: Path) -> None:
    new = manifest.read(save_all(tmp_path / "new", 3, old_ranks()))
    old = manifest.read(of_format_1(tmp_path / "old"))
    assert new.files == old.files
    assert {n: (e.shape, e.dtype, [*e.parts]) for n, e in new.tensors.items()} == {
        n: (e.shape, e.dtype, [*e.parts]) for n, e in old.tensors.items()
    }


def test_a_manifest_that_a_tool_wrote_anew_is_read(tmp_path: Path) -> None:
    at = save_all(tmp_path, 3, old_ranks())
    content = json.loads((at / "manifest.json").read_text())
    (at / "manifest.json").write_text(json.dumps(dict(reversed(content.items())), indent=2))
    assert same(load_whole(at, OLD), OLD)


def test_only_the_tables_of_wanted_tensors_are_read(tmp_path: Path) -> None:
    at = save_whole(tmp_path, 1, TENSORS)
    table = at / "rectangles.bin"
    data = bytearray(table.read_bytes())
    data[0] ^= 1  # of b: sections are in the order of names
    table.write_bytes(data)
    assert load(at, [Slice("w", (7, 5), (0, 0), torch.zeros(7, 5))])
    assert [*map(len, (e.parts for e in manifest.read(at, {"w"}).tensors.values()))] == [0, 1]
    for read in (check, verify, lambda at: load_whole(at, TENSORS)):
        with pytest.raises(CorruptData, match=r"rectangles\.bin · found ValueError: b: the digest"):
            read(at)


# ---- neither file is believed ----------------------------------------------------------------------------------------

OF_FORMAT_1: dict[str, Callable[[Any], object]] = {
    "a path": lambda c: c["tensors"]["w"]["parts"][0].update(file="../../secret.safetensors"),
    "an absolute path": lambda c: c["files"].update({"/etc/passwd": 3}),
    "a file that is not listed": lambda c: c["tensors"]["w"]["parts"][0].update(file="rank-00009.safetensors"),
    "a huge shape": lambda c: c["tensors"]["w"].update(shape=[2**63, 2]),
    "a negative offset": lambda c: c["tensors"]["w"]["parts"][0].update(offset=[-1, 0]),
    "a part twice": lambda c: c["tensors"]["w"]["parts"].append(c["tensors"]["w"]["parts"][0]),
    "no part": lambda c: c["tensors"]["w"].update(parts=[]),
    "another dtype": lambda c: c["tensors"]["w"].update(dtype="PICKLE"),
    "a list for a table": lambda c: c.update(tensors=[]),
    "no step": lambda c: c.pop("step"),
    "another key": lambda c: c["tensors"]["w"]["parts"][0].update(key="b"),
    "another size": lambda c: c["tensors"]["w"]["parts"][0].update(size=[7, 4]),
    "other dims": lambda c: c["tensors"]["w"]["parts"][0].update(size=[7]),
    "no digest": lambda c: c["tensors"]["w"]["parts"][0].update(digest="00"),
}
OF_FORMAT_2: dict[str, Callable[[Any], object]] = {
    "an absolute path": lambda c: c["files"].update({"/etc/passwd": 3}),
    "a file less": lambda c: c["files"].clear(),
    "a huge shape": lambda c: c["tensors"]["w"].update(shape=[2**63, 2]),
    "too many elements": lambda c: c["tensors"]["w"].update(shape=[2**40, 2**40]),
    "a smaller shape": lambda c: c["tensors"]["w"].update(shape=[7, 4]),
    "another dim": lambda c: c["tensors"]["w"].update(shape=[7, 5, 1]),
    "more rectangles": lambda c: c["tensors"]["w"].update(rectangles=2**60),
    "none": lambda c: c["tensors"]["w"].update(rectangles=0),
    "fewer than none": lambda c: c["tensors"]["w"].update(rectangles=-1),
    "another dtype": lambda c: c["tensors"]["w"].update(dtype="PICKLE"),
    "another's digest": lambda c: c["tensors"]["w"].update(digest=c["tensors"]["b"]["digest"]),
    "a list for a table": lambda c: c.update(tensors=[]),
    "no step": lambda c: c.pop("step"),
    "format 1": lambda c: c.update(format=1),
}


@pytest.mark.parametrize("edit", OF_FORMAT_1.values(), ids=OF_FORMAT_1.keys())
def test_a_manifest_of_the_first_format_is_not_believed(tmp_path: Path, edit: Callable[[Any], object]) -> None:
    content = json.loads(FORMAT_1.read_text())
    edit(content)
    at = of_format_1(tmp_path, with_digest(content))
    with pytest.raises(CorruptData):
        load_whole(at, OLD)


@pytest.mark.parametrize("edit", OF_FORMAT_2.values(), ids=OF_FORMAT_2.keys())
def test_a_manifest_is_not_believed(tmp_path: Path, edit: Callable[[Any], object]) -> None:
    at = save_whole(tmp_path, 1, TENSORS)
    content = json.loads((at / "manifest.json").read_text())
    edit(content)
    (at / "manifest.json").write_text(with_digest(content))
    with pytest.raises(CorruptData):
        load_whole(at, TENSORS)


@pytest.mark.parametrize(("place", "said"), [(0, "a file that is not"), (1, "lies outside"), (4, "lies outside")])
def test_a_table_of_rectangles_is_not_believed(tmp_path: Path, place: int, said: str) -> None:
    at = save_whole(tmp_path, 1, {"w": TENSORS["w"]})  # one byte each: the file, offset and size in two dims
    data = bytearray((at / "rectangles.bin").read_bytes())
    assert [*data[:5]] == [0, 0, 0, 7, 5] and len(data) == 5 + 32
    data[place] += 1
    (at / "rectangles.bin").write_bytes(data)
    content = json.loads((at / "manifest.json").read_text())
    content["tensors"]["w"]["digest"] = digest(bytes(data))
    (at / "manifest.json").write_text(with_digest(content))
    with pytest.raises(CorruptData, match=said):
        check(at)


@pytest.mark.parametrize("text", ["null", "[]", "3", "{}", '{"digest": 1}', "[" * 100_000, "\ufffe", '{"digest": NaN}'])
def test_what_is_no_manifest_is_told(tmp_path: Path, text: str) -> None:
    at = save_whole(tmp_path, 1, TENSORS)
    (at / "manifest.json").write_text(text)
    with pytest.raises(CorruptData, match="manifest is damaged"):
        load_whole(at, TENSORS)


def test_a_later_format_is_told_as_such(tmp_path: Path) -> None:
    at = save_whole(tmp_path, 1, TENSORS)
    text = with_digest(json.loads((at / "manifest.json").read_text()) | {"format": 3})
    (at / "manifest.json").write_text(text)
    with pytest.raises(BadInput, match="found format 3 / allowed format 1, 2"):
        load_whole(at, TENSORS)


def test_versions_of_the_first_format_take_this_one_for_a_later_one(tmp_path: Path) -> None:
    """They read the digest of the canonical form of all else, and then the format: it is not damaged to them."""
    content = json.loads((save_whole(tmp_path, 1, TENSORS) / "manifest.json").read_text())
    claimed = content.pop("digest")
    assert claimed == digest(json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode())
    assert content["format"] == 2


# ---- nothing is committed that is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(("largest", "file"), [(200, r"manifest\.json"), (700, r"rectangles\.bin")])
def test_a_manifest_too_large_to_read_is_refused_before_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, largest: int, file: str
) -> None:
    old = save_whole(tmp_path, 1, TENSORS)
    rows = [Slice("w", (32, 1), (row, 0), torch.ones(1, 1)) for row in range(32)]
    with monkeypatch.context() as patched:
        patched.setattr(manifest, "LARGEST", largest)
        with pytest.raises(BadInput, match=rf"{file} · found .* / allowed .* · fix: .*checkpoint is intact") as caught:
            save_all(tmp_path, 2, [rows])
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
    assert latest(tmp_path) == old
    assert [p.name for p in tmp_path.glob("step-*")] == [old.name]
    verify(save_all(tmp_path, 2, [rows]))


@pytest.mark.parametrize("name", ["manifest.json", "rectangles.bin"])
@pytest.mark.parametrize("damage", ["short", "garbled", "unreadable"])
def test_what_cannot_be_read_back_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, damage: str
) -> None:
    old, write = save_whole(tmp_path, 1, TENSORS), rank_file.disk.write

    def damaging(path: Path, chunks: Any, **how: Any) -> int:
        size = write(path, chunks, **how)
        if path.name == name:
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 4
            path.write_bytes(data[:-1] if damage == "short" else data)
            if damage == "unreadable":
                path.unlink()
                path.symlink_to("/dev/null")
        return size

    with monkeypatch.context() as patched:
        patched.setattr(rank_file.disk, "write", damaging)
        with pytest.raises(DiskFailure, match=rf"no reader would take.*{name}.*found .*fix"):
            save_whole(tmp_path, 2, TENSORS)
    assert latest(tmp_path) == old
    assert [p.name for p in tmp_path.glob("step-*")] == [old.name]


def test_a_large_run_is_far_from_the_limit() -> None:
    """llama-3.1-405b on 16,384 ranks, zero=3 and tp=8: a rank writes 1,152 rectangles of layers, 16,384 x 53,248 and
    smaller, and up to 400 of its vocabulary's."""
    files = [file_of(rank) for rank in range(16384)]
    assert row_bytes((16384, 53248), files) == 42
    most = len(files) * (1152 * row_bytes((16384, 53248), files) + 400 * row_bytes((128256, 16384), files))
    assert 8 * most < manifest.LARGEST * 1.2
    assert len(files) * 64 + 126 * 9 * 3 * 200 < 2**21  # manifest.json: a row a file, and a row a tensor


# ---- what a rank reads -----------------------------------------------------------------------------------------------


def saved_by_two(folder: Path) -> tuple[Path, list[rank_file.RankTable]]:
    """A checkpoint of two ranks, and what each remembers of it."""
    tables = dict[int, rank_file.RankTable]()
    write = rank_file.write

    def noting(fresh: Path, entries: Any, rank: int, *how: Any) -> rank_file.RankTable:
        tables[rank] = write(fresh, entries, rank, *how)
        return tables[rank]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rank_file, "write", noting)
        at = save_all(folder, 3, old_ranks())
    return at, [tables[rank] for rank in range(2)]


def flip(path: Path, place: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_a_rank_reads_back_its_own_files_by_what_it_remembers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at, tables = saved_by_two(tmp_path)

    def parsed(*_: object) -> Any:
        raise AssertionError("no rank but the first reads the manifest")

    with monkeypatch.context() as patched:
        patched.setattr(manifest, "_read", parsed)
        assert ReadBack(at, tables[1], whole=False).result() is None
        flip(at / "rank-00000.safetensors")
        assert ReadBack(at, tables[1], whole=False).result() is None
        flip(at / "rank-00001.safetensors")
        found = ReadBack(at, tables[1], whole=False).result()
    assert isinstance(found, CorruptData) and "rank-00001" in str(found)
    assert isinstance(ReadBack(at, tables[0], whole=True).result(), CorruptData)


@pytest.mark.parametrize("name", ["manifest.json", "rectangles.bin"])
def test_the_first_rank_reads_the_manifest_back(tmp_path: Path, name: str) -> None:
    at, tables = saved_by_two(tmp_path)
    assert ReadBack(at, tables[0], whole=True).result() is None
    flip(at / name, 40)
    found: PenteractError | None = ReadBack(at, tables[0], whole=True).result()
    assert isinstance(found, CorruptData) and name in str(found)
    flip(at / name, 40)
    (at / name).unlink()
    assert isinstance(ReadBack(at, tables[0], whole=True).result(), CorruptData)


def test_a_rank_that_loads_reads_the_manifest_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, asked, read = begun(tmp_path, [(10, 1.0)]), list[Any](), manifest._read
    one.checkpoints.close()  # what was saved is read back in a thread, which reads the manifest too

    def counted(*about: Any) -> manifest.Manifest:
        asked.append(about)
        return read(*about)

    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(manifest, "_read", counted)
        assert load_state(tmp_path / "step-00000010", one.program, one.state) == {"step": 10}
    assert len(asked) == 1
    one.close()


def test_a_table_survives_its_text(tmp_path: Path) -> None:
    _, tables = saved_by_two(tmp_path)
    for table in tables:
        assert "\n" not in table.text()  # tables are sent to the writer a line each
        again = rank_file.RankTable.parse(table.text())
        assert again.files == table.files and again.text() == table.text()
        assert {n: [*e.parts] for n, e in again.tensors.items()} == {n: [*e.parts] for n, e in table.tensors.items()}


@pytest.mark.parametrize("edit", [
    lambda c: c["tensors"]["w"].__setitem__(0, "PICKLE"), lambda c: c["tensors"]["w"][2].__setitem__(0, 1),
    lambda c: c["tensors"]["w"][2].pop(), lambda c: c["tensors"]["w"].__setitem__(3, "AAAA"),
    lambda c: c["files"].update({"../x": 1}), lambda c: c["tensors"]["w"].pop(), lambda c: c["tensors"].update(w=None),
])  # fmt: skip
def test_a_ranks_table_is_not_believed(tmp_path: Path, edit: Callable[[Any], object]) -> None:
    _, tables = saved_by_two(tmp_path)
    content = json.loads(tables[0].text())
    edit(content)
    with pytest.raises((ValueError, TypeError)):
        rank_file.RankTable.parse(json.dumps(content))


def test_a_table_on_a_disk_that_fails_is_not_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at, _ = saved_by_two(tmp_path)
    shutil.rmtree(at.parent / "work-000000", ignore_errors=True)

    def failing(*_: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fstat", failing)
        with pytest.raises(CorruptData, match="Input/output error"):
            check(at)
    check(at)
