"""Questions about layouts and their answers as JSON, asked alike of CPython and of Python in a browser.

It is run as a program by CPython and as a string by Pyodide: its last line is the answers.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from penteract import Cluster, Layout, estimate, plan
from penteract.config.resolve.presets import preset
from penteract.errors import BadInput
from penteract.planner.report.as_json import as_dict

H200 = Cluster(gpus=8, memory_gib=141.0)


def priced(name: str, layout: Layout, sequence_length: int, precision: str = "bf16") -> object:
    """All that an estimate says: every byte, wire and operation of every stage."""
    return plain(estimate(preset(name).model, layout, H200, sequence_length=sequence_length, precision=precision))


def planned(name: str, gpus: str, **words: Any) -> object:
    return as_dict(plan(name, gpus, **words))


def plain(value: Any) -> object:
    """Values as JSON: dataclasses by field; mappings as pairs, as their keys may be tuples."""
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return [[plain(k), plain(v)] for k, v in value.items()]
    return [plain(v) for v in value] if isinstance(value, tuple | list) else value


def refused() -> str:
    try:
        estimate(preset("llama-3.1-8b").model, Layout(tp=3), sequence_length=8192)
    except BadInput as error:
        return str(error)
    return "not refused"


CASES: dict[str, Callable[[], object]] = {
    "8B, dp 2 tp 4": lambda: priced(
        "llama-3.1-8b", Layout(dp=2, tp=4, gradient_accumulation_steps=4, zero=1), 8192),
    "8B, tp 2 pp 2 cp 2": lambda: priced(
        "llama-3.1-8b", Layout(tp=2, pp=2, cp=2, cp_method="ring", gradient_accumulation_steps=8), 8192),
    "8B, 2 chunks a rank": lambda: priced(
        "llama-3.1-8b", Layout(pp=4, vpp=2, schedule="interleaved", gradient_accumulation_steps=8), 4096),
    "experts, ep 8": lambda: priced("qwen3-30b-a3b", Layout(dp=8, ep=8), 4096),
    "tiny, fp32": lambda: priced(
        "tiny", Layout(dp=2, pp=2, schedule="zb_h1", gradient_accumulation_steps=4), 256, "fp32"),
    "plan, one layout": lambda: planned("llama-3.1-70b", "8x8xH100", layout="tp=8,pp=4,zero=1", batch="4Mi"),
    "plan, all layouts": lambda: planned("llama-3.1-8b", "8xH200", sequence_length=8192, batch="1Mi"),
    "a refusal": refused,
}  # fmt: skip


def answers() -> dict[str, Any]:
    """What each case says, and how many seconds it took."""
    told: dict[str, Any] = {"python": sys.version.split()[0], "platform": sys.platform, "says": {}, "seconds": {}}
    for name, ask in CASES.items():
        began = time.perf_counter()
        told["says"][name] = ask()
        told["seconds"][name] = time.perf_counter() - began
    line = {"torch", "numpy", "rich", "cyclopts"}  # none of which the answers may need
    return told | {"loaded": sorted(line & set(sys.modules))}


print(json.dumps(answers()))
