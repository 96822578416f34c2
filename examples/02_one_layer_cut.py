"""The same layer cut by tp=2 and by cp=2: what changes on its tape, and what every rank then pays. No torch.

The block's source does not change. A redistribution over one rank says nothing; over two it says its collectives, and
every shape between two redistributions follows.

    python examples/02_one_layer_cut.py
"""

from __future__ import annotations

import sys
from collections import Counter

from penteract import Layout, ModelSpec
from penteract.config.mesh import Mesh
from penteract.model.block import block
from penteract.ops.do import Do
from penteract.ops.tape import OpCall, Tape
from penteract.readings.price import Price, price
from penteract.step.program import compile_step

S = 4096  # tokens of the one sequence
MODEL = ModelSpec(
    layers=1, hidden_size=1024, heads=16, kv_heads=8, head_size=64, ffn_size=4096, vocab_size=32_000, tied=True
)
LAYOUTS = {"whole": Layout(), "tp=2": Layout(tp=2), "cp=2": Layout(cp=2)}


def record(layout: Layout) -> Tape:
    """The layer's tape for one layout."""
    do = Do(Mesh(layout))
    x = do.receive((S // layout.cp // layout.tp, 1, MODEL.hidden_size))
    do.send(do.layers([0], lambda i, x: block(do, MODEL, i, x, S), x))
    return do.tape


Said = tuple[list[OpCall], OpCall]  # the redistributions crossed on the way to an op, and the op


def by_word(tape: Tape) -> list[Said]:
    """The tape in groups that end with an op: cuts put redistributions between ops and nothing else."""
    groups: list[Said] = []
    redistributions: list[OpCall] = []
    for op in tape.ops:
        if op.program is not None:
            redistributions.append(op)
        elif op.site.op_name != "fork":
            groups.append((redistributions, op))
            redistributions = []
    return groups


def crossing(redistribution: OpCall) -> str:
    """The collectives of a redistribution: forward / backward."""
    assert redistribution.program is not None
    there, back = (
        "+".join(c.site.op_name for c in calls if c.phase == "start")
        for calls in (redistribution.program.forward, redistribution.program.backward)
    )
    return f"{there} / {back}"


def show(tapes: dict[str, Tape]) -> None:
    """The tapes side by side: a row for each op with its input's shape, and one for each redistribution before it."""
    print("shape of each op's first input; collectives between ops, forward / backward")
    rows = [("", list(tapes))]
    for said in zip(*(by_word(t) for t in tapes.values()), strict=True):
        for i in range(max(len(redistributions) for redistributions, _ in said)):
            rows.append(
                ("", [crossing(redistributions[i]) if i < len(redistributions) else "" for redistributions, _ in said])
            )
        rows.append((said[0][1].site.op_name, [str(list(op.site.ins[0].shape)) for _, op in said]))
    for op_name, cells in rows:
        print((f"{op_name:10}" + "".join(f"{cell:32}" for cell in cells)).rstrip())


def ledger(layout: Layout) -> list[Price]:
    """Every rank's price of the whole step: the layer between its embedding and its loss."""
    return [price(compile_step(MODEL, layout, S, rank=r, precision="bf16")) for r in range(layout.world)]


def main() -> None:
    tapes = {name: record(layout) for name, layout in LAYOUTS.items()}
    show(tapes)

    print("\nwhat a step takes, rank by rank (MiB; GFLOP of matrix products)")
    ledgers = {name: ledger(layout) for name, layout in LAYOUTS.items()}
    for name, ranks in ledgers.items():
        for r, p in enumerate(ranks):
            wires = Counter[str]()
            for (kind, _), size in p.wires.items():
                wires[kind] += size
            sent = ", ".join(f"{kind} {size / 2**20:.1f}" for kind, size in sorted(wires.items())) or "nothing"
            held, work = p.resident["parameters"] / 2**20, p.total_flops / 1e9
            took = f"parameters {held:5.1f}  peak {p.peak / 2**20:6.1f}  FLOPs {work:6.1f}"
            print(f"  {name:6} rank {r}  {took}  communication: {sent}")

    op_names = {name: Counter(op.site.op_name for op in t.ops if op.program is None) for name, t in tapes.items()}
    assert op_names["whole"] == op_names["tp=2"] == op_names["cp=2"], (
        "a cut adds redistributions and changes shapes, never ops"
    )
    (whole,), tp, cp = ledgers.values()
    assert not whole.wires
    shares = {sum(p.total_flops for p in ranks) for ranks in ledgers.values()}
    assert len(shares) == 1, "FLOPs are shared, not added"
    assert tp[0].resident["parameters"] < 0.51 * whole.resident["parameters"], "tp cuts weights"
    assert cp[0].resident["parameters"] == whole.resident["parameters"], "cp cuts tokens alone"
    assert cp[0].wires["all_reduce", (0, 1)] > whole.resident["gradients"], "so its gradients are summed whole"
    assert "torch" not in sys.modules


if __name__ == "__main__":
    main()
