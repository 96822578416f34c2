"""An answer is found again by what was read while it was made: no less, however it was come by, and hardly more."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

import pytest

from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.readings.layers.reads import Memo, Memos, changed, tracked

LAYOUT = Layout(dp=4, tp=2, pp=2, zero=1)


@dataclass(slots=True)
class Asked:
    """Questions that count how often they are answered anew."""

    memos: Memos = field(default_factory=Memos)
    made: list[str] = field(default_factory=list)

    @tracked
    def branch(self, layout: Layout) -> tuple[object, ...]:
        """What is read hangs on what was read before."""
        self.made.append("branch")
        return ("many", layout.schedule) if layout.pp > 1 else ("one",)

    @tracked
    def outer(self, layout: Layout, extra: int) -> tuple[object, ...]:
        self.made.append("outer")
        return (extra, layout.tp, *self.branch(layout))

    @tracked
    def tall(self, layout: Layout) -> object:
        """As the same with one sequence."""
        self.made.append("tall")
        return self.size(changed(layout, micro_batch_size=1))

    @tracked
    def size(self, layout: Layout) -> int:
        self.made.append("size")
        return layout.global_batch_size

    @tracked
    def op_names(self, layout: Layout) -> object:
        """A method reads its own fields."""
        self.made.append("op_names")
        return layout.edit(0)

    @tracked
    def group(self, layout: Layout) -> tuple[int, ...]:
        self.made.append("group")
        return Mesh(layout).group("tp", 0)

    @tracked
    def late(self, layout: Layout) -> Mesh:
        return Mesh(layout)


def test_what_was_not_read_makes_no_other_answer() -> None:
    asked = Asked()
    assert asked.branch(LAYOUT) == ("many", "1f1b")
    for same in (replace(LAYOUT, dp=8), replace(LAYOUT, zero=3, tp=4)):
        assert asked.branch(same) == ("many", "1f1b")
    assert asked.made == ["branch"]
    assert asked.branch(replace(LAYOUT, schedule="gpipe")) == ("many", "gpipe")
    assert asked.branch(replace(LAYOUT, pp=1)) == ("one",)
    assert asked.branch(replace(LAYOUT, pp=1, schedule="zb_h1")) == ("one",)
    assert asked.branch(replace(LAYOUT, pp=4)) == ("many", "1f1b")
    assert len(asked.made) == 4 == len(asked.memos["branch"])


def test_what_an_answer_inside_hangs_on_counts_outside() -> None:
    """Also where that answer was there already."""
    asked = Asked()
    asked.branch(LAYOUT)
    asked.made.clear()
    assert asked.outer(LAYOUT, 1) == (1, 2, "many", "1f1b")
    assert asked.outer(replace(LAYOUT, schedule="gpipe"), 1) == (1, 2, "many", "gpipe")
    assert asked.outer(replace(LAYOUT, dp=1), 1) == (1, 2, "many", "1f1b")
    assert asked.outer(LAYOUT, 2) == (2, 2, "many", "1f1b")
    assert asked.made == ["outer", "outer", "branch", "outer"]


def test_what_is_changed_is_not_read_and_what_follows_from_it_follows() -> None:
    asked = Asked()
    assert asked.tall(replace(LAYOUT, micro_batch_size=4, gradient_accumulation_steps=3)) == 12
    assert asked.tall(replace(LAYOUT, micro_batch_size=8, gradient_accumulation_steps=3)) == 12
    assert asked.made == ["tall", "size"]
    assert asked.tall(replace(LAYOUT, dp=2)) == 2
    assert changed(LAYOUT, tp=8).world == 64


def test_methods_and_meshes_read_what_they_need() -> None:
    asked = Asked()
    assert asked.op_names(LAYOUT) == LAYOUT.edit(0)
    asked.op_names(replace(LAYOUT, recompute_else=("*",)))  # said of no layer
    asked.op_names(replace(LAYOUT, dp=2))
    assert asked.made == ["op_names"]
    every_second = replace(LAYOUT, recompute=("*",), recompute_every=2)
    assert asked.op_names(every_second) == every_second.edit(0)
    assert asked.group(LAYOUT) == (0, 1) == asked.group(replace(LAYOUT, dp=16, pp=8, cp=2))
    assert asked.group(replace(LAYOUT, tp=4)) == (0, 1, 2, 3)
    assert asked.made.count("group") == 2


def test_what_is_read_too_late_is_refused() -> None:
    """A mesh that an answer keeps knows nothing that its key does not have."""
    mesh = Asked().late(LAYOUT)
    with pytest.raises(AssertionError, match="tp of a layout is read after"):
        mesh.size("tp")


def test_a_view_is_no_value() -> None:
    """It cannot be a key, nor be copied unseen."""
    memo = Memo[object]()
    for wrong in (hash, lambda lay: lay == LAYOUT, lambda lay: replace(lay, tp=1), lambda lay: lay.put(tp=1)):
        with pytest.raises(TypeError):
            memo.ask(LAYOUT, (), wrong)


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_reading_keeps_answers_apart(seed: int) -> None:
    """Questions that read other fields, in another order, each time that they are answered: what they say is right."""
    random, memo = Random(seed), Memo[tuple[object, ...]]()
    names = ("tp", "pp", "dp", "zero", "schedule")

    def answer(layout: Layout) -> tuple[object, ...]:
        some = ["tp"] + [name for name in names[1:] if layout.tp > 1 or name in ("pp", "zero")]
        random.shuffle(some)
        told = {name: getattr(layout, name) for name in some}
        return tuple(told.get(name) for name in names)

    def fresh(layout: Layout) -> tuple[object, ...]:
        return tuple(getattr(layout, n) if layout.tp > 1 or n in ("tp", "pp", "zero") else None for n in names)

    for _ in range(300):
        layout = Layout(
            tp=random.choice((1, 2)), pp=random.choice((1, 2)), dp=random.choice((1, 2)), zero=random.choice((0, 1)),
            schedule=random.choice(("1f1b", "gpipe")),
        )  # fmt: skip
        assert memo.ask(layout, "key", answer) == fresh(layout)
    assert len(memo) <= 2**5
