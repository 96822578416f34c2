"""One GPU: this program beside torchtitan 0.2.2, compiled, in alternated pairs on the same batches and by the same clock.

    python benchmarks/beside_torchtitan.py --out FILE.json [--budget 540] [--pairs 3] [--cases A1,B1]

Each run is a process: 18 steps, of which the last ten count. A step's time is from a CUDA event at the end of an optimizer
step to the next. torchtitan first runs in both of its modes on one card (`beside_peer.py`); the faster one is then
paired. FILE.json is written after every run. With the same FILE.json a later call goes on where this one ended: when what
is left of `--budget` (seconds) may not be enough for another run, the call ends.

A row's ratio is ours over torchtitan's, of tokens a second, medians of the runs. Clocks and power are medians of
nvidia-smi's, twice a second while steps were measured. A run whose loss is not finite or does not fall counts for nothing.
torchtitan is carried to a machine without a network as wheels: the package, torchao 0.17.0, torchdata, tyro.
"""

from __future__ import annotations

import argparse
import json
import os
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

from provenance import hexadecimal, provenance

HERE = Path(__file__).parent
ALL = ("A1", "A1_fp8", "B1", "E1", "F1")
MODES = ("stock", "fsdp")
FIRST = 150.0  # seconds that a run may need, before one of its kind has been seen
ASKED = "clocks.sm,power.draw,temperature.gpu"


class Card:
    """What nvidia-smi says twice a second, with the time at which it said so."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float, float, float]] = []
        words = ["nvidia-smi", f"--query-gpu={ASKED}", "--format=csv,noheader,nounits", "-lms", "500", "-i", "0"]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            try:
                clock, power, heat = map(float, line.split(","))
            except ValueError:  # not said by this card
                continue
            self.seen.append((time.time(), clock, power, heat))

    def between(self, begin: float, end: float) -> dict[str, Any]:
        rows = [row for row in self.seen if begin <= row[0] <= end]
        names = ("clock_mhz", "power_w", "temperature_c")
        return {name: median(row[i] for row in rows) if rows else None for i, name in enumerate(names, 1)}


def run(words: list[str], card: Card, limit: float) -> dict[str, Any]:
    """One side in its process. -> its record, or why there is none."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "record.json"
        said = [sys.executable, str(HERE / words[0]), *(w.replace("OUT", str(out)) for w in words[1:])]
        environment = os.environ | {
            "PYTORCH_ALLOC_CONF": "expandable_segments:True", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29_500 + int(time.time()) % 400), "OMP_NUM_THREADS": "4",
        }  # fmt: skip
        try:
            done = subprocess.run(said, env=environment, capture_output=True, text=True, timeout=limit, check=False)
            why = (done.stdout + done.stderr)[-1500:]
        except subprocess.TimeoutExpired:
            why = f"it ran past {limit:.0f} s"
        found = json.loads(out.read_text()) if out.exists() else {"failed": why}
    if "between" in found:
        found |= card.between(*found.pop("between"))
    return found | {"took_s": round(time.monotonic() - begun, 1)}


def sound(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that count."""
    return [r for r in runs if r.get("learns")]


def speed(runs: list[dict[str, Any]]) -> float:
    """Median tokens a second; 0 where none counts."""
    return median(r["tok_s_gpu"] for r in sound(runs)) if sound(runs) else 0.0


def summed(row: dict[str, Any]) -> None:
    """What a row says of its runs."""
    peers: dict[str, Any] = {mode: speed([r for r in row["peer_runs"] if r.get("mode") == mode]) for mode in MODES}
    best = max(peers, key=lambda mode: peers[mode])
    mine = speed(row["our_runs"])
    row |= {"peer_mode": best, "peer_tok_s_gpu": peers, "tok_s_gpu": mine,
            "ratio": round(mine / peers[best], 4) if peers[best] and mine else None}  # fmt: skip
    ours = sound(row["our_runs"])
    if ours:
        row |= {key: ours[-1][key] for key in ("planned_ms", "planned_gib", "gradient", "device", "torch")}
        row["median_ms"] = median(r["median_ms"] for r in ours)
        row["planned_over_measured"] = round(row["planned_ms"] / row["median_ms"], 4)


def left(row: dict[str, Any], asked: argparse.Namespace) -> Iterator[list[str]]:
    """What a case still wants: torchtitan in both modes with ours between them; then pairs, turned round in turns."""
    ours = ["beside_ours.py", row["case"], "OUT", asked.layout, asked.precision]
    tried = {mode: [r for r in row["peer_runs"] if r.get("tried") == mode] for mode in MODES}
    modes = asked.modes.split(",")
    if "stock" in modes and not tried["stock"]:
        yield ["beside_peer.py", row["case"], "stock", "OUT"]
    if not row["our_runs"]:
        yield ours
    if "fsdp" in modes and not tried["fsdp"]:
        yield ["beside_peer.py", row["case"], "fsdp", "OUT"]
    for pair in range(2, asked.pairs + 1):
        summed(row)
        mode = row["peer_mode"]
        paired = [["beside_peer.py", row["case"], mode, "OUT"], ours]
        for words in paired[:: 1 if pair % 2 else -1]:
            key, kind = ("our_runs", None) if words is ours else ("peer_runs", mode)
            if len([r for r in row[key] if kind is None or r.get("tried") == kind]) < pair:
                yield words


def begun(asked: argparse.Namespace) -> dict[str, Any]:
    """The record to go on with: of this commit and these choices, or a new one."""
    made = {"case": "beside torchtitan", **provenance("python benchmarks/beside_torchtitan.py", asked.commit),
            "layout": asked.layout, "precision": asked.precision, "rows": []}  # fmt: skip
    if asked.out.exists():
        before = json.loads(asked.out.read_text())
        if all(before.get(key) == made[key] for key in ("commit", "layout", "precision")):
            return before
    return made


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", default=",".join(ALL))
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--modes", default=",".join(MODES), help="of torchtitan, that are tried first")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds")
    parser.add_argument("--layout", default="{}", help="of ours, as JSON: what is otherwise than usual")
    parser.add_argument("--precision", default="{}")
    parser.add_argument("--commit", default="", type=hexadecimal)
    asked = parser.parse_args()
    end, card, record = time.monotonic() + asked.budget, Card(), begun(asked)
    seen: dict[str, float] = {}
    for name in asked.cases.split(","):
        row = next((r for r in record["rows"] if r["case"] == name), None)
        if row is None:
            row = {"case": name, "peer_runs": [], "our_runs": []}
            record["rows"].append(row)
        for words in left(row, asked):
            need = seen.get(words[0] + name, FIRST)
            if end - time.monotonic() < need:
                print(
                    f"{name}: {end - time.monotonic():.0f} s are left, and {words[0]} may need {need:.0f}", flush=True
                )
                card.process.terminate()
                return
            found = run(words, card, end - time.monotonic())
            seen[words[0] + name] = 1.2 * found["took_s"]
            theirs = words[0] == "beside_peer.py"
            row["peer_runs" if theirs else "our_runs"].append(found | ({"tried": words[2]} if theirs else {}))
            summed(row)
            asked.out.parent.mkdir(parents=True, exist_ok=True)
            asked.out.write_text(json.dumps(record, indent=1) + "\n")
            short = {k: found[k] for k in ("mode", "tok_s_gpu", "median_ms", "clock_mhz", "power_w", "learns", "took_s", "failed") if k in found}  # fmt: skip
            print(name, "torchtitan" if theirs else "penteract", json.dumps(short), "ratio", row["ratio"], flush=True)
    card.process.terminate()


if __name__ == "__main__":
    main()
