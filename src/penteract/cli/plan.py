"""`penteract plan`: the best layouts of a model on a cluster, with reasons. Needs no torch."""

from __future__ import annotations

import json as to_json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

from cyclopts import Parameter

from penteract.api import plan as ask_plan
from penteract.cli.resolve.overrides import parts_of_precision
from penteract.cli.resolve.planning.files import check_files, not_written, report_if_stopped, write_all
from penteract.cli.resolve.planning.progress_line import ProgressLine, on_a_terminal, terminal_width
from penteract.config.device_words import of_cpu
from penteract.config.hardware import HEADROOM
from penteract.errors import BadInput
from penteract.planner.options import check_option, check_options
from penteract.planner.plan import Plan, estimator
from penteract.planner.report.as_json import TrainingCost, as_dict, budget
from penteract.planner.report.as_text import as_text_whole, basis, spent, stopped, wrapped
from penteract.planner.report.explain import contest, explain, named
from penteract.planner.report.largest_parts import largest_parts
from penteract.planner.report.memory_by_line import memory_by_line
from penteract.planner.report.models_table import catalogue, catalogue_rows
from penteract.planner.report.what_if import sentence, what_if
from penteract.planner.search.best import Timed
from penteract.planner.search.collector import uncollected
from penteract.planner.search.progress import Stopped
from penteract.planner.token_counts import parse_length
from penteract.units import parse_count

EXAMPLES = (
    "penteract plan llama-3.1-8b --gpus 8xH200",
    "penteract plan llama-3.1-70b --gpus 8x8xH100 --seq 8192 --batch 4Mi --tokens 15T --usd-per-gpu-hour 2.5",
    "penteract plan path/to/config.json --gpus 8xH200 --fix tp=2/4,recompute=none --why 2",
    "penteract plan llama-3.1-8b --gpus 8xH200 --layout tp=2,pp=2,zero=1 --draw",
    "penteract plan llama-3.1-8b --gpus 8xA100-40GB --layout zero=3,recompute=budget:0.5",
    "penteract plan llama-3.1-70b --gpus 4x8xH100 --fix zero=2/3,shard_group=8",
    "penteract plan llama-3.1-8b --gpus 8xH200 --precision bf16,bf16_pure",
    "penteract plan llama-3.1-8b --gpus 8xH200 --precision fp8_tensorwise --precision.fp8_gather true",
    "penteract plan llama-3.1-8b --gpus 8xH200 --out run.toml",
    "penteract plan llama-3.1-8b --gpus 8xH200 --layout tp=2,pp=4 --trace step.json",
    "penteract plan --models",
)


@uncollected()
def plan(  # noqa: PLR0913 (the options of a verb are its parameters)
    model: Annotated[str, Parameter(help="A published model (--models), a config.json, or its folder.")] = "",
    /,
    *,
    gpus: Annotated[str, Parameter(help="8xH200, 64x8xH100 (nodes x GPUs), here, or a file of `calibrate`.")] = "",
    models: Annotated[bool, Parameter(negative="", help="List the published models and exit.")] = False,
    seq: Annotated[
        str | None, Parameter(help="Tokens a sequence, as 8192 or 8Ki; that by default, or the model's limit.")] = None,
    batch: Annotated[str, Parameter(help="Global batch size in tokens (1Mi) or sequences (128seqs).")] = "1Mi",
    top: Annotated[int, Parameter(help="How many layouts to show, the fastest first.")] = 10,
    why: Annotated[
        int | None, Parameter(help="Explain the layout of this number: its memory, and what would beat it.")] = None,
    all: Annotated[bool, Parameter(negative="", help="With --why: every row, with its formula.")] = False,
    layout: Annotated[str | None, Parameter(help="Estimate this layout alone: tp=2,pp=2,zero=1. dp follows.")] = None,
    fix: Annotated[
        str | None,
        Parameter(help="Search only layouts with these settings, a slash between values: tp=2/4,recompute=none. "
            "Settings have names as in the table, or as keys of run files in parallel, memory and kernels.")] = None,
    tp_across_nodes: Annotated[bool, Parameter(negative="", help="Also try tensor groups that span nodes.")] = False,
    draw: Annotated[
        bool, Parameter(negative="", help="Draw the pipeline schedule of the fastest layout, or of --why.")] = False,
    tokens: Annotated[str | None, Parameter(help="Tokens of the whole training (15T): its days, GPU-hours.")] = None,
    usd_per_gpu_hour: Annotated[float | None, Parameter(help="With --tokens: US dollars, for the cost.")] = None,
    precision: Annotated[
        str | None,
        Parameter(help="A precision recipe, or several to compare: bf16,bf16_pure. Its parts are set as in run files: "
            "--precision.moments int8. It changes the numerics. By default as in train: bf16, on CPUs fp32.")] = None,
    modules: Annotated[
        str,
        Parameter(help="Short for --precision.modules, by name: `*:moments=int8,embedding*:moments=fp32`.")] = "",
    optimizer: Annotated[
        str, Parameter(help="adamw; or muon, which uses AdamW for all but matrices between hidden states.")] = "adamw",
    headroom: Annotated[float, Parameter(help="Fraction of a GPU's memory that is kept free of tensors.")] = HEADROOM,
    imbalance: Annotated[
        float, Parameter(help="Where ep > 1: tokens that the fullest GPU's experts get, over the mean.")] = 1.0,
    packages: Annotated[
        str | None, Parameter(help="Packages of kernels on the GPUs' hosts: flash-attn-4,quack-kernels, or none. By "
            "default both, as penteract[gpu] installs them; with --gpus here those that are installed.")] = None,
    out: Annotated[Path | None, Parameter(help="Write a run file of the fastest layout, or of --why.")] = None,
    trace: Annotated[
        Path | None,
        Parameter(help="Write a step of the fastest layout, or of --why, for ui.perfetto.dev.")] = None,
    trace_pp_rank: Annotated[int | None, Parameter(help="With --trace: this pipeline rank alone, from 0.")] = None,
    json: Annotated[
        bool, Parameter(negative="", help="Print one JSON object (schema_version 1) instead of the table.")] = False,
    debug: Annotated[bool, Parameter(negative="", help="Show the traceback of an error.")] = False,
    overrides: Annotated[Sequence[str], Parameter(parse=False)],
) -> int:  # fmt: skip
    """Rank the layouts that fit in the memory of a cluster, by the simulated time of a training step.

    Layouts that recompute or shard more than they need to fit are left out; --layout and --fix can still name them.

    A search over two seconds shows its progress, one over ten on stderr too. Ctrl-C prints the best so far.

    Exit codes: 0 a layout fits; 2 none fits, or the input is invalid; 130 the search was stopped.
    """
    started = perf_counter()
    if models:
        print(to_json.dumps({"models": catalogue_rows()}) if json else catalogue())
        return 0
    length = _asked_length(model, gpus, seq)
    check_options(top=top, why=why, seq=length, usd_per_gpu_hour=usd_per_gpu_hour)
    training_tokens = _count(tokens) if tokens is not None else None
    _check_words(layout=layout, fix=fix, tokens=tokens, usd=usd_per_gpu_hour, draw=draw and json)
    _check_why(why, top, searches=layout is None, every=all)
    check_files(out, trace, trace_pp_rank)
    with ProgressLine(shown=on_a_terminal() and not json, log=sys.stderr) as line, report_if_stopped(out, trace):
        found = _unless_stopped(
            model, gpus, sequence_length=length, batch=batch, top=top, layout=layout, fix=fix,
            tp_across_nodes=tp_across_nodes, precision=precision, parts=parts_of_precision(overrides), modules=modules,
            optimizer=optimizer, headroom=headroom, imbalance=imbalance, packages=packages, number=why or 1, watch=line,
        )  # fmt: skip
    searched = perf_counter() - started
    if not found.complete:
        print(to_json.dumps(as_dict(found)) if json else stopped(found, searched, terminal_width()))
        not_written(out, trace)
        return 130
    chosen = found.number(why or 1) if found.layouts or why or out or trace else None
    cost = budget(found, chosen, training_tokens, usd_per_gpu_hour) if chosen and training_tokens else None
    written = write_all(found, chosen, why or 1, out, trace, trace_pp_rank) if chosen else []
    reasons = _reasons(found, chosen, why) if chosen and found.counts.fit and (why or not json) else []
    if json:
        terms = memory_by_line(found, chosen).as_dict() if chosen and why else None
        _print_json(found, {"budget": cost and asdict(cost), "explanation": reasons, "terms": terms}, written)
        return _exit_code(found)
    print(as_text_whole(found, chosen, searched, reasons, terminal_width()))
    if chosen:
        last = [*written, _next(why, out, fits=bool(found.counts.fit), every=all)]
        _show(found, chosen, cost, last, why=why, every=all, draw=draw)
    return _exit_code(found)


def _exit_code(found: Plan) -> int:
    """The exit code of a plan. If no layout fits, the error is printed too."""
    if (refusal := found.refusal) is None:
        return 0
    print(refusal, file=sys.stderr)
    return refusal.exit_code


def _where(found: Plan, chosen: Timed, *, every: bool) -> str:
    """Where the memory, work and messages of a layout come from: the largest parts, or `every` row and the rates."""
    width = min(100, terminal_width() or 100)
    if not every:
        return largest_parts(found, chosen, width)
    return f"{wrapped(basis(found), terminal_width())}\n\n{memory_by_line(found, chosen).text(width=width)}"


def _show(
    found: Plan,
    chosen: Timed,
    cost: TrainingCost | None,
    last: Sequence[str],
    *,
    why: int | None,
    every: bool,
    draw: bool,
) -> None:
    if cost:
        print("\n" + wrapped(spent(cost, found.ask.cluster.gpus, on_cpus=of_cpu(found.ask.cluster)), terminal_width()))
    if why:
        print("\n" + _where(found, chosen, every=every))
    if draw:
        from penteract.schedule.draw import draw_generated  # imported here: most plans do without it

        lay, width = chosen.layout, shutil.get_terminal_size().columns
        print("\n" + draw_generated(lay.schedule, lay.vpp, lay.placement, lay.gradient_accumulation_steps, width=width))
    print("\n" + wrapped("\n".join(last), terminal_width()))


def _print_json(found: Plan, more: Mapping[str, Any], written: Sequence[str]) -> None:
    report = as_dict(found) | {key: value for key, value in more.items() if value}
    print(to_json.dumps(report | {"notes": [*report["notes"], *written]}))


def _unless_stopped(*args: Any, **kwargs: Any) -> Plan:
    """The plan, or what had been found when the user stopped the search."""
    try:
        return ask_plan(*args, **kwargs)
    except Stopped as stop:
        return stop.plan


def _asked_length(model: str, gpus: str, seq: str | None) -> int | None:
    """The tokens of a sequence that are asked for. Raises BadInput for those, and without a model or GPUs."""
    if not model:
        fix = "penteract plan llama-3.1-8b --gpus 8xH200; --models lists the models"
        raise BadInput("USAGE", "which model?", found="none", allowed="a name, a config.json or its folder", fix=fix)
    if not gpus:
        raise BadInput("USAGE", "on which GPUs?", where="--gpus", found="none", allowed="such as 8xH200, 64x8xH100",
                       fix="--gpus 8xH200")  # fmt: skip
    return None if seq is None else parse_length(seq)


def _check_words(*, layout: str | None, fix: str | None, tokens: str | None, usd: float | None, draw: bool) -> None:
    """Raise BadInput for options that contradict each other."""
    if layout is not None and fix is not None:
        raise BadInput(
            "USAGE", "one layout has nothing to search", where="--fix", found=fix, fix="drop --layout or --fix"
        )
    if draw:
        raise BadInput("USAGE", "a drawing is not JSON", where="--draw", found="--json", fix="drop --draw or --json")
    if usd is not None and tokens is None:
        raise BadInput("USAGE", "a cost needs a number of tokens", where="--usd-per-gpu-hour", found="no --tokens",
                       fix="--tokens 1T")  # fmt: skip


def _check_why(why: int | None, top: int, *, searches: bool, every: bool) -> None:
    """Raise BadInput for a number that the table will not have, and for all rows of no layout."""
    if every and why is None:
        raise BadInput("USAGE", "every row of which layout?", where="--all", found="no --why", fix="--why 1 --all")
    if searches and why is not None and why > top:
        raise BadInput("NUMBER", "the table has no layout of that number", where="--why", found=why,
                       allowed=f"1 to {top} (--top)", fix=f"--top {why} --why {why}")  # fmt: skip


def _reasons(found: Plan, chosen: Timed, why: int | None) -> list[str]:
    lines = explain(found, chosen).lines()
    return lines + ([_what_if(found, chosen)] if why is not None and len(found.search.estimates) > 1 else [])


def _what_if(found: Plan, chosen: Timed) -> str:
    two = contest(found, chosen)
    if two is None:
        return "There is no layout of another mesh."
    return sentence(named(found, two[1]), what_if(found, *two, estimator))


def _next(why: int | None, out: Path | None, *, fits: bool, every: bool) -> str:
    rest = [] if why else ["--why 1 shows what takes its memory and time, and what would change it"]
    if why and not every:
        rest.append(f"--why {why} --all prints every row with its formula, and where each rate comes from")
    if fits:
        rest += [f"penteract train {out}"] if out else ["--out run.toml writes a file for penteract train"]
    return "Next: " + "; ".join(rest) if rest else ""


def _count(text: str) -> int:
    """A number of tokens, such as 15T."""
    try:
        count = parse_count(text)
    except ValueError as error:
        raise BadInput("VALUE", "not a number of tokens", where="--tokens", found=text, fix="--tokens 15T") from error
    check_option("--tokens", count)
    return count
