"""Rows of the ranks' store: what this run has not signed under that name is refused, and said in one line."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from penteract.engine.rank.roll_call import RollCall
from penteract.engine.rank.run_key import VARIABLE, NotSigned, RunKey, new_key, take_key
from penteract.engine.rank.signed_store import SignedStore
from penteract.engine.runtime.hangs.pace import Pace
from penteract.engine.runtime.launch import launch
from penteract.engine.runtime.watch import Watcher
from penteract.errors import BadInput, PenteractError

pytestmark = pytest.mark.waits(9)

KEY, OTHER, NONE = RunKey(b"ours", "10.0.0.1:4000"), RunKey(b"theirs"), RunKey()
FORGED = [b"", b"x", b"\xff\x00", b'{"code": "BUG"}', b"hmac-sha256:", b"hmac-sha256:00:x", OTHER.seal("roll/a", b"x")]


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


# ---- signatures --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [b"", b"row", b"a:b:c", b"\xff\x00"])
def test_what_is_sealed_opens_under_its_name_alone(row: bytes) -> None:
    sealed = KEY.seal("roll/row/1", row)
    assert KEY.open("roll/row/1", sealed) == row
    for name in ("roll/row/2", "watch/row/1", "roll/row/", "roll/row/1 "):
        with pytest.raises(NotSigned, match="by another key, or for another row"):
            KEY.open(name, sealed)
    with pytest.raises(NotSigned, match="by another key"):
        OTHER.open("roll/row/1", sealed)
    with pytest.raises(NotSigned, match="this rank has no key"):
        NONE.open("roll/row/1", sealed)


def test_no_bit_of_a_row_can_change() -> None:
    sealed = KEY.seal("a", b"row")
    for i in range(8 * len(sealed)):
        flipped = bytearray(sealed)
        flipped[i // 8] ^= 1 << i % 8
        with pytest.raises(NotSigned):
            KEY.open("a", bytes(flipped))


def test_name_and_row_are_told_apart() -> None:
    assert KEY.seal("ab", b"c")[12:76] != KEY.seal("a", b"bc")[12:76]


def test_without_a_key_rows_are_as_they_are() -> None:
    assert NONE.seal("a", b"row") == b"row" == NONE.open("a", b"row")


def test_a_key_is_taken_once_and_never_shown() -> None:
    environment = {VARIABLE: new_key(), "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"}
    secret = environment[VARIABLE]
    key = take_key(environment)
    assert VARIABLE not in environment and take_key(environment).secret == b""
    assert (key.secret, key.at) == (secret.encode(), "10.0.0.1:4000")
    assert secret not in repr(key) and secret not in str(key)
    assert len(bytes.fromhex(secret)) == 32 and new_key() != secret


def test_all_ranks_of_a_launcher_have_one_key_and_another_launcher_another(tmp_path: Path) -> None:
    keys = []
    for name in "ab":
        folder = tmp_path / name
        folder.mkdir()
        rank = Path(__file__).with_name("ranks.py")
        given = os.environ | {VARIABLE: "what the user has exported"}
        assert launch(2, [str(rank), str(folder), json.dumps({"plain": "hello"})], folder, given) == 0
        keys.append({json.loads((folder / f"env-{r}").read_text())[VARIABLE] for r in range(2)})
    assert [len(bytes.fromhex(*key)) for key in keys] == [32, 32]
    assert keys[0] != keys[1]


# ---- a store -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forged", FORGED)
def test_a_strangers_row_is_no_row_and_said_once(
    store: dist.TCPStore, caplog: pytest.LogCaptureFixture, forged: bytes
) -> None:
    rows = SignedStore(store, "roll", 3, KEY)
    store.set("roll/a", forged)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING, "penteract"):
        assert [rows.get("a"), rows.get("a"), *rows.multi_get(["a"])] == [b""] * 3
    assert len(caplog.messages) == bool(forged)
    for line in caplog.messages:
        assert line.startswith("rank 3 refuses a row of the ranks' store that this run has not signed")
        assert " · roll/a at 10.0.0.1:4000 · found " in line and f"fix: the same {VARIABLE} for every rank" in line
        assert "\n" not in line
    assert rows.compare_set("a", "", "mine") == b"mine"  # it takes no row away
    assert rows.get("a") == b"mine"
    assert rows.compare_set("a", "", "late") == b"mine"


def test_a_row_that_is_copied_to_another_name_is_refused(store: dist.TCPStore) -> None:
    rows = SignedStore(store, "roll", 0, KEY)
    rows.set("row/1", "yes")
    store.set("roll/row/2", store.get("roll/row/1"))  # type: ignore[arg-type]
    store.set("watch/row/1", store.get("roll/row/1"))  # type: ignore[arg-type]
    assert rows.multi_get(["row/1", "row/2"]) == [b"yes", b""]
    assert SignedStore(store, "watch", 0, KEY).get("row/1") == b""


def test_a_row_is_given_back_by_its_owner_alone(store: dist.TCPStore) -> None:
    rows = SignedStore(store, "watch", 0, KEY)
    assert rows.compare_set("finder", "", "0") == b"0"
    assert rows.compare_set("finder", "1", "") == b"0"
    assert rows.compare_set("finder", "0", "") == b"" == rows.get("finder")
    assert rows.compare_set("finder", "", "1") == b"1"


def test_waiting_is_for_a_signed_row(store: dist.TCPStore) -> None:
    rows, other = (SignedStore(s, "a", 0, KEY) for s in (store, store.clone()))  # type: ignore[attr-defined]
    store.set("a/ready", "yes")
    start = time.monotonic()
    with pytest.raises(dist.DistStoreError, match="nobody of this run has written a/ready"):
        rows.wait("ready", 0.3)
    assert time.monotonic() - start < 3
    later = threading.Timer(0.2, other.set, ["ready", "now"])
    later.start()
    assert rows.wait("ready", 20) == b"now"


# ---- the start ---------------------------------------------------------------------------------------------------


def called(store: dist.TCPStore, keys: list[RunKey]) -> list[PenteractError | None]:
    """What the roll call of each rank raised; ranks are threads here."""

    def hold(number: int) -> PenteractError | None:
        rows = SignedStore(store.clone(), "roll", number, keys[number], strict=True)  # type: ignore[attr-defined]
        try:
            RollCall(rows, number, len(keys), "host", {}, 20.0).hold()
        except PenteractError as e:
            return e
        return None

    with ThreadPoolExecutor(len(keys)) as pool:
        return list(pool.map(hold, range(len(keys))))


@pytest.mark.parametrize("name", ["row/1", "answer"])
def test_a_strangers_row_ends_the_start_in_one_line(store: dist.TCPStore, name: str) -> None:
    store.set(f"roll/{name}", "null")
    start = time.monotonic()
    errors = called(store, [KEY] * 3)
    assert time.monotonic() - start < 10
    assert all(isinstance(e, BadInput) and e.code == "STORE" and e.exit_code == 2 for e in errors)
    for line in map(str, errors):
        assert f"· roll/{name} at 10.0.0.1:4000 · found no signature · fix: the same {VARIABLE}" in line
        assert "\n" not in line


@pytest.mark.parametrize("stranger", [OTHER, NONE])
def test_a_rank_of_another_run_does_not_join(store: dist.TCPStore, stranger: RunKey) -> None:
    errors = called(store, [KEY, KEY, stranger])
    assert all(isinstance(e, BadInput) and e.code == "STORE" for e in errors)
    assert "roll/row/2" in str(errors[0])


# ---- while it trains ---------------------------------------------------------------------------------------------


def test_strangers_neither_end_a_run_nor_keep_a_rank_alive(
    store: dist.TCPStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    heard = list[dict[str, object]]()
    watcher = Watcher(store, 0, 3, tmp_path, lambda: None, key=KEY, pace=Pace(0.05, 1.0))
    watcher._leave = heard.append  # type: ignore[method-assign]
    theirs = SignedStore(store.clone(), "watch", 1, KEY)  # type: ignore[attr-defined]
    theirs.set("beat/1", "0")
    row = json.dumps({"code": "BUG", "exit_code": 70, "rank": 1, "what": "forged"})
    store.set("watch/abort", row)
    store.set("watch/done/1", "1")
    with caplog.at_level(logging.WARNING, "penteract"):
        watcher.start()
        for beat in range(40):  # twice the time-out
            theirs.set("beat/1", str(beat))
            time.sleep(0.05)
        assert heard == []
        begun = time.monotonic()
        while not heard and time.monotonic() - begun < 8:
            store.set("watch/beat/1", f"forged {time.monotonic()}")
            time.sleep(0.05)
        watcher._over.set()
        time.sleep(0.2)
    assert [(found["rank"], found["code"]) for found in heard] == [(1, "LOST")]
    lines = [line for line in caplog.messages if "refuses a row" in line]
    assert sorted(line.split(" · ")[1].split()[0] for line in lines) == ["watch/abort", "watch/beat/1", "watch/done/1"]
