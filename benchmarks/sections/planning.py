"""Sections on what needs no GPU: the planner, rehearsals, the explorer's page."""

from __future__ import annotations

from statistics import median

from sections.page_parts import record, section, table


def planner_speed() -> str:
    found, asked, planned = record("planner_speed"), record("asked_2000"), record("planned_40")

    def seconds(of: dict[str, float]) -> str:
        return f"{of['median']:.2f} ({of['least']:.2f}–{of['most']:.2f})"

    rows = [
        (name, f"{one['counts']['enumerated']:,}", f"{one['counts']['priced']:,}", one["counts"]["simulated"],
         seconds(one["seconds"]), f"{plans['ratio_alone']:.2f}", seconds(plans["now"]["seconds"]), f"{plans['ratio']:.2f}",
         f"{plans['now']['cpu_seconds']['median'] / one['cpu_seconds']['median']:.2f}")
        for name, plans in found["plans"].items() for one in (plans["alone"],)
    ]  # fmt: skip
    workers = record("planner_workers")
    numbers = sorted({n for some in workers["seconds"].values() for n in some}, key=int)
    by_workers = [
        (name, *[f"{median(some[n]):.2f}" if n in some else "" for n in numbers])
        for name, some in workers["seconds"].items()
    ]
    counts = " and ".join([str(plans["runs"]) for plans in found["plans"].values()])
    tried = " and ".join([f"{plans['base']['counts']['enumerated']:,}" for plans in found["plans"].values()])
    others = sum(bool(row["failure"]) for row in planned["rows"])
    unlike = sum(one["unlike_fresh"] + one["unlike_fresh_then"] for one in asked["models"].values())
    return section(
        "Speed of the planner",
        f"""\
Whole searches on {found["cores"]} cores, {counts} runs each: in one process, and with workers that search a share ahead. Ratios
are to commit `{found["base_commit"][:7]}` in the same run, which tried {tried} layouts in one process; the last one is of the CPU
seconds of all processes to those of one. Answers are compared, and are the same. The second record has estimates of {asked["layouts"]:,} layouts in random
order by one planner, each compared with the estimate of a new planner. The third has the plans of {planned["questions"]} drawn
questions, each compared with simulating each of its layouts that fit.

{"Falls short: " if unlike or others else ""}{unlike} of these estimates and {others} of these plans differ.""",
        table("search | layouts | priced | simulated | seconds in one process | ratio | seconds | ratio | CPU", rows),
        f"On {workers['cores']} cores, medians of two or three: seconds with so many workers.",
        table(f"search | {' | '.join(numbers)}", by_workers),
        records=["planner_speed.json", "planner_workers.json", "asked_2000.json", "planned_40.json"],
    )


def rehearsals() -> str:
    found, runs = record("rehearsal"), record("rehearsed_12")
    rows = [(f"`{row['layout']}`", 1 + len(row["held_against"]), f"{row['cpu_s']:.0f}", f"{row['most_gib']:.2f}",
             f"{row['peak'] / 2**30:.2f}", len(row["mismatches"])) for row in found["rows"]]  # fmt: skip
    wrong = sum(bool(row["differences"]) for row in runs["rows"])
    return section(
        "Rehearsals",
        f"""\
One rank of Llama-3.1-405B on 4,096 GPUs, with the ranks that it is held against, on a CPU without a GPU: CPU seconds and
memory of the process, and the peak that the rank would allocate.

The second record has {runs["layouts"]} drawn layouts of eight ranks, rehearsed and run under gloo: every call on a wire in
order, and every byte. {wrong} of them differ.""",
        table("layout | ranks walked | CPU seconds | GiB of the process | GiB allocated | mismatches", rows),
        records=["rehearsal.json", "rehearsed_12.json"],
    )


def explore_page() -> str:
    found = record("explore_page")
    flat = [
        (f"{page}: {what}" if "median" in took else f"{page}: {what}: {part}", one)
        for page, times in found["seconds"].items() for what, took in times.items()
        for part, one in (took.items() if "median" not in took else [("", took)])
    ]  # fmt: skip
    rows = [(name, f"{took['median']:.2f}", f"{took['worst']:.2f}") for name, took in flat]
    return section(
        "The explorer's page",
        f"""\
Seconds in {found["browser"]} on {found["cores"]} cores, each {found["times"]} times. Other programs ran too: the load of the machine
was {found["load_before"]} before. A changed layout is drawn in all figures but the slower ones (the step, and what would fit).""",
        table("page | median | worst", rows),
        records=["explore_page.json"],
    )
