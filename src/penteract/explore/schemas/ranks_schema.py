"""The messages of the page about ranks: the mesh on nodes, the groups and the traffic of one rank, and who holds a
parameter.

Ranks of a group are runs, `[first, step, count, first, step, count …]`: each run is every `step`-th rank from `first`.
"""

from __future__ import annotations

from typing import Literal, TypedDict

from penteract.explore.schemas.page_values import Amount, Fact, Question


class MeshAxis(TypedDict):
    """An axis of the mesh: a group of it is every `step`-th rank of a block of `block` consecutive ranks.

    coordinate  whether a rank's place in its group is one of its coordinates (ep is a part of dp and cp)
    ranks       the group of the rank that is looked at; `text`: the same, to read
    link        whether this group is within a node; `link_text`: to read
    """

    axis: str
    label: str
    about: str
    size: int
    block: int
    step: int
    coordinate: bool
    ranks: list[int]
    text: str
    link: Literal["inside", "between"]
    link_text: str


class LinkTraffic(TypedDict):
    """One kind of call of the rank in a step.

    dimension    dp, tp, pp, cp, ep, or "" for small all-reduces of several
    ranks, text  the group; of a message, the two ranks
    size         of the group
    amount       by the price: the output of a gather, the input of other collectives
    count        of calls; `calls`: the same, to read
    picoseconds  for which the group's links are busy; `share`: of the step
    rate         bytes over seconds
    """

    dimension: str
    label: str
    collective: str
    what: str
    ranks: list[int]
    text: str
    size: int
    link: Literal["inside", "between"]
    link_text: str
    count: int
    calls: str
    amount: Amount
    picoseconds: int
    seconds: str
    share: str
    rate: str


class LinkSum(TypedDict):
    """All calls of one dimension over one kind of link."""

    dimension: str
    label: str
    link: Literal["inside", "between"]
    link_text: str
    calls: str
    amount: Amount
    picoseconds: int
    seconds: str
    share: str


class ParameterChoice(TypedDict):
    """A parameter of the rank; equal ones of several layers are one. `name`: that of the first; `text`: to read."""

    name: str
    text: str


class HeldPart(TypedDict):
    """A part of a parameter, and the ranks that hold it.

    own    whether the rank that is looked at holds it
    box    where it lies in the parameter: left, top, width, height, as shares of the drawing
    slice  the same in elements, "[0:4096, 512:1024]"
    """

    number: int
    own: bool
    box: list[float]
    slice: str
    ranks: list[int]
    text: str


class StateShard(TypedDict):
    """Elements of the rank's part whose optimizer states are on one rank."""

    rank: int
    elements: str
    share: str


class HeldParameter(TypedDict):
    """Who holds which part of a parameter.

    shape         to read; `wide`: width over height of the drawing
    states        of the rank's part where they are sharded; `states_ranks`: all ranks with optimizer states of it
    states_text   what ZeRO does with it, in a sentence
    """

    name: str
    text: str
    shape: str
    wide: float
    parts: list[HeldPart]
    facts: list[Fact]
    states: list[StateShard]
    states_ranks: list[int]
    states_text: str


class RanksAnswer(TypedDict):
    """The mesh on its nodes, and one rank of it.

    rank       that is looked at; `place`: its coordinates, to read
    per_node   ranks of a node, which are consecutive
    number     the bytes of the rank's traffic; `verdict`: over which links, in a sentence
    most       picoseconds of the longest row of `traffic`
    missing    why there is no traffic; `more`: a question that has some
    """

    version: int
    kind: Literal["ranks"]
    question: Question
    command: str
    rank: int
    place: str
    world: int
    per_node: int
    nodes: int
    nodes_text: str
    headline: str
    number: str
    verdict: str
    facts: list[Fact]
    axes: list[MeshAxis]
    traffic: list[LinkTraffic]
    sums: list[LinkSum]
    most: int
    parameters: list[ParameterChoice]
    parameter: HeldParameter
    missing: str
    more: Question | None
