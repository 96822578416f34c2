"""Names become lists; what a schedule cannot do is refused with the fix."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penteract.errors import BadInput
from penteract.schedule.registry import SCHEDULES, ScheduleName, breach, generate

NAMES: tuple[ScheduleName, ...] = (*SCHEDULES, "overlapped")


@given(st.sampled_from(NAMES), st.integers(0, 8), st.integers(0, 4), st.integers(0, 16))
def test_generate_refuses_exactly_what_problem_names(name: ScheduleName, pp: int, vpp: int, micro_batches: int) -> None:
    wrong = breach(name, pp, vpp, micro_batches)
    if wrong is None:
        assert len(generate(name, pp, vpp, micro_batches)) == pp
        return
    with pytest.raises(BadInput) as caught:
        generate(name, pp, vpp, micro_batches)
    assert (caught.value.where, caught.value.what) == wrong
    assert caught.value.found == f"pp = {pp}, vpp = {vpp}, gradient_accumulation_steps = {micro_batches}"
    mended = {"pp": pp, "vpp": vpp, "gradient_accumulation_steps": micro_batches}
    mended |= {setting: int(size) for setting, size in (change.split(" = ") for change in caught.value.fix.split(", "))}
    assert breach(name, *mended.values()) is None


def test_a_schedule_that_is_not_there_is_refused_with_the_nearest() -> None:
    with pytest.raises(BadInput, match=r"no such schedule · schedule · found zb1 / allowed gpipe, .* · fix: zb_h1"):
        generate("zb1", 2, 1, 4)


@pytest.mark.parametrize(
    ("name", "pp", "vpp", "micro_batches", "legal"),
    [
        ("gpipe", 1, 1, 1, True),
        ("gpipe", 1, 2, 4, False),
        ("gpipe", 4, 3, 5, True),
        ("1f1b", 1, 1, 3, True),
        ("1f1b", 8, 1, 3, True),
        ("1f1b", 4, 2, 8, False),
        ("zb_h1", 1, 1, 1, True),
        ("zb_h1", 4, 2, 8, False),
        ("interleaved", 4, 2, 8, True),
        ("interleaved", 4, 2, 6, False),
        ("interleaved", 4, 1, 8, False),
        ("interleaved", 1, 2, 8, False),
        ("overlapped", 1, 1, 1, True),
        ("overlapped", 2, 1, 4, False),
        ("overlapped", 1, 2, 4, False),
        ("1f1b", 2, 1, 0, False),
    ],
)
def test_legal_combinations(name: ScheduleName, pp: int, vpp: int, micro_batches: int, legal: bool) -> None:
    assert (breach(name, pp, vpp, micro_batches) is None) == legal


def test_the_lists_of_small_cases() -> None:
    def shown(name: ScheduleName, pp: int, vpp: int, micro_batches: int) -> list[str]:
        return [" ".join(map(str, actions)) for actions in generate(name, pp, vpp, micro_batches)]

    assert shown("gpipe", 2, 2, 1) == ["F0 F0.1 B0.1 B0"] * 2
    assert shown("1f1b", 2, 1, 3) == ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]
    assert shown("zb_h1", 2, 1, 3) == ["F0 F1 I0 W0 F2 I1 W1 I2 W2", "F0 I0 F1 I1 W0 F2 I2 W1 W2"]
    assert shown("interleaved", 2, 2, 2) == ["F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1", "F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1"]
    assert shown("overlapped", 1, 1, 3) == ["F0 B0|F1 B1|F2 B2"]
