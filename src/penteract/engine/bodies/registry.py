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


def bodies(layout: Layout, device: torch.device) -> dict[str, TorchBody]:
    """What computes each op under a layout. A kernel's module is imported when a call first asks for it."""
    return {word: _by_site(word, layout, device.type) for word in OPS}


def kernel(word: str, one: Implementation, device: str) -> TorchBody:
    """What runs an implementation of an op. BadInput where a device has none: it is refused, never replaced."""
    if device not in one.kernels:
        raise BadInput("KERNEL", f"'{one.name}' of {word} does not run here", found=device,
                       allowed=", ".join(one.kernels))  # fmt: skip
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
