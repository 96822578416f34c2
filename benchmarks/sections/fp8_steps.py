"""The section on what FP8 does once in a step, and which kernels multiply."""

from __future__ import annotations

from sections.beside_peers import BESIDE
from sections.page_parts import record, section, table


def fp8_in_steps() -> str:
    found, casts = record("fp8_products_h200"), record("sampled_gradients_h200")
    rows = [
        (BESIDE[row["case"]], who, f"{row[who]['median_ms']:.1f} ({low:.1f}–{high:.1f})", f"{row[who]['products']['ms']:.1f}")
        for row in found["steps"] for who in ("torch", "ours") for low, high in [row[who]["spread_ms"]]
    ]  # fmt: skip
    many, correct = found["steps"][0]["ours"]["steps"], found["correct"]
    held = [row.get("held", True) for row in casts["correct"]]
    (plain,) = (row["seconds"] for row in casts["sampled"] if row["of"] == "values" and not row["above"])
    once = [
        ("above the margin" if row["above"] else "within the margin", f"{row['scale_above']:.0f}",
         *(f"{1e3 * row['seconds'][way]:.3f}" for way in ("twice", "once")), "yes" if all(row["held"].values()) else "no")
        for row in casts["sampled"] if row["of"] == "slopes"
    ]  # fmt: skip
    return section(
        "FP8 in a step: gradients that are read once, and the kernels of products",
        f"""\
Of the algorithms that cuBLASLt offers for a product with sums in fewer bits, torch takes the first. The first whose warp groups
take tiles in turns is faster in a step. Steps with both, in turns in one process, {many} of each that are measured: the median,
its range, and all FP8 products of a step in a profile. Where only forward products have sums in fewer bits, which is the
default, the step gains nothing that could be measured, and torch's choice stays. {sum(one["error"] == 0 for one in correct)} of {len(correct)} products of a layer have the
bits of torch's.

The scale of the gradients of gate and up may come from some rows, and then what they are made of is read once and not twice.
The second table has {casts["tokens"]:,} tokens and gate and up of 4,096 columns, with numbers in a row outside the sample that are
far above the margin or are not. Above it all is cast again, which costs more than reading twice. "Scale": over the one from
all rows. "Numbers": they are those by the scale from all rows, but for what is smaller than the smallest number. Gradients that
are one tensor gained {100 * (1 - plain["once"] / plain["twice"]):.0f} %, and are read twice. {sum(held)} of {len(held)} other comparisons on this GPU hold, of casts with those of a
CPU and of products with emulated ones.""",
        table("step | algorithms | ms | FP8 products, ms", rows),
        table("numbers outside the sample | scale | read twice, ms | read once, ms | numbers as expected", once),
        records=["fp8_products_h200.json", "sampled_gradients_h200.json"],
    )
