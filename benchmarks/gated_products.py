"""The products of SwiGLU's network that `gated_backward.py` compares: quack's, and plain torch's in their place on a CPU."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch

from penteract.engine.kernels import fused_glu

Config = tuple[
    int, int, bool, int, int
]  # rows and columns of a tile, whether two take turns, rows and columns of a cluster


class Quack:
    """The products of package quack."""

    @staticmethod
    @cache
    def config(config: Config) -> Any:
        """A configuration; tiles are dealt in a fixed order."""
        rows, columns, turns, high, wide = config
        return import_module("quack.gemm_config").GemmConfig(
            tile_m=rows, tile_n=columns, pingpong=turns, cluster_m=high, cluster_n=wide, is_dynamic_persistent=False,
            device_capacity=9,
        )  # fmt: skip

    def product(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, add: bool, turns: tuple[str, ...], config: Config) -> None:  # fmt: skip
        """a @ b -> out, written or added; what `turns` names has halves that are read or written in turn."""
        library = import_module("quack.gemm_interface")
        library.gemm_tuned.fn(a, b, out, config=self.config(config), add_to_output=add, concat_layout=turns or None)

    def epilogue(self, name: str, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, outs: dict[str, torch.Tensor], config: Config, **more: Any) -> None:  # fmt: skip
        """a @ b through an epilogue, written where `outs` says."""
        _epilogue(name)(
            a, b, c, out=outs, store_d="D" in outs, config=self.config(config), tuned=False, dynamic_scheduler=False, **more
        )  # fmt: skip


@cache
def _epilogue(name: str) -> Any:
    if name == "gated":
        library = import_module("quack.epilogue.library")
        return library.linear_act_mod("swiglu", gated=True, has_c=False, has_rowvec=False, has_colvec=False)
    if name == "dgated":
        return import_module("quack.epilogue.library").dgated_mod("swiglu", has_scale=False, has_reduce=False)
    ours = {
        "swiglu_beside": fused_glu.gated, "slopes_beside": fused_glu.gated_back,
        "slopes_again": fused_glu.gated_back_again, "slopes_in_turn": _slopes_in_turn,
    }  # fmt: skip
    return ours[name]()


def _slopes_in_turn() -> Any:
    """As quack's `dgated`, without SwiGLU made again."""
    slopes_of, values = import_module("quack.activation").dswiglu, import_module("quack.epilogue.math")

    def store_slopes(acc: Any, c: Any) -> dict[str, Any]:
        of_gate, of_up, _ = slopes_of(*values.unpack(c), acc)
        return {"D": values.pack(of_gate, of_up)}

    return import_module("quack.epilogue.frontend").gemm_epilogue(mode="packed_cd_b16x2")(store_slopes)


class Plain:
    """The same in plain torch, of any device."""

    def product(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, add: bool, turns: tuple[str, ...], config: Config) -> None:  # fmt: skip
        b = in_turn(b, 0) if "B" in turns else b
        made = a.float() @ b.float()
        made = beside(made, 0) if "out" in turns else made
        out.copy_(out.float() + made if add else made)

    def epilogue(self, name: str, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, outs: dict[str, torch.Tensor], config: Config, **more: Any) -> None:  # fmt: skip
        b = in_turn(b, 1) if more.get("concat_layout") else b
        made = a.float() @ b.float()
        if name in ("gated", "swiglu_beside"):
            gate, up = made[:, ::2], made[:, 1::2]
            every = {"D": made, "mAuxOut": swiglu(gate, up), "gate": gate, "up": up, "out": swiglu(gate, up)}
        else:
            assert c is not None
            apart = name in ("slopes_beside", "slopes_again")
            gate, up = (c, more["up"]) if apart else (c[:, ::2], c[:, 1::2])
            of_gate, of_up = slopes_of(gate.float(), up.float(), made)
            d = of_gate if apart else torch.stack([of_gate, of_up], -1).flatten(1)
            again = swiglu(gate.float(), up.float())
            every = {"D": d, "of_up": of_up, "mAuxOut": again, "again": again}
        for key, out in outs.items():
            out.copy_(every[key])


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate)·up."""
    return torch.nn.functional.silu(gate) * up


def slopes_of(gate: torch.Tensor, up: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of gate and up from g, that of SwiGLU's result."""
    share = gate.sigmoid()
    return g * up * share * (1 + gate * (1 - share)), g * gate * share


def in_turn(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Halves of a dim, side by side, as pairs."""
    return torch.stack(x.chunk(2, dim), dim + 1).flatten(dim, dim + 1)


def beside(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Pairs of a dim as halves, side by side."""
    return x.unflatten(dim, (-1, 2)).movedim(dim + 1, dim).flatten(dim, dim + 1)
