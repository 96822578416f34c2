"""Precision as a policy: the dtype of each role in a step, and the named recipes.

Micikevicius 2018 (1710.03740) for master weights and loss scaling; Dettmers 2022 (2110.02861) for 8-bit moments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import cache
from types import MappingProxyType
from typing import Literal, get_args

from penteract.config.layout import Layout
from penteract.config.precision.fp8 import KINDS, Fp8, check_fp8, usual
from penteract.config.precision.module_patterns import FP8, LinearLayers, Pattern, decided
from penteract.errors import BadInput

# compute: activations; stat: statistics (1/rms, log-sum-exp), and the dtype in which updates are computed;
# index: token and expert numbers; offset: where groups of rows begin, as grouped products take it;
# host: a value in host memory as plain Python (split sizes), no bytes on the device;
# parameter: what products read; gradient: where gradients accumulate; reduce: in which they are reduced over ranks;
# master: master weights (0 bytes: parameters are updated directly); moment: one of the optimizer's moments;
# fp8: FP8 data, in which weights may be gathered.
Role = Literal[
    "compute", "stat", "index", "offset", "host", "parameter", "gradient", "reduce", "master", "moment", "fp8"
]  # fmt: skip
Widths = Mapping[Role, int]  # bytes of one element of each role

SPLIT = "fp32_split"
MOMENT_BLOCK = 256  # elements of int8 moments that share a scale
BYTES: Mapping[str, int] = MappingProxyType(
    {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "int32": 4, "int64": 8}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Names of dtypes by role.

    master       "": there are no master weights, parameters are updated directly. "fp32_split": fp32, kept as the bf16
                 parameter and the 16 bits that it lacks
    moments      "int8": quantised, with one fp32 scale for each block
    stochastic   stochastic rounding of parameters without master weights, so that small updates are not lost
    loss_scale   of the first step: the loss is multiplied by it, so that small gradients do not underflow; 0: no
                 scaling
    growth_every steps without an overflow after which the scale doubles
    fp8          the FP8 recipe of linear layers; None: no FP8
    modules      exceptions for parameters, by name

    Raises BadInput if roles do not go together.
    """

    compute: str
    parameter: str
    gradient: str
    reduce: str
    master: str
    moments: str
    stochastic: bool = False
    loss_scale: float = 0.0
    growth_every: int = 0
    fp8: Fp8 | None = None
    modules: tuple[Pattern, ...] = ()

    def __post_init__(self) -> None:
        """Check that roles and patterns go together. Raises BadInput, PRECISION."""
        for role, fits in self._fitting().items():
            if getattr(self, role) not in fits:
                found, allowed = getattr(self, role) or "none", [str(f or "none") for f in fits]
                raise BadInput(
                    "PRECISION", f"does not go with {self.compute} and the rest of its recipe",
                    where=f"precision.{role}", found=found, allowed=", ".join(allowed),
                    fix=f"--precision.{role} {allowed[0]}",
                )  # fmt: skip
        if (self.loss_scale > 0) != (self.compute == "fp16") or (self.loss_scale > 0) != (self.growth_every > 0):
            raise BadInput("PRECISION", "loss scaling is for fp16 only", where="precision.loss_scale",
                           found=f"{self.loss_scale:g} in {self.compute}", allowed="1 or more in fp16, 0 otherwise",
                           fix="--precision.loss_scale auto")  # fmt: skip
        if 0 < self.loss_scale < 1:
            raise BadInput("PRECISION", "a loss that is scaled down underflows", where="precision.loss_scale",
                           found=f"{self.loss_scale:g}", allowed="1 or more in fp16",
                           fix="--precision.loss_scale auto")  # fmt: skip
        if self.fp8 and self.compute == "fp16":
            raise BadInput("PRECISION", "FP8 has scales of its own", where="precision.compute", found=self.compute,
                           allowed="bf16, fp32, fp64", fix=f"--precision.dtype fp8_{self.fp8.kind}")  # fmt: skip
        for one in self.modules:
            self._check(one)

    def _check(self, one: Pattern) -> None:
        """Refuse a pattern whose value its role cannot have."""
        linear_layers = (self.compute, FP8) if self.fp8 else (self.compute,)
        fits = [f"{one.part}={f}" for f in (linear_layers if one.part == "linears" else self._fitting()["moments"])]
        if f"{one.part}={one.value}" not in fits:
            raise BadInput(
                "PRECISION", f"does not go with {self.compute} and the rest of its recipe", where="precision.modules",
                found=str(one)[:80], allowed=" or ".join(fits), fix=f"--precision.modules '{one.names}:{fits[0]}'",
            )  # fmt: skip

    def _fitting(self) -> Mapping[str, tuple[object, ...]]:
        """The allowed dtypes of each role, the usual one first."""
        wide = (self.stat,)
        narrower = tuple(d for d in ("fp64", "fp32", "bf16") if BYTES[d] < BYTES[self.gradient])
        master_weights = {"bf16": (SPLIT, "fp32", ""), "fp16": ("fp32",)}
        return {
            "compute": ("bf16", "fp16", "fp32", "fp64"),
            "parameter": (self.compute,),
            "gradient": wide if self.compute == "fp16" else tuple(dict.fromkeys((*wide, self.compute))),
            "reduce": (self.gradient, *narrower),
            "master": master_weights.get(self.parameter, ("",)),
            "moments": (*wide, *(d for d in ("fp32", "bf16", "int8") if d not in wide)),
            "stochastic": (True, False) if self.parameter == "bf16" and not self.master else (False,),
        }

    @property
    def stat(self) -> str:
        """Dtype of statistics (norms, log-sum-exps, routing scores): fp32, or fp64 if compute is fp64."""
        return "fp64" if self.compute == "fp64" else "fp32"

    @property
    def splits_master(self) -> bool:
        """Whether the upper half of the master weights is the parameters."""
        return self.master == SPLIT

    @property
    def products(self) -> str:
        """The dtype whose peak rate applies to products: fp16 has that of bf16, on every device.

        With FP8 it is still that of compute, in which attention, the head and routers stay; MFU refers to it too.
        """
        return "bf16" if self.compute == "fp16" else self.compute

    def moments_of(self, name: str) -> str:
        """The dtype of a parameter's moments."""
        return decided(self.modules, "moments", name, self.moments) if self.modules else self.moments

    def keeping(self, moments: str) -> Policy:
        """The policy for parameters with moments of this dtype."""
        return self if moments == self.moments else _keeping(self, moments)

    def linear_layers(self, layers: int, ahead: int = 0) -> LinearLayers:
        """Which linear layers of a model with so many layers are in FP8. Raises BadInput if `fp8` leaves none."""
        if self.fp8 is None:
            return LinearLayers()
        ends = (Pattern(f"layers.{i}.*", "linears", self.compute) for i in self.fp8.bf16_layers(layers, ahead))
        return LinearLayers(self.fp8, (*ends, *self.modules))

    @property
    def widths(self) -> Widths:
        """Bytes by role."""
        return _widths(self)

    @property
    def name(self) -> str:
        """The recipe's name, or the nearest recipe and what differs: "bf16, moments int8"."""
        return _name(self)

    def dtype(self, role: Role) -> str:
        """The dtype of a role; that of `master` is what the optimizer updates."""
        match role:
            case "master":
                return "fp32" if self.master else self.parameter
            case "moment":
                return self.moments
            case "index" | "host":
                return "int64"
            case "offset":
                return "int32"
            case "fp8":
                return "int8"
            case _:
                return str(getattr(self, role))

    def __hash__(self) -> int:
        """Of only a few fields, as it is called often; few policies differ only in the others."""
        return hash((self.compute, self.parameter, self.gradient, self.moments))

    def __str__(self) -> str:
        """The same as `name`."""
        return self.name


def _plain(dtype: str) -> Policy:
    """One dtype for everything."""
    return Policy(compute=dtype, parameter=dtype, gradient=dtype, reduce=dtype, master="", moments=dtype)


def _mastered(dtype: str, loss_scale: float = 0.0, growth_every: int = 0) -> Policy:
    """Products in `dtype`; gradients, master weights and moments in fp32."""
    master = SPLIT if dtype == "bf16" else "fp32"
    return Policy(
        compute=dtype, parameter=dtype, gradient="fp32", reduce="fp32", master=master, moments="fp32",
        loss_scale=loss_scale, growth_every=growth_every,
    )  # fmt: skip


RECIPES: Mapping[str, Policy] = MappingProxyType(
    {
        "fp64": _plain("fp64"),
        "fp32": _plain("fp32"),
        "bf16": _mastered("bf16"),
        "bf16_pure": replace(_plain("bf16"), stochastic=True),
        "fp16": _mastered("fp16", loss_scale=2.0**16, growth_every=2000),
        **{f"fp8_{kind}": replace(_mastered("bf16"), fp8=usual(kind)) for kind in KINDS},
    }
)


def policy(precision: str | Policy, *, where: str = "", flag: str = "") -> Policy:
    """A recipe by name; a policy is returned as it is. Raises BadInput with the names. `flag`: the option for
    messages."""
    if isinstance(precision, Policy):
        return precision
    if precision not in RECIPES:
        raise BadInput("PRECISION", "no such precision", where=where, found=precision, allowed=", ".join(RECIPES),
                       fix=f"{flag} {nearest_recipe(precision)}".strip())  # fmt: skip
    return RECIPES[precision]


def nearest_recipe(name: str) -> str:
    """The recipe that a name probably means: one that begins or is spelt like it, else one of about as many bits."""
    name = name.strip().lower()
    if near := [one for one in RECIPES if name and one.startswith(name)] or get_close_matches(name, RECIPES, 1, 0.8):
        return near[0]
    if bits := re.search(r"[0-9]+", name):
        alike = [one for one in RECIPES if one.startswith("bf") == name.startswith(("bf", "brain"))]
        return min(alike, key=lambda one: abs(int(re.findall(r"[0-9]+", one)[0]) - int(bits[0][:4])))
    return next(iter(get_close_matches(name, RECIPES, 1, 0.3)), "bf16")


def grain(moments: str) -> int:
    """The number of elements that a shard's size must be a multiple of."""
    return MOMENT_BLOCK if moments == "int8" else 1


@cache
def _keeping(p: Policy, moments: str) -> Policy:
    return replace(p, moments=moments, modules=())


@cache
def _widths(p: Policy) -> Widths:
    roles: tuple[Role, ...] = get_args(Role)
    widths: dict[Role, int] = {role: BYTES[p.dtype(role)] for role in roles if role not in ("host", "master")}
    widths["host"], widths["master"] = 0, BYTES[p.dtype("master")] if p.master else 0
    if p.splits_master:
        widths["master"] -= widths["parameter"]
    return MappingProxyType(widths)


@cache
def _name(p: Policy) -> str:
    def alike(other: Policy) -> bool:
        return p.fp8 is not None and other.fp8 is not None and p.fp8.kind == other.fp8.kind

    def unlike(other: Policy) -> list[str]:
        apart = [f.name for f in fields(p) if getattr(p, f.name) != getattr(other, f.name)]
        return [f for f in apart if f != "modules" and not (f == "fp8" and alike(other))]

    nearest = min((n for n, r in RECIPES.items() if r.compute == p.compute), key=lambda n: len(unlike(RECIPES[n])))
    roles = [f"{f} {getattr(p, f) or 'none'}" for f in unlike(RECIPES[nearest])]
    fp8 = p.fp8.unusual if p.fp8 and alike(RECIPES[nearest]) else ()
    return ", ".join([nearest, *roles, *fp8, *map(str, p.modules)])


def check_layout(p: Policy, layout: Layout) -> None:
    """Refuse a precision that a layout cannot follow."""
    if p.loss_scale and layout.sends_blocks:
        raise BadInput("PRECISION", "fp16 cannot have padded rows by all_to_all: an overflow looks like a loss's",
                       where="parallel.expert_rows", found=f"{layout.expert_rows}, by ep_method {layout.ep_method}",
                       allowed="exact; padded by ep_method all_gather",
                       fix="--parallel.expert_rows exact, or --precision.dtype bf16")  # fmt: skip
    check_fp8(p.fp8, layout)
