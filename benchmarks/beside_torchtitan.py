"""This program against torchtitan 0.2.2 with torch.compile, on one GPU, two or four, in alternating runs with the same batches
and clock.

    python benchmarks/beside_torchtitan.py --out FILE.json [--budget 540] [--pairs 3] [--cases A1,B1]

Each run is a process of 18 steps, of which the last ten are measured. The time of a step is that between two CUDA events, at
the ends of two optimizer steps. torchtitan first runs in both of its modes (`beside_peer.py`); then the faster mode
alternates with our runs. FILE.json is written after each run. The call ends when the rest of `--budget` (seconds) may not be
enough for another run. A later call with the same FILE.json continues.

The ratio of a row is our tokens per second over torchtitan's, each the median of the runs. Clock, power and temperature are
medians of what nvidia-smi reports, twice a second, while steps are measured. A run is left out if its loss is not finite or
does not fall. Our runs go on for a few steps under torch's profiler, which are not timed: `beside_waits.py` says what the
record has of them. Without network access, install torchtitan from wheels: torchtitan, torchao 0.17.0, torchdata, tyro.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from beside_sides import CASES, UNFINISHED, started_ranks
from provenance import hexadecimal, provenance

HERE = Path(__file__).parent
ALL = ("A1", "A1_fp8", "B1", "E1", "F1")
MODES = ("stock", "fsdp")
FIRST = 150.0  # seconds that the first run of a kind may need
QUERY = "clocks.sm,power.draw,temperature.gpu"


class GpuMonitor:
    """Reads clock, power and temperature from nvidia-smi twice a second, with the time of each reading."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float, float, float]] = []
        device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
        command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits", "-lms", "500", "-i", device]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            try:
                clock, power, heat = map(float, line.split(","))
            except ValueError:  # this GPU does not report all of them
                continue
            self.seen.append((time.time(), clock, power, heat))

    def between(self, begin: float, end: float) -> dict[str, Any]:
        """Medians of the readings between two times."""
        rows = [row for row in self.seen if begin <= row[0] <= end]
        names = ("clock_mhz", "power_w", "temperature_c")
        return {name: median(row[i] for row in rows) if rows else None for i, name in enumerate(names, 1)}


def run(command: list[str], monitor: GpuMonitor, limit: float) -> dict[str, Any]:
    """Run one side in a process. -> its record, or the reason why there is none."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "record.json"
        arguments = [str(HERE / command[0]), *(w.replace("OUT", str(out)) for w in command[1:])]
        launcher, environment = started_ranks(CASES[command[1]].gpus)
        arguments = [sys.executable, *launcher, *arguments]
        with subprocess.Popen(
            arguments,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                why = process.communicate(timeout=limit)[0][-1500:]
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # its ranks too
                why = f"it ran past {limit:.0f} s"
        found = json.loads(out.read_text()) if out.exists() else {"failed": why}
    if found.get("not_profiled") == UNFINISHED:
        found["not_profiled"] += f": {why[-500:]}"
    if "between" in found:
        found |= monitor.between(*found.pop("between"))
    return found | {"took_s": round(time.monotonic() - begun, 1)}


def valid(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs whose loss is finite and falls."""
    return [r for r in runs if r.get("learns")]


def speed(runs: list[dict[str, Any]]) -> float:
    """Median tokens per second of the valid runs; 0 if there are none."""
    return median(r["tok_s_gpu"] for r in valid(runs)) if valid(runs) else 0.0


def summarise(row: dict[str, Any]) -> None:
    """Update the summary of a row from its runs."""
    peers: dict[str, Any] = {mode: speed([r for r in row["peer_runs"] if r.get("mode") == mode]) for mode in MODES}
    best = max(peers, key=lambda mode: peers[mode])
    mine = speed(row["our_runs"])
    row |= {"peer_mode": best, "peer_tok_s_gpu": peers, "tok_s_gpu": mine,
            "ratio": round(mine / peers[best], 4) if peers[best] and mine else None}  # fmt: skip
    ours = valid(row["our_runs"])
    if ours:
        row |= {key: ours[-1][key] for key in ("planned_ms", "planned_gib", "gradient", "device", "torch")}
        row["median_ms"] = median(r["median_ms"] for r in ours)
        row["planned_over_measured"] = round(row["planned_ms"] / row["median_ms"], 4)


def remaining_runs(row: dict[str, Any], args: argparse.Namespace) -> Iterator[list[str]]:
    """The commands of the runs that a case still needs: torchtitan in both modes with ours between them, then pairs whose
    order alternates."""
    ours = ["beside_ours.py", row["case"], "OUT", args.layout, args.precision, str(args.profiled)]
    tried = {mode: [r for r in row["peer_runs"] if r.get("tried") == mode] for mode in MODES}
    modes = args.modes.split(",")
    if (case := CASES[row["case"]]).gpus > 1:  # E4 has none: ours alone
        modes = list(case.peer_modes)
    if "stock" in modes and not tried["stock"]:
        yield ["beside_peer.py", row["case"], "stock", "OUT"]
    if not row["our_runs"]:
        yield ours
    if "fsdp" in modes and not tried["fsdp"]:
        yield ["beside_peer.py", row["case"], "fsdp", "OUT"]
    for pair in range(2, args.pairs + 1):
        summarise(row)
        mode = row["peer_mode"]
        paired = [["beside_peer.py", row["case"], mode, "OUT"], ours] if row["peer_runs"] else [ours]
        for command in paired[:: 1 if pair % 2 else -1]:
            key, kind = ("our_runs", None) if command is ours else ("peer_runs", mode)
            if len([r for r in row[key] if kind is None or r.get("tried") == kind]) < pair:
                yield command


def initial_record(args: argparse.Namespace) -> dict[str, Any]:
    """The record in FILE.json if it has this commit, layout and precision; otherwise a new one."""
    new = {"case": "beside torchtitan", **provenance("python benchmarks/beside_torchtitan.py", args.commit),
           "layout": args.layout, "precision": args.precision, "rows": []}  # fmt: skip
    if args.out.exists():
        before = json.loads(args.out.read_text())
        if all(before.get(key) == new[key] for key in ("commit", "layout", "precision")):
            return before
    return new


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--cases",
        default=",".join(ALL),
        help=f"beside these, on several GPUs: {','.join(case.name for case in CASES.values() if case.gpus > 1)}",
    )
    parser.add_argument("--pairs", type=int, default=3, help="runs of each side")
    parser.add_argument("--modes", default=",".join(MODES), help="modes of torchtitan to try")
    parser.add_argument("--budget", type=float, default=1e6, help="seconds of this call")
    parser.add_argument("--profiled", type=int, default=3, help="steps of ours to profile at most; 0: none")
    parser.add_argument("--layout", default="{}", help="fields of our layout to change, as JSON")
    parser.add_argument("--precision", default="{}", help="fields of our precision to change, as JSON")
    parser.add_argument("--commit", default="", type=hexadecimal)
    args = parser.parse_args()
    end, monitor, record = time.monotonic() + args.budget, GpuMonitor(), initial_record(args)
    expected: dict[str, float] = {}  # seconds of a run
    for name in args.cases.split(","):
        row = next((r for r in record["rows"] if r["case"] == name), None)
        if row is None:
            row = {"case": name, "peer_runs": [], "our_runs": []}
            record["rows"].append(row)
        for command in remaining_runs(row, args):
            need = expected.get(command[0] + name, FIRST)
            if end - time.monotonic() < need:
                print(
                    f"{name}: {end - time.monotonic():.0f} s are left, and {command[0]} may need {need:.0f}", flush=True
                )
                monitor.process.terminate()
                return
            found = run(command, monitor, end - time.monotonic())
            expected[command[0] + name] = 1.2 * found["took_s"]
            theirs = command[0] == "beside_peer.py"
            row["peer_runs" if theirs else "our_runs"].append(found | ({"tried": command[2]} if theirs else {}))
            summarise(row)
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(record, indent=1) + "\n")
            short = {k: found[k] for k in ("mode", "tok_s_gpu", "median_ms", "clock_mhz", "power_w", "learns", "took_s", "failed", "not_profiled") if k in found}  # fmt: skip
            print(name, "torchtitan" if theirs else "penteract", json.dumps(short), "ratio", row["ratio"], flush=True)
            if "failed" in found:
                print(f"{name}: no ratio without both sides; {found['failed']}", file=sys.stderr)
                break
    monitor.process.terminate()


if __name__ == "__main__":
    main()
