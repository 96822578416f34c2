"""The result of lowering a tape, without sizes. Tapes with the same ops on the same values share it.

Most layouts differ only in sizes, so a search lowers few of the many tapes that it records. A *site* is an op with its
sizes (`ops/tape.py`), a *fork* a value that two ops read: in backward its site is the sum of their gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from penteract.config.layout import Edit
from penteract.ops.declarations import OPS
from penteract.ops.lower import Chunk, lower, sum_of
from penteract.ops.offload import Copy, as_copy, copy_of
from penteract.ops.overlap.in_parts import parts_of
from penteract.ops.spec import Spec
from penteract.ops.tape import Call, OpCall, Phase, Site, Tape
from penteract.readings.layers.sized import Sized
from penteract.step.offsets import Life, lives

Signature = tuple[object, ...]
JobCall = tuple[int, tuple[int, ...], tuple[int, ...]]  # a call: its job, its input registers, its output registers


def signature(tape: Tape) -> Signature:
    """All that lowering reads of a tape. Tapes with the same signature differ only in sizes and axes of collectives."""
    values = (*tape.inputs.items(), tape.entry, tape.exit, frozenset(tape.layer_inputs.items()), tuple(tape.flows))
    return (*values, *map(_signature, tape.ops))


def _signature(op: OpCall) -> Signature:
    site, entry, program = op.site, OPS.get(op.site.op_name), op.program  # a program: of a redistribution
    of_op = (site.op_name, op.name, site.layer, bool(site.params), op.ins, op.outs, op.extras, op.passed)
    again = None if op.again is None else (op.again.name, op.again.ins, op.again.outs)
    joint = (op.joint is not None, op.joint_back is not None, op.joint_again is not None, again)
    joint = (*joint, op.parts is not None, op.parts_back is not None)
    of_op = (*of_op, *joint, *(name in site.attrs for name in ("known_gradient", "largest_gradient")))
    if program is None:
        return (*of_op, entry.declaration.gradients(site.attrs) if entry else ())
    calls = [(c.site.layer, c.phase, c.ins, c.outs) for c in (*program.forward, *program.backward)]
    return (*of_op, len(program.forward), program.kept, program.gradients_in, program.gradients_out, *calls)


def sites_of(tape: Tape, sums: Mapping[Site, Site] | None = None) -> list[Site]:
    """Every site that lowering can call, in the tape's order, then those of two ops in one call, those that make a
    result again in another way, and those of one op in two. `sums`: the sum of each fork, if already made."""
    joint = (site for op in tape.ops for site in (op.joint, op.joint_back, op.joint_again) if site is not None)
    again = (op.again.site for op in tape.ops if op.again is not None)
    parts = (
        site
        for op in tape.ops
        for some in (op.parts, op.parts_back)
        if some is not None
        for site in (some.first, some.second)
    )
    return [*_sites(tape, sums), *joint, *again, *parts]


def _sites(tape: Tape, sums: Mapping[Site, Site] | None) -> Iterator[Site]:
    for op in tape.ops:
        if op.site.op_name == "fork":
            yield sums.get(op.site, op.site) if sums is not None else sum_of(op.site)
        elif op.program is None:
            yield op.site
        else:
            yield from (c.site for c in (*op.program.forward, *op.program.backward))


def results(site: Site, phase: Phase) -> Sequence[Spec]:
    """The specs of what a call makes, in the order of its output registers."""
    if phase in ("forward", "start"):
        return site.outs
    if phase != "input_gradient":
        return ()
    declaration = OPS[site.op_name].declaration
    return [*(site.ins[i] for i in declaration.differentiable), *declaration.carry(site.ins, site.attrs)]


@dataclass(frozen=True, slots=True, eq=False)
class Outline:
    """A lowered chunk without sizes. A job is a phase of a site, however often it is called.

    chunk   of the first tape with this signature
    jobs    (the site's index in `sites_of`, phase)
    calls   by action ("Fwd", "Bwd", or "Inp" and "Wgt"), in the order in which they run
    made    register -> the job that makes it (as a whole, if it is done in parts), and which of its results it is
    lives   register -> the instructions that make and free it
    copies  of offload: the op, the value that it copies, its layer; their sites come after those of the tape
    """

    chunk: Chunk
    jobs: tuple[tuple[int, Phase], ...]
    calls: Mapping[str, tuple[JobCall, ...]]
    made: Mapping[int, tuple[tuple[int, Phase], int]]
    lives: Mapping[int, Life]
    copies: tuple[tuple[Copy, int, int], ...]

    @staticmethod
    def of(tape: Tape, edit: Edit, *, split: bool) -> Outline:
        """Lower a tape under an edit and drop its sizes. `split`: gradients of inputs and of weights are separate
        actions."""
        chunk = lower(tape, edit, split=split)
        places = {site: i for i, site in enumerate((*sites_of(tape, chunk.sums), *chunk.copies))}
        jobs: dict[tuple[int, Phase], int] = {}

        def job_call(call: Call) -> JobCall:
            return jobs.setdefault((places[call.site], call.phase), len(jobs)), call.ins, call.outs

        calls = {name: tuple([job_call(i.call) for i in some]) for name, some in chunk.actions.items()}
        whole = {part: site for site, parts in parts_of(tape).items() for part in (parts.first, parts.second)}

        def job(call: Call) -> tuple[int, Phase]:
            """Of what it makes: as a whole, if it makes some rows of it."""
            return places[call.site if call.rows == "all" else whole[call.site]], call.phase

        every = [i.call for some in chunk.actions.values() for i in some]
        made = {r: (job(call), k) for call in every for k, r in enumerate(call.outs)}
        copies: tuple[tuple[Copy, int, int], ...] = tuple(
            [(as_copy(site.op_name), v, site.layer) for site, v in chunk.copies.items()]
        )
        return Outline(chunk, tuple(jobs), calls, made, lives(chunk), copies)

    def copied(self, shapes: Sized) -> Iterator[Site]:
        """The sites of copies, for a tape with this signature."""
        return (copy_of(op_name, shapes.specs[value], layer, "") for op_name, value, layer in self.copies)

    def specs(self, shapes: Sized, sites: Sequence[Site]) -> dict[int, Spec]:
        """The spec of every live register, for a tape with this signature. `sites`: those of `shapes`, then those of
        copies."""
        made = {job: results(sites[job[0]], job[1]) for job in {job for job, _ in self.made.values()}}
        specs = dict(enumerate(shapes.specs))
        specs |= {r: made[job][k] for r, (job, k) in self.made.items()}
        if shapes.exit is not None and self.chunk.exit_gradient is not None:
            specs[self.chunk.exit_gradient] = shapes.exit
        return specs
