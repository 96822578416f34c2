"""Parameters and their master weights from other numbers than an update's: drawn ones, or those of a file."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from penteract.engine.device.device import device_of
from penteract.engine.state import split_master
from penteract.engine.state.state import ParameterPart, TrainingState
from penteract.ops.params import Param

# Elements `part` of a parameter's local rectangle in row-major order: [n], on the state's device, of no other owner.
Elements = Callable[[slice], torch.Tensor]


def fill(state: TrainingState, whole: Iterable[tuple[Param, torch.Tensor]]) -> None:
    """Set parameters and master weights from pairs (parameter, its whole local rectangle), one at a time."""
    set_parameters(state, ((q, _elements_of(x.reshape(-1), state.routed.device)) for q, x in whole))


def _elements_of(x: torch.Tensor, device: torch.device) -> Elements:
    return lambda part: x[part].to(device, copy=True)


def set_parameters(state: TrainingState, drawn: Iterable[tuple[Param, Elements]]) -> None:
    """Set parameters and master weights from pairs (parameter, what gives its elements). Only elements that this rank
    keeps are asked for, each once, and few at a time: a table would need more memory than a step of a small model."""
    device = device_of(state.routed.device)
    if state.largest_weights is not None:
        state.largest_weights.forget()
    own = {x.param.name: x for x in state.parameter_parts("parameter")}
    kept = state.parameter_parts_of(flat.optimizer_state.get("master") for flat in state.flats)
    master_weights = {x.param.name: x for x in kept}
    cut = {q.name for flat in state.flats if flat.cut_parameter is not None for q in flat.bucket.params}
    splits = {q.name for flat in state.flats if flat.splits_master for q in flat.bucket.params}
    for q, elements in drawn:
        mine = own.get(q.name) if q.name in cut else ParameterPart(q, 0, state.parameters[q.name].view(-1))
        if mine is None:
            continue
        for at in range(0, len(mine.values), device.at_once):
            begin, target = mine.begin + at, mine.values[at : at + device.at_once]
            values = elements(slice(begin, begin + len(target)))
            _set(values, begin, target, master_weights.get(q.name), split=q.name in splits)
    device.release()


def _set(
    values: torch.Tensor, begin: int, parameter: torch.Tensor, master: ParameterPart | None, *, split: bool
) -> None:
    """Elements of a rectangle from `begin` on [n]: the parameter's, and of its master weights those that are kept."""
    low = high = 0
    if master is not None:
        low, high = max(begin, master.begin), min(begin + len(values), master.begin + len(master.values))
    if not split:
        parameter.copy_(values)
    else:
        values = values.float()
        if high - low < len(values):  # what has a master weight here is rounded as that is split
            split_master.rounded(values, parameter)
    if master is not None and low < high:
        here, there = slice(low - begin, high - begin), master.values[low - master.begin : high - master.begin]
        if split:
            split_master.split(values[here], parameter[here], there)
        else:
            there.copy_(values[here])
