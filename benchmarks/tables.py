"""Write docs/benchmarks.md from the records in benchmarks/results.

    python benchmarks/tables.py          # writes the page
    python benchmarks/tables.py --check  # exit code 1 if the page is not what the records give

Each function in `sections/` writes one section: what was measured and how, what falls short, and a table. All numbers come from
records, which are listed below the tables.
"""

from __future__ import annotations

import argparse

from sections.beside_peers import (
    against_torchtitan,
    against_torchtitan_elsewhere,
    against_torchtitan_on_four,
    collectives_beside_products,
    other_trainers,
)
from sections.calls_of_steps import host_calls, ops_in_steps
from sections.expert_rows import gathered_tokens, padded_rows
from sections.fitting import (
    at_the_limit,
    large_model,
    memory_options,
    options_on_one_gpu,
    playbook_figures,
    without_memory,
)
from sections.fp8_steps import fp8_in_steps
from sections.kernels import (
    attention,
    bound_launches,
    calibrated_links,
    captured_step,
    chunked_loss,
    embedding_forms,
    fp8,
    gated_backward,
    loss_forms,
    norm_forms,
    optimizer_update,
    rates,
    step_ends,
    triton_kernels,
    update_forms,
)
from sections.page_parts import ROOT
from sections.planning import explore_page, planner_speed, rehearsals
from sections.repeats import repeated_runs
from sections.runs import (
    background_saves,
    drawn_faults,
    gpu_checkpoints,
    hosts_and_long_runs,
    killed_curve,
    parity,
    precision_recipes,
    training_runs,
    wide_draws,
)
from sections.step_times import (
    drawn_sweeps,
    four_gpus,
    newcomers_path,
    planned_first,
    planned_times,
    profile_of_a_step,
    profiles,
    start_of_a_step,
)

PAGE = ROOT / "docs" / "benchmarks.md"
INTRODUCTION = """\
# Benchmarks

`python benchmarks/tables.py` writes this page from the records in [`benchmarks/results/`](../benchmarks/results/). Do not
edit it by hand: a test compares it with the records. Most records contain the command, the commit and the versions that
they were made with.

How to read the tables:

- A step time is the median over the timed steps. The range in brackets is from the shortest to the longest.
- "Planned" is the time that the planner simulates for the same layout. "Recorded/planned" above 1 means that the step took
  longer than planned.
- "Predicted" memory is counted by the planner. "Allocated" is the largest peak that torch reported on any rank.
- Layouts are written as `penteract plan --layout` takes them."""
NOT_MEASURED = """\
## What has not been measured

- **Several nodes.** All runs used one host. Plans for several nodes use modelled links.
- **Long runs on GPUs** with Muon, with weights gathered in FP8, and with experts in FP8. Tests on CPUs cover all three. On
  GPUs there are only the short runs above of Muon and of gathered FP8 weights, and matrix products of experts in FP8.
- **Latent attention and weights from Hugging Face on GPUs.** Tests on CPUs compare them with plain torch and transformers.
- **macOS and Windows.** Nothing has been run there."""
SECTIONS = (against_torchtitan, against_torchtitan_elsewhere, against_torchtitan_on_four, collectives_beside_products, profile_of_a_step, drawn_sweeps, gathered_tokens, padded_rows, planned_first, newcomers_path, without_memory, at_the_limit, playbook_figures, triton_kernels, ops_in_steps, planned_times, four_gpus, options_on_one_gpu, memory_options, large_model, profiles, start_of_a_step, attention, chunked_loss, fp8, fp8_in_steps,
            optimizer_update, update_forms, loss_forms, norm_forms, embedding_forms, bound_launches, host_calls, gated_backward, step_ends, captured_step, parity, drawn_faults, killed_curve, wide_draws, hosts_and_long_runs, background_saves, gpu_checkpoints, repeated_runs, training_runs, precision_recipes, other_trainers, planner_speed,
            rehearsals, explore_page, calibrated_links, rates)  # fmt: skip


def page() -> str:
    """The whole page, made from the records."""
    return "\n\n".join([INTRODUCTION, *(make() for make in SECTIONS), NOT_MEASURED]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Write docs/benchmarks.md from the records in benchmarks/results.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page is not up to date")
    if not parser.parse_args().check:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    same = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page()
    if not same:
        print("docs/benchmarks.md does not match the records; fix: python benchmarks/tables.py")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
