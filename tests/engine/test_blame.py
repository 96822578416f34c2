"""Who is blamed for a hang, from made-up records; and how often the store is read for it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from penteract.config.run import Limits
from penteract.engine.comm.journal import Entry, GroupLog, Journal, Kind, Marks, name_of
from penteract.engine.rank.rank_progress import RankProgress
from penteract.engine.runtime.hangs.blame import Verdict, blame, unlike
from penteract.engine.runtime.hangs.finder import Finder
from penteract.engine.runtime.hangs.pace import Pace
from penteract.engine.runtime.hangs.record import Collectives, Own, Record, decode, encode

SUM = Kind("all_reduce", 64)
DP, OTHER = "dp {1,3}", "dp {0,2}"


def at(phase: str = "step", *, host: str = "a", idle: float = 31, waits: tuple[str, int] | None = None,
       limit: float = 30, **groups: tuple[int, int] | tuple[int, int, Kind]) -> Record:  # fmt: skip
    """A record; `groups`: (entered, left, kind of the last)."""
    made = {name: Collectives(g[0], g[1], tuple(g[2:]) or (SUM,)) for name, g in groups.items()}
    return Record(7, host, phase, 12, "F3", idle, limit, "step", waits, "x.py:3 in f", "", made)


def waiting(group: str, number: int, kind: Kind = SUM, **more: Any) -> Record:
    return at(waits=(group, number), **{group: (number, number - 1, kind)}, **more)


def blamed(records: Mapping[int, Record], *silent: int) -> Verdict:
    found = blame(records, silent)
    assert found is not None
    return found


def test_who_did_not_enter() -> None:
    records = {1: waiting(DP, 128), 3: at("data", host="b", **{DP: (127, 127)})}
    code, ranks, what = blamed(records)
    assert (code, ranks) == ("HUNG", (3,))
    assert what == (
        "rank 3 (host b) has not entered all_reduce #128 of group dp {1,3}; rank 1 waits in it since 31 s; "
        "rank 3 is in phase data, step 12, after F3, at x.py:3 in f"
    )


def test_the_chain_is_followed_to_its_end() -> None:
    """Rank 0 waits for rank 1, which waits for rank 2, which is nowhere."""
    records = {
        0: waiting("tp {0,1}", 5), 1: replace(waiting("pp {1,2}", 9), groups={
            "tp {0,1}": Collectives(4, 4), "pp {1,2}": Collectives(9, 8, (SUM,))}),
        2: at(**{"pp {1,2}": (8, 8)}),
    }  # fmt: skip
    found = blamed(records)
    assert found.ranks == (2,) and "#9 of group pp {1,2}; rank 1 waits" in found.what


def test_progress_is_no_hang() -> None:
    records = {1: waiting(DP, 128), 3: at(idle=29, **{DP: (127, 127)})}
    assert blame(records) is None
    assert blame({**records, 3: replace(records[3], idle=30)}) is not None
    assert blame({r: replace(record, idle=5) for r, record in records.items()}) is None


def test_a_silent_rank_is_named_though_it_had_entered() -> None:
    records = {1: waiting(DP, 128), 3: replace(waiting(DP, 128, host="b"), idle=0.0)}
    assert blame(records) is None  # it has come just now
    found = blamed(records, 3)
    assert found.ranks == (3,)
    assert found.what.startswith(
        "rank 3 (host b) gives no sign of life; rank 1 waits in all_reduce #128 of group dp {1,3} since 31 s; "
    )


def test_all_inside_is_the_network() -> None:
    found = blamed({1: waiting(DP, 128), 3: waiting(DP, 128, host="b")})
    assert found.code == "HUNG" and found.ranks == (1, 3)
    assert found.what.startswith(
        "all ranks have entered all_reduce #128 of group dp {1,3}, and it does not end; ranks 1, 3"
    )
    assert "look at the links between hosts a, b" in found.what


def test_unlike_kinds_name_both() -> None:
    records = {1: waiting(DP, 128), 3: waiting(DP, 128, Kind("all_gather", 128), host="b", idle=2)}
    found = blamed(records)
    assert (found.code, found.ranks) == ("UNLIKE", (1, 3))
    assert (
        "unlike collectives as #128 of group dp {1,3}: rank 1 (host a) all_reduce of 64 B, rank 3 (host b) all_gather"
        in found.what
    )
    assert unlike({r: replace(record, idle=1) for r, record in records.items()}) == found
    assert unlike({1: waiting(DP, 128), 3: waiting(DP, 129)}) is None  # 128 is not known of rank 3


def test_an_extra_collective_ends_in_a_circle() -> None:
    world = "world {1,3}"
    records = {
        1: replace(waiting(DP, 129), groups={DP: Collectives(129, 128, (SUM,)), world: Collectives(3, 3)}),
        3: replace(waiting(world, 4), groups={DP: Collectives(128, 128), world: Collectives(4, 3, (SUM,))}),
    }
    found = blamed(records)
    assert (found.code, found.ranks) == ("UNLIKE", (1, 3))
    assert (
        "rank 1 (host a) in all_reduce #129 of group dp {1,3} for rank 3, rank 3 (host a) in all_reduce #4"
        in found.what
    )
    assert blame({**records, 3: replace(records[3], idle=3)}) is None


def test_a_rank_that_has_ended_is_named() -> None:
    found = blamed({1: waiting(DP, 129), 3: at("done", **{DP: (128, 128)})})
    assert found.ranks == (3,)
    assert "has not entered all_reduce #129 of group dp {1,3} and has ended; rank 1" in found.what


def test_alone_it_hangs() -> None:
    found = blamed({0: at("save"), 1: at(idle=1)})
    assert (
        found.what
        == "rank 0 (host a) hangs: no progress for 31 s; rank 0 is in phase save, step 12, after F3, at x.py:3 in f"
    )


def test_a_message_that_was_not_sent() -> None:
    """Its sender may not have begun to note it."""
    found = blamed({0: at(), 1: waiting("pp value 0 to 1", 1, Kind("message", 8))})
    assert found.what.startswith("rank 0 (host a) has not entered message #1 of group pp value 0 to 1; rank 1 waits")


def test_many_culprits_are_counted() -> None:
    name = name_of("dp", range(64))
    records = {r: at(**{name: (1, 1)}) if r > 20 else waiting(name, 2) for r in range(64)}
    found = blamed(records)
    assert found.ranks == tuple(range(21, 64))
    assert found.what.startswith(
        "ranks 21, 22, 23, 24, 25, 26, 27, 28, … (43) (host a) have not entered all_reduce #2 of group "
        "dp {0,1,2,…,63: 64 ranks}; ranks 0, 1, 2, 3, 4, 5, 6, 7, … (21) wait in it since 31 s; rank 21 is in"
    )


# ---- the store -----------------------------------------------------------------------------------------------


class Store:
    """A store that counts the keys it is asked for."""

    def __init__(self) -> None:
        self.rows: dict[str, bytes] = {}
        self.reads = 0

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        self.reads += 1
        if self.rows.get(key, b"") == expected.encode():
            self.rows[key] = wanted.encode()
        return self.rows[key]

    def check(self, keys: list[str]) -> bool:
        self.reads += len(keys)
        return all(key in self.rows for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.reads += len(keys)
        return [self.rows[key] for key in keys]

    def get(self, key: str) -> bytes:
        self.reads += 1 + (key in self.rows)  # it is looked for first
        return self.rows.get(key, b"")


@pytest.mark.parametrize("missing", [0, 1])
def test_blaming_reads_each_rank_a_few_times(missing: int) -> None:
    """4,096 ranks in dp 512 and tp 8; one has not entered. All look for the culprit at once."""
    world, store = 4096, Store()
    groups = {r: (name_of("dp", range(r % 8, world, 8)), name_of("tp", range(r - r % 8, r - r % 8 + 8)))
              for r in range(world)}  # fmt: skip
    culprit, records = 1234, dict[int, Record]()
    for r, (dp, tp) in groups.items():
        late = r % 8 == culprit % 8
        logs = {dp: Collectives(9, 8, (SUM,)), tp: Collectives(40, 39 if not late else 40, (SUM,))}
        if not late:  # its tp peers wait for those of the culprit's dp group
            logs = {dp: Collectives(8, 8, (SUM,)), tp: Collectives(41, 40, (SUM,))}
        waits = (dp, 9) if late else (tp, 41)
        records[r] = Record(60, f"host-{r // 8}", "step", 12, "B0", 31, 30, "step", waits, "", "", logs)
    dp, tp = groups[culprit]
    records[culprit] = Record(
        60, "host-154", "data", 12, "B0", 31, 30, "step", None, "", "",
        {dp: Collectives(8, 8, (SUM,)), tp: Collectives(40, 40, (SUM,))},
    )  # fmt: skip
    store.rows = {f"beat/{r}": encode(record).encode() for r, record in list(records.items())[missing:]}
    start = time.process_time()
    found = [v for r in range(world) if (v := Finder(store, r, world, Pace()).tick(records[r], 0.5)) is not None]  # type: ignore[arg-type]
    assert time.process_time() - start < 10
    assert len(found) == 1
    assert found[0].ranks == (culprit,)
    assert found[0].what.startswith(
        f"rank 1234 (host host-154) has not entered all_reduce #9 of group {dp}; ranks 2, 10, 18"
    )
    assert store.reads <= 4 * world


def test_the_finder_waits_for_beats_and_gives_its_part_back() -> None:
    store = Store()
    me, frozen = waiting(DP, 3), replace(waiting(DP, 3), idle=0.5)
    finder, other = Finder(store, 1, 4, Pace()), Finder(store, 3, 4, Pace())  # type: ignore[arg-type]
    store.rows = {f"beat/{r}": encode(at(**{OTHER: (1, 1)}, idle=0)).encode() for r in (0, 2)}
    store.rows |= {"beat/1": encode(me).encode(), "beat/3": encode(frozen).encode()}
    assert finder.tick(replace(me, idle=14), 0.5) is None and "finder" not in store.rows  # too early
    assert finder.tick(replace(me, idle=16), 0.5) is None and store.rows["finder"] == b"1"
    assert other.tick(replace(me, idle=31), 0.5) is None  # there is one
    for tick in range(28):
        for r in (0, 2):
            store.rows[f"beat/{r}"] = encode(replace(at(**{OTHER: (1, 1)}, idle=0), tick=tick)).encode()
        assert finder.tick(replace(me, idle=16.5 + tick / 2 - 1), 0.5) is None
    found = finder.tick(replace(me, idle=31), 0.5)
    assert found is not None and found.ranks == (3,) and "no sign of life" in found.what
    assert finder.tick(replace(me, idle=0), 0.5) is None
    assert store.rows["finder"] == b""
    assert other.tick(replace(me, idle=16), 0.5) is None and store.rows["finder"] == b"3"


def test_of_many_ranks_those_that_beat_in_time_are_not_silent() -> None:
    """They beat less often, and the limits that count beats follow."""
    store, pace = Store(), Pace.of(4096)
    assert pace.beat > 4
    finder = Finder(store, 1, 4, pace)  # type: ignore[arg-type]
    me, verdicts = waiting(DP, 3), list[Verdict | None]()
    for tick in range(10):
        frozen = 3 if tick < 3 else None  # rank 3 has entered, and beats no more
        for r in (0, 2, 3) if frozen else (0, 2):
            record = waiting(DP, 3) if r == 3 else at(**{OTHER: (1, 1)})
            store.rows[f"beat/{r}"] = encode(replace(record, tick=tick, idle=0)).encode()
        store.rows["beat/1"] = encode(me).encode()
        verdicts.append(finder.tick(replace(me, idle=tick * pace.beat), pace.beat))
    found = next(v for v in verdicts if v is not None)
    assert found.ranks == (3,) and "rank 3 (host a) gives no sign of life" in found.what


# ---- what a rank notes ---------------------------------------------------------------------------------------


def test_a_record_travels_and_anything_else_is_empty() -> None:
    record = waiting(DP, 128)
    assert decode(encode(record)) == record
    short = decode(encode(replace(record, idle=0.5)))  # of a run that goes on, kinds are not sent
    assert short.groups[DP] == Collectives(128, 127)
    for text in ("", "3", "[]", "{}", "[1,2]", b"\xff"):
        assert decode(text) == Record()


def test_progress_ends_idleness() -> None:
    progress = RankProgress(Limits(step=5, save=7))
    own = Own(progress, "a")
    progress.begin_step(3)
    assert [own.next(tick, 0.5).idle for tick in range(3)] == [0, 0.5, 1.0]
    progress.did("F0")
    assert own.next(3, 0.5).idle == 0
    log = progress.journal.group("g", "dp", (0, 1))
    with pytest.raises(ZeroDivisionError), progress.during("save"), progress.journal.inside(log, "barrier"):
        raise ZeroDivisionError
    record = own.next(4, 0.5)  # what failed stays
    assert (record.phase, record.limit, record.waits, record.idle) == ("save", 7, ("dp {0,1}", 1), 0)
    progress.begin_step(4)
    assert progress.reading(lambda: (progress.phase, progress.limit)) == ("data", 5)
    assert (progress.phase, progress.limit, progress.step) == ("step", 5, 4)


def test_kinds_are_found_by_number() -> None:
    journal = Journal()
    log = journal.group("g", "dp", (0, 1))
    for size in range(1, 7):
        entry = journal.enter(log, "all_reduce", size)
        journal.finish(entry, lambda: None)
    held = Collectives(log.entered, log.left, tuple(log.kinds))
    assert (held.entered, held.left, journal.waiting) == (6, 6, None)
    assert [held.kind(n) and held.kind(n).size for n in range(8)] == [None, None, None, 3, 4, 5, 6, None]  # type: ignore[union-attr]


class DeviceEvent:
    reached = False

    def query(self) -> bool:
        return self.reached


def test_a_device_leaves_what_it_has_passed() -> None:
    """The host waits for nothing on a GPU: what counts is what the device has passed."""
    made: list[DeviceEvent] = []

    def record(earlier: DeviceEvent | None) -> DeviceEvent:
        event = earlier or DeviceEvent()
        event.reached = False
        made.append(event)
        return event

    begun: list[int] = []
    journal = Journal(marks=Marks(record, lambda: begun.append(1)))
    log: GroupLog = journal.group("g", "dp", (0, 1))
    journal.finish(journal.enter(log, "all_reduce", 8), lambda: None)
    assert not made and log.left == 1  # nobody asks yet
    assert journal.state()[0] is None and begun == [1]
    progress = RankProgress(journal=journal)
    first = journal.enter(log, "all_reduce", 8)
    journal.finish(first, lambda: None)
    progress.did("F0")
    journal.finish(second := journal.enter(log, "all_gather", 8), lambda: None)
    waits, count, action = journal.state()
    assert (waits, action, log.entered, log.left) == (first, "", 3, 1)
    made[0].reached = True
    assert journal.state() == (None, count + 1, "")  # it computes
    made[1].reached = True
    assert journal.state() == (second, count + 2, "F0")
    made[2].reached = True
    assert journal.state() == (None, count + 3, "F0") and log.left == 3
    progress.did("B0")
    assert made[3] in made[:3] and isinstance(first, Entry)  # events are used again
    assert journal.state()[0] is None and begun == [1]


def test_a_collective_s_limit_is_later_than_all_others() -> None:
    assert Limits(step=9000).collective > 9000
    assert Limits().collective > Limits().of("data") > Limits().data
    assert Limits().of("done") == Limits().step
