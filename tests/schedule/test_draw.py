"""Golden pictures."""

from __future__ import annotations

import pytest

from penteract.schedule.draw import draw
from penteract.schedule.registry import ScheduleName, generate
from penteract.schedule.schedule import round_robin

GOLDEN: dict[tuple[ScheduleName, int, int, int], str] = {
    ("1f1b", 4, 1, 8): """
rank 0  F0 F1 F2 F3 .. .. .. .. .. .. B0 -- F4 B1 -- F5 B2 -- F6 B3 -- F7 B4 -- .. B5 -- .. B6 -- .. B7 --
rank 1  .. F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- F4 B2 -- F5 B3 -- F6 B4 -- F7 B5 -- .. B6 -- .. B7 -- .. ..
rank 2  .. .. F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- F4 B3 -- F5 B4 -- F6 B5 -- F7 B6 -- .. B7 -- .. .. .. ..
rank 3  .. .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- F4 B4 -- F5 B5 -- F6 B6 -- F7 B7 -- .. .. .. .. .. ..
bubble 27.3% of 33 time units (F: 1; B: 2, with --); peak micro-batches in flight by rank: 4 3 2 1
""",
    ("zb_h1", 4, 1, 8): """
rank 0  F0 F1 F2 F3 .. .. .. I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7
rank 1  .. F0 F1 F2 .. .. I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 F6 I4 W3 F7 I5 W4 I6 W5 I7 W6 W7
rank 2  .. .. F0 F1 .. I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 F6 I5 W3 F7 I6 W4 I7 W5 W6 W7
rank 3  .. .. .. F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4 W5 W6 W7
bubble 11.1% of 27 time units (F, I, W: 1); peak micro-batches in flight by rank: 4 4 4 4
""",
    ("interleaved", 2, 2, 4): """
rank 0  F0  F1  F0.1F1.1F2  ....B0.1----F3  B1.1----....F2.1B0  ----F3.1B1  ----B2.1----....B3.1----B2  ----B3  ----
rank 1  ....F0  F1  F0.1B0.1----F1.1B1.1----F2  B0  ----F3  B1  ----F2.1B2.1----F3.1B3.1----B2  ----B3  ----........
bubble 11.1% of 27 time units (F: 1; B: 2, with --); peak chunk passes in flight by rank: 5 3
""",
    ("overlapped", 1, 1, 4): """
rank 0  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 --
bubble 0.0% of 12 time units (F: 1; B: 2, with --); peak micro-batches in flight by rank: 2
""",
}


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case[0])
def test_the_picture(case: tuple[ScheduleName, int, int, int]) -> None:
    name, pp, vpp, micros = case
    assert draw(generate(name, pp, vpp, micros), round_robin(pp, vpp), micros) == GOLDEN[case].strip("\n")


@pytest.mark.parametrize("width", [40, 80, 120, 300])
def test_no_row_is_wider_than_asked(width: int) -> None:
    cases: list[tuple[ScheduleName, int, int, int]] = [("interleaved", 4, 2, 8), ("1f1b", 4, 1, 16), ("gpipe", 2, 1, 3)]
    for name, pp, vpp, micros in cases:
        rows = draw(generate(name, pp, vpp, micros), round_robin(pp, vpp), micros, width=width).splitlines()
        assert all(len(row) <= width for row in rows[:pp])


def test_a_cut_picture_says_what_it_takes() -> None:
    lists = generate("interleaved", 4, 2, 8)
    cut = draw(lists, round_robin(4, 2), 8, width=100)
    assert "(without time units 10 to 48 of 57; all of it takes 236 columns)" in cut
    assert "(without" in draw(lists, round_robin(4, 2), 8, width=235)
    whole = draw(lists, round_robin(4, 2), 8, width=236)
    assert "(without" not in whole
    rows = list(zip(cut.splitlines()[:4], whole.splitlines()[:4], strict=True))
    for shown, row in rows:  # the first nine units of time and the last nine
        begin, end = shown.split("… ")
        every = [row[8:].ljust(4 * 57)[i : i + 4].strip() for i in range(0, 4 * 57, 4)]
        assert begin[8:].split() == [cell for cell in every[:9] if cell]
        assert end.split() == [cell for cell in every[-9:] if cell]
