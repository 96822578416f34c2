"""`penteract rehearse`: its exit codes, and lines for what cannot be."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from measure.rehearse import faults

Tell = Callable[..., Any]
# Scores of long sequences, all in one micro-batch.
LARGE = ("--batch.sequence_length", "8192", "--batch.micro_batch_size", "32", "--batch.global_batch_size", "64",
         "--training.validation_every", "0", "--gpus", "1xH100")  # fmt: skip


def test_a_sound_run_ends_with_0(tell: Tell) -> None:
    told = tell("rehearse", "--parallel.dp", "2", "--batch.sequence_length", "16", "--gpus", "2xH200", "--json")
    made = json.loads(told.out)
    assert (told.code, told.err, made["mismatches"]) == (0, "", [])
    assert [one["fits"] for one in made["ranks"]] == [True]


def test_values_and_gradients_are_messages_of_their_own(tell: Tell) -> None:
    out = tell("rehearse", "--parallel.pp", "4", "--rank", "1", "--batch.sequence_length", "16").out
    for what in ("received, values", "sent, values", "received, gradients", "sent, gradients"):
        assert out.count(f"messages {what} ") == 1


def test_packages_of_kernels_need_not_be_here(tell: Tell) -> None:
    """A rehearsal computes nothing: what the ranks' hosts need is said."""
    words = ("--kernels.attention", "fa4", "--precision.dtype", "bf16", "--data.pack_documents", "false")
    told = tell("rehearse", *words, "--batch.sequence_length", "16", "--gpus", "1xH200")
    assert told.code == 0, told.err
    assert "Taken to be on the ranks' hosts: flash-attn-4 4.0.0b36." in told.out


def test_a_rank_that_does_not_fit_ends_with_71_and_changes_that_fit(tell: Tell) -> None:
    told = tell("rehearse", *LARGE)
    assert told.code == 71, told
    assert "Nothing is wrong" not in told.out
    line = re.fullmatch(
        r"error\[FIT\]: rank 0 does not fit its H100: .+ · found (\S+) GiB / allowed (\S+) GiB · fix: (.+)\n", told.err
    )
    assert line, told.err
    assert float(line[1]) > float(line[2])
    fixes = re.findall(r"(--[a-z].+?) \((\S+) GiB, (\S+) times the step\)", line[3])
    assert fixes
    assert all(float(size) <= float(line[2]) for _, size, _ in fixes)
    best = fixes[0][0].split()
    assert tell("rehearse", *_with(LARGE, best)).code == 0, best


def _with(words: Sequence[str], change: Sequence[str]) -> list[str]:
    """Options with another value of some."""
    options = dict(zip(words[::2], words[1::2], strict=True)) | dict(zip(change[::2], change[1::2], strict=True))
    return [word for option in options.items() for word in option]


def test_a_mismatch_ends_with_70(tell: Tell) -> None:
    with ExitStack() as stack:
        faults.collective_left_out(stack)
        told = tell("rehearse", "--parallel.dp", "2", "--batch.sequence_length", "16")
    assert (told.code, told.err) == (70, "")
    assert re.search(r"^mismatch\[COLLECTIVE\]: rank 0 · .+ on rank 1 .+$", told.out, re.MULTILINE), told.out
    assert "Nothing is wrong" not in told.out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--rank", "1"), "RANK]: the run has no such rank · --rank · found 1 / allowed 0 to 0 · fix: --rank 0"),
        (("--rank", "-1"), "RANK]: the run has no such rank · --rank · found -1"),
        (("--rank", "0", "--corners"), "USAGE]: a rank of every kind, or one rank · --corners · found --rank 0 too"),
        (("none.toml",), "FILE]: cannot be read: No such file or directory · none.toml · fix: check the path"),
        (("--parallel.dp", "2", "--gpus", "4xH100"), "4"),
        (("--headroom", "3"), "VALUE]: not a share · --headroom · found 3.0"),
    ],
)
def test_what_cannot_be_is_one_line(tell: Tell, words: tuple[str, ...], line: str) -> None:
    told = tell("rehearse", *words)
    assert (told.code, told.out, told.err.count("\n")) == (2, "", 1), told
    assert line in told.err and "fix: " in told.err
