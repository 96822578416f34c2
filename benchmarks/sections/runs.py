"""Sections on runs: parity, faults, checkpoints, losses."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from statistics import mean

from sections.page_parts import CASES, LAST, RESULTS, ms, percent, record, section, table, text


def parity() -> str:
    nccl, sweep = record("nccl_layouts"), record("test_all")
    rows = [(one["model"], text(one["layout"]), f"{one['gradient_error']:.1e}", f"{one['loss_error']:.1e}")
            for one in nccl["layouts"]]  # fmt: skip
    return section(
        "Gradients against one process",
        f"""\
Layouts on four GPUs with NCCL against one process of plain torch, in float64: the largest relative error of a gradient, and
the error of the loss.

On CPUs, {sweep["passed"]} of {sweep["cases"]} layouts pass; the largest gradient error is
{sweep["worst_gradient_error"]:.1e}.

Falls short: this record of CPUs is older than ZeRO and latent attention. The test suite tests random layouts with both.""",
        table("model | layout | gradient error | loss error", rows),
        records=["nccl_layouts.json", "test_all.json"],
    )


def killed_curve() -> str:
    found = {
        "CPU, small": record("killed_curve_cpu"),
        "H200, 1B": record("killed_curve_h200"),
        "H100, 8B": record("killed_curve_8b_h100"),
    }
    rows = [
        (where, part["layout"], part.get("killed_after_step", "-"), part.get("newest_checkpoint", "-"),
         f"{part['apart']['mean']:.1e}", f"{part['apart']['most']:.1e}")
        for where, one in found.items() for part in one["parts"]
    ]  # fmt: skip
    rows += [
        (where, f"{run['layout']}, undisturbed, again", "-", "-", f"{run['apart']['mean']:.1e}", f"{run['apart']['most']:.1e}")
        for where, one in found.items() for run in one["undisturbed"][1:]
    ]  # fmt: skip
    larger, largest = found["H200, 1B"], found["H100, 8B"]
    whole = larger["undisturbed"][0]["losses"]
    higher = sum(a > b for a, b in zip(larger["losses"], whole, strict=True))
    ended = [mean(losses[-20:]) for losses in (larger["losses"], whole)]
    ends = [mean(losses[-20:]) for losses in (largest["losses"], *(run["losses"] for run in largest["undisturbed"]))]
    resumed = [part["seconds"] for part in largest["parts"][1:]]
    return section(
        "A run that is killed and goes on with other layouts",
        f"""\
A run on text is killed, all processes at once, and goes on from its newest checkpoint with the next layout. Its losses
are beside those of a run that nobody kills: how far they are apart, in nats, on average and at most, within each part. A
small model on CPUs; Llama-3.2-1B in bf16 on two H200s, {larger["steps"]} steps, beside the undisturbed one on two more; and
Llama-3-8B on four H100s, {largest["steps"]} steps of 65,536 tokens, with two undisturbed runs after it.

bf16 rounds otherwise in each layout, and attention's gradients have no fixed order: on GPUs the curves part by little
before the first kill, too. Of the 8B, two runs of one layout that nobody kills part further than the killed one does: over
the last 20 steps the mean loss is {ends[0]:.3f} of the killed run, and {ends[1]:.3f} and {ends[2]:.3f} of the others. Of the 1B
it is {ended[0]:.3f} of the killed run and {ended[1]:.3f} of the other; in {higher} of the {larger["steps"]} steps that of the
killed run is higher.

The checkpoints of the 8B lie in memory, 96 GB each. The second and third part took {resumed[0]:.0f} and {resumed[1]:.0f} s, from
the start of their processes to the next kill, or the last step.

Falls short: it has not run for an hour; of the 1B there is one undisturbed run alone.""",
        table("model | layout | killed after step | goes on after step | apart, mean | most", rows),
        records=["killed_curve_cpu.json", "killed_curve_h200.json", "killed_curve_8b_h100.json"],
    )


def drawn_faults() -> str:
    found = record("test_faults")
    kills, damage = found["kills"], found["corruptions"]
    rows = [(name, count) for name, count in kills["layouts"].items()]
    wrong = "; ".join(f"{f['kind']} {f['number']}: {f['wrong'].partition(' after ')[0]}" for f in found["failures"])
    failed = f" Found, and to be drawn again where it is mended: {wrong}." if wrong else ""
    inputs = record("drawn_10000")
    slowest, refused = (
        inputs["slowest_cpu_seconds"][0][0],
        sum(n for code, n in inputs["exit_codes"].items() if code != "0"),
    )
    planned = f"{kills['planned']} kills and {damage['planned']:,} damaged checkpoints"
    return section(
        "Faults drawn at random",
        f"""\
Draws by a seed on a CPU (`make test-faults`). Runs are killed at random moments, up to three times, and resumed:
{kills["bitwise"]} of {kills["drawn"]} end bitwise as a run that nothing disturbed. Checkpoints are damaged at random and loaded:
of {damage["drawn"]}, {damage["silent"]} give a state that is not that of a whole step, {damage["wrong"]} are wrong in any way.{failed}

{"All that is planned has been drawn." if found["complete"] else f"Falls short: {planned} are planned; this is a first part of them."}

Of {inputs["distinct"]:,} distinct inputs (`tests/drawn_long.py`: run files, configs, data, weights, run folders, command lines, from
sound to hostile), {len(inputs["failures"])} ended with a traceback, left something behind or took longer than
{inputs["allowed_cpu_seconds"]:.0f} s of the processor: the slowest took {slowest:.2f} s. {refused:,} of {inputs["inputs"]:,} draws were refused.""",
        table("layout that was killed | draws", rows),
        records=["test_faults.json", "drawn_10000.json"],
    )


def wide_draws() -> str:
    found = record("drawn_wide")
    files = Counter[str]()
    for row in found["rows"]:
        files[row["property"].partition("::")[0].removeprefix("tests/")] += row["draws"]
    rest = found["properties"] - found["run"]
    return section(
        "Properties drawn wide",
        f"""\
Properties of layouts, programs and inputs that `make test` draws fewer of, each five times as often by a seed (`make test-all`):
{found["draws"]:,} draws of {found["run"]} properties, of which {found["failed"]} failed.\
{f" Falls short: {rest} more were not run." if rest else ""}""",
        table("tests | draws", list(files.items())),
        records=["drawn_wide.json"],
    )


def hosts_and_long_runs() -> str:
    hosts, pairs, soak = record("test_hosts"), record("reshard_380"), record("soak_10000")
    late = [row for row in soak["samples"] if row["step"] >= 2000]
    names = {"test_hosts_are_equal_to_one_host[2]": "two hosts", "test_hosts_are_equal_to_one_host[4]": "four hosts",
             "test_a_slow_link_that_is_cut_for_three_seconds_changes_nothing": "a slow link, cut for three seconds",
             "test_a_link_that_is_cut_for_good_ends_both_sides_and_the_run_goes_on_later": "a link cut for good, resumed",
             "test_a_host_that_is_gone_and_comes_back": "a host that is gone and comes back"}  # fmt: skip
    rows = [(names[name], row["outcome"], f"{row['seconds']:.0f}") for name, row in hosts["tests"].items()]
    return section(
        "Hosts, layouts, long runs",
        f"""\
On a CPU. Hosts are namespaces of one machine with torchrun between them (`make test-hosts`); each run must end bitwise as
one on a single host. Of {pairs["pairs"]} pairs of {len(pairs["layouts"])} layouts, {pairs["equal"]} read what the other saved, and
would save it again, byte for byte, in up to {pairs["files_of_one_rank"]} files a rank. {soak["steps"]:,} steps with {soak["saves"]} saves in the background: from step
{late[0]["step"]:,} on {late[0]["resident_mib"]:.1f} MiB are resident, {late[-1]["resident_mib"]:.1f} at the end;
{late[0]["descriptors"]} descriptors, {late[-1]["descriptors"]} at the end.""",
        table("hosts | outcome | seconds", rows),
        records=["test_hosts.json", "reshard_380.json", "soak_10000.json"],
    )


def background_saves() -> str:
    found = record("background_saves")
    rows = [(name, ms([1e3 * x for x in times])) for name, times in found["seconds"].items()]
    return section(
        "Saves in the background",
        f"""\
One rank on a CPU, {found["checkpoint_mib"]:.0f} MiB of fp32 state, both kinds of saves in turns in one run: with
`checkpoint.asynchronous` a save keeps the rank for {percent(found["save_returns_after"])} of the time of a save that it waits for
({percent(found["asked"])} were asked for). The step beside it takes {found["step_beside_a_save"]:.2f} times as long as one after a save at
once: writer and training share the cores. Only the ratios count: the load of the machine was {found["load_average"]}.

The next section has them on a GPU.""",
        table("what keeps the rank | milliseconds: median and range", rows),
        records=["background_saves.json"],
    )


def gpu_checkpoints() -> str:
    quiet, second, busy = (record(f"checkpoint_pause{name}") for name in ("", "_h100", "_busy_h200"))
    checks, kills = record("replica_checks_2xh200"), quiet["kills"]
    rows = [(found["device"] + (", busy host" if "beside" in found else ""), name, f"{save['returns_s']:.2f}",
             f"{save['durable_s']:.1f}", f"{save['pause_s']:.2f}")
            for found in (quiet, second, busy) for name, save in found["medians"].items() if isinstance(save, dict)]  # fmt: skip
    shares = [percent(found["medians"]["pause_of_one_at_once"]) for found in (quiet, second, busy)]
    return section(
        "Checkpoints on a GPU",
        f"""\
{quiet["model"]}, {quiet["checkpoint_bytes"] / 1e9:.1f} GB a checkpoint with fp32 master weights, on disks that take {quiet["disk_gb_s"]}, {second["disk_gb_s"]} and {busy["disk_gb_s"]} GB/s.
The pause of a save is what training lost until all of it was on the disk and, of ours, read back. A save in the background
costs {shares[0]} of the pause of one that is waited for, {shares[1]} on the second machine (5 % were asked for), and {shares[2]} where the
second GPU of the host trained other models at the same time. Beside it torch.distributed.checkpoint with eight threads; in
the background it stages into pinned memory and writes in a process of its own. Of one state saved both ways
{len(quiet["equal"]["differing"])} of {len(quiet["equal"]["files"])} files differ, though {quiet["equal"]["steps_meanwhile"]} steps were trained while the second was written.

Small runs with saves in the background were killed and resumed on this GPU, with its fastest kernels and with the
reference's attention: all {kills["fastest"]["steps"]} steps and the last checkpoint are bitwise those of a run that nothing disturbed. Their
sequences of 1,024 tokens are short; the next section has longer ones.

Comparing replicas on two GPUs costs {1e3 * checks["zero_0"]["check_s"]:.0f} ms without ZeRO, {100 * checks["zero_0"]["share_of_time"]:.2f} % of the time of a
run that does so every 100 steps, and {1e3 * checks["zero_1"]["check_s"]:.0f} ms at ZeRO 1, {100 * checks["zero_1"]["share_of_time"]:.2f} % (at most 0.5 % were asked for).

Falls short: each kind of save was timed once on a machine. torch's asynchronous save needs a new stager for each save: torch
2.11's fails at its second (pytorch issue 183413), as it did in the first of these records.""",
        table("machine | save | returns after, s | on the disk after, s | pause, s", rows),
        records=[
            "checkpoint_pause.json",
            "checkpoint_pause_h100.json",
            "checkpoint_pause_busy_h200.json",
            "replica_checks_2xh200.json",
        ],
    )


def training_runs() -> str:
    log = (RESULTS / "nccl_training.log").read_text(encoding="utf-8")
    codes = re.findall(r"^rc (\d+)$", log, re.MULTILINE)
    rows = list[Sequence[object]]()
    for run in log.split("=== ")[1:]:
        command = run.splitlines()[0]
        line = re.search(r"loss (\S+) over (\d+) steps · gradient at step 1 (\S+)", run)
        if line:
            rows.append((f"`{command}`", line[2], line[1], line[3]))
        elif found := re.search(r'^\{.*"max_abs_loss_difference".*\}$', run, re.MULTILINE):
            summary = json.loads(found[0])
            rows.append((f"`{command}`", summary["compared_steps"], f"{summary['max_abs_loss_difference']:.1e}",
                         f"{summary['max_rel_gradient_difference_step1']:.1e}"))  # fmt: skip
    return section(
        "Training runs on NCCL",
        f"""\
`penteract train` on four GPUs. Each layout is compared with the run before it: the largest difference of a loss, and of the
gradients of step 1. The log also has a run that resumes on another layout, and a run in which one rank is killed: all other
ranks end, and the exit code is {codes[-1]}.""",
        table("arguments | steps | loss | gradient", rows),
        records=["nccl_training.log"],
    )


def precision_recipes() -> str:
    curves, tiny = record("recipe_curves_1b_h200"), record("precision_300")
    last = {row["recipe"]: mean(row["losses"][-LAST:]) for row in curves["rows"]}
    rows = [(row["recipe"], f"{last[row['recipe']]:.3f}", percent(last[row["recipe"]] / last["bf16"] - 1),
             f"{row['allocated_gib']:.2f}") for row in curves["rows"]]  # fmt: skip
    small = [
        (CASES.get(name, name), f"{loss:.4f}", percent(loss / tiny["losses"]["fp32"] - 1))
        for name, loss in tiny["losses"].items()
    ]
    return section(
        "Loss by precision",
        f"""\
{len(curves["rows"][0]["losses"])} steps of {curves["model"]} on bytes of text, with the same initial weights: the mean of the
last {LAST} losses ([curves](../benchmarks/results/recipe_curves_1b_h200.svg)). The second table has {tiny["steps"]} steps of a
tiny model on a CPU: the mean of the last {tiny["last"]} losses. All must be
within {percent(tiny["within"])} of fp32.

Falls short: the runs are short. The initial weights of the 1B model were drawn in bf16, so the small first updates of the
master weights did not change the bf16 parameters. The script now draws weights in fp32, but has not been run again.""",
        table("recipe | loss | against bf16 | allocated, GiB", rows),
        table("recipe, tiny model | loss | against fp32", small),
        records=["recipe_curves_1b_h200.json", "precision_300.json"],
    )
