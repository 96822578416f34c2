"""What runs, for each op: the registry's choice (`ops/bodies/registry.py`), found by the name that its entry has."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch

from penteract.engine.bodies.body import Env, TorchBody
from penteract.errors import BadInput
from penteract.ops.bodies import OPS, Implementation, implementation
from penteract.ops.tape import Site
from penteract.spec.layout import Layout
from penteract.step.program import Program


def bodies(layout: Layout, device: torch.device) -> dict[str, TorchBody]:
    """What computes each op under a layout. A kernel's module is imported when a call first asks for it."""
    return {word: _by_site(word, layout, device.type) for word in OPS}


def check_devices(p: Program, device: torch.device) -> None:
    """Refuse a program with an op whose implementation this device has not: it is refused, never replaced."""
    calls = (i.call for chunk in p.chunks for some in chunk.actions.values() for i in some)
    for site in {call.site for call in calls if call.phase not in ("start", "finish")}:
        one, _ = implementation(site, p.layout)
        if device.type not in one.kernels:
            raise BadInput("KERNEL", f"'{one.name}' of {site.word} does not run here", where=site.line,
                           found=device.type, allowed=", ".join(one.kernels))  # fmt: skip


def kernel(word: str, one: Implementation, device: str) -> TorchBody:
    """What runs an implementation of an op, on a device that has it."""
    return _found(one.kernels[device])[word]


@cache
def _found(name: str) -> dict[str, TorchBody]:
    module, _, table = name.partition(":")
    return getattr(import_module(module), table)


def _by_site(word: str, layout: Layout, device: str) -> TorchBody:
    """The reference by itself where an op has no other implementation; else, at each call, what its site selects."""
    *others, reference = OPS[word].implementations
    plain = kernel(word, reference, device)
    if not others:
        return plain

    def phase(name: str) -> Callable[..., None]:
        def run(env: Env, site: Site, *about: Any) -> None:
            getattr(kernel(word, implementation(site, layout)[0], device), name)(env, site, *about)

        return run

    names = ("forward", "input_gradient", "weight_gradient")
    return TorchBody(*[phase(name) if getattr(plain, name) else None for name in names])  # type: ignore[arg-type]
