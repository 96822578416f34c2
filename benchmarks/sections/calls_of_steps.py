"""Sections on the ops and calls of whole steps: on the device, and by the host."""

from __future__ import annotations

from sections.page_parts import record, section, table


def ops_in_steps() -> str:
    found = record("profiled_ops_h200")
    rows = [
        (case["case"], op["op"].split(" (")[0], op["calls"], f"{op['planned_ms']:.2f}", f"{op['measured_ms']:.2f}",
         f"{op['planned_ms'] / op['measured_ms']:.2f}")
        for case in found["cases"].values() for op in case["ops"] if "attention" in op["op"] or "expert" in op["op"]
        if "linear (model/attention" not in op["op"]
    ]  # fmt: skip
    steps = [
        (case["case"], f"{case['planned_ms']:.0f}", f"{case['step_ms']:.0f}", f"{case['planned_ms'] / case['step_ms']:.2f}")
        for case in found["cases"].values()
    ]  # fmt: skip
    return section(
        "Attention and experts in steps, planned and measured",
        """\
Milliseconds in a step of one H200, by `penteract profile`. Text as bytes: routing is uneven, and the card is cooler than with
random tokens. Attention is priced by FLOPs and by the elements of its queries. A weight gradient of experts is priced as
one that is added to the bucket; in a step of one micro-batch it is written, which takes less.""",
        table("case | op | calls | planned, ms | measured, ms | planned ÷ measured", rows),
        table("case | step planned, ms | measured, ms | planned ÷ measured", steps),
        records=["profiled_ops_h200.json"],
    )


def host_calls() -> str:
    found = record("host_calls_h200")
    cases = {row["case"]: row for row in found["rows"]}
    names = dict.fromkeys(name for row in cases.values() for name in row["calls"])
    rows = [(name, *(f"{case['calls'][name]['us']:.0f} ({case['calls'][name]['calls']})" if name in case["calls"] else ""
                     for case in cases.values())) for name in names]  # fmt: skip
    experts = record("host_of_experts_h200")["parts"]
    jit, bound = experts["launched by the JIT"], experts["bound"]
    return section(
        "Calls of a step by the host",
        f"""\
What the host needs for each call of a step, median in microseconds, and how many a step has. Sequences are of 256 tokens, so
that the device waits for the host. Plans take the lowest of a row for what needs no other rank. The second table has calls of
experts on another, slower host, with kernels that Triton's JIT launches and with bound ones: such a step took it
{jit["host_ms"]:.1f} and {bound["host_ms"]:.1f} ms, with equal losses.""",
        table(f"call | {' | '.join(cases)}", rows),
        table(
            "call | JIT, µs | bound, µs",
            [(name, f"{us:.0f}", f"{bound['us'][name]:.0f}") for name, us in jit["us"].items()],
        ),
        records=["host_calls_h200.json", "host_of_experts_h200.json"],
    )
