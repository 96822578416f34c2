"""Precision as a policy: the dtype of every role that numbers play in a step, and the recipes that have a name.

Micikevicius 2018 (1710.03740) for master weights and loss scaling; Dettmers 2022 (2110.02861) for moments of 8 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import cache
from types import MappingProxyType
from typing import Literal

from penteract.config.precision.fp8 import KINDS, Fp8, usual
from penteract.config.precision.module_patterns import FP8, LinearLayers, Pattern, decided
from penteract.errors import BadInput

# compute: activations; stat: statistics kept beside them (1/rms, log-sum-exp), and what updates are computed in;
# index: token and expert numbers; offset: where groups of rows begin, as products by groups take it;
# host: a value in host memory as plain Python (split sizes), no bytes on the device;
# parameter: what products read; gradient: where gradients accumulate; reduce: their sums on the wire;
# master: the copy that the optimizer updates (0: parameters are updated themselves); moment: one of its moments;
# code: of FP8, as which weights may travel.
Role = Literal[
    "compute", "stat", "index", "offset", "host", "parameter", "gradient", "reduce", "master", "moment", "code"
]  # fmt: skip
Widths = Mapping[Role, int]  # bytes of one element of each role

BLOCK = 256  # elements that share a scale, of moments in int8
BYTES: Mapping[str, int] = MappingProxyType(
    {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "int32": 4, "int64": 8}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Names of dtypes by role.

    master       "" where parameters are moved themselves
    moments      "int8": codes, with one fp32 scale for each block of them
    stochastic   parameters without master are rounded up or down by chance, so that small updates are not lost
    loss_scale   of the first step: the loss is multiplied by it, so that small gradients are not rounded to zero; 0: no
    growth_every steps without an overflow after which the scale doubles
    fp8          how the products of layers' linears are of codes of 8 bits; None: they are not
    modules      parameters that have it otherwise, by their names

    Raises BadInput where roles do not go together.
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
            raise BadInput("PRECISION", "a loss is scaled in fp16, and there alone", where="precision.loss_scale",
                           found=f"{self.loss_scale:g} in {self.compute}", allowed="more than 0 in fp16, 0 otherwise",
                           fix="--precision.loss_scale auto")  # fmt: skip
        if self.fp8 and self.compute == "fp16":
            raise BadInput("PRECISION", "FP8 has scales of its own", where="precision.compute", found=self.compute,
                           allowed="bf16, fp32, fp64", fix=f"--precision.dtype fp8_{self.fp8.kind}")  # fmt: skip
        for one in self.modules:
            self._check(one)

    def _check(self, one: Pattern) -> None:
        """What a pattern says is what the role may be."""
        linear_layers = (self.compute, FP8) if self.fp8 else (self.compute,)
        fits = [f"{one.part}={f}" for f in (linear_layers if one.part == "linears" else self._fitting()["moments"])]
        if f"{one.part}={one.value}" not in fits:
            raise BadInput(
                "PRECISION", f"does not go with {self.compute} and the rest of its recipe", where="precision.modules",
                found=str(one)[:80], allowed=" or ".join(fits), fix=f"--precision.modules '{one.names}:{fits[0]}'",
            )  # fmt: skip

    def _fitting(self) -> Mapping[str, tuple[object, ...]]:
        """What each role may be, the usual first."""
        wide = (self.stat,)
        narrower = tuple(d for d in ("fp64", "fp32", "bf16") if BYTES[d] < BYTES[self.gradient])
        master_weights = {"bf16": ("fp32", ""), "fp16": ("fp32",)}
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
        """Dtype of statistics (norms, log-sum-exps, routing scores): fp32, or fp64 where compute is fp64."""
        return "fp64" if self.compute == "fp64" else "fp32"

    @property
    def products(self) -> str:
        """The dtype whose peak rate products have: that of fp16 is that of bf16, on every device.

        Of FP8 it is that of the rest: attention, the head and routers stay there, and so does what MFU is a share of.
        """
        return "bf16" if self.compute == "fp16" else self.compute

    def moments_of(self, name: str) -> str:
        """The dtype of a parameter's moments."""
        return decided(self.modules, "moments", name, self.moments) if self.modules else self.moments

    def keeping(self, moments: str) -> Policy:
        """The policy of parameters alone whose moments are of one dtype."""
        return self if moments == self.moments else _keeping(self, moments)

    def linear_layers(self, layers: int, ahead: int = 0) -> LinearLayers:
        """Which linears are in FP8, of a model of so many layers. BadInput where `fp8` leaves none."""
        if self.fp8 is None:
            return LinearLayers()
        beside = (Pattern(f"layers.{i}.*", "linears", self.compute) for i in self.fp8.beside(layers, ahead))
        return LinearLayers(self.fp8, (*beside, *self.modules))

    @property
    def widths(self) -> Widths:
        """Bytes by role."""
        return _widths(self)

    @property
    def name(self) -> str:
        """The recipe's name, or the nearest recipe and what differs: "bf16, moments int8"."""
        return _name(self)

    def dtype(self, role: Role) -> str:
        """The dtype of a role; that of `master` is what the optimizer moves."""
        match role:
            case "master":
                return self.master or self.parameter
            case "moment":
                return self.moments
            case "index" | "host":
                return "int64"
            case "offset":
                return "int32"
            case "code":
                return "int8"
            case _:
                return str(getattr(self, role))

    def __hash__(self) -> int:
        """Of few fields, as it is asked for often; few policies differ in the others alone."""
        return hash((self.compute, self.parameter, self.gradient, self.moments))

    def __str__(self) -> str:
        """The same as `name`."""
        return self.name


def _plain(dtype: str) -> Policy:
    """One dtype for everything."""
    return Policy(compute=dtype, parameter=dtype, gradient=dtype, reduce=dtype, master="", moments=dtype)


def _mastered(dtype: str, loss_scale: float = 0.0, growth_every: int = 0) -> Policy:
    """Narrow products; whatever adds up is fp32."""
    return Policy(
        compute=dtype, parameter=dtype, gradient="fp32", reduce="fp32", master="fp32", moments="fp32",
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
    """A recipe by name; a policy is itself. BadInput with the known names. `flag`: what a recipe is given by."""
    if isinstance(precision, Policy):
        return precision
    if precision not in RECIPES:
        near = [name for name in RECIPES if precision and name.startswith(precision)]
        near = near or get_close_matches(precision, RECIPES, 1, cutoff=0.3) or ["bf16"]
        raise BadInput("PRECISION", "no such precision", where=where, found=precision, allowed=", ".join(RECIPES),
                       fix=f"{flag} {near[0]}".strip())  # fmt: skip
    return RECIPES[precision]


def grain(moments: str) -> int:
    """Elements that belong together: shards begin and end between them."""
    return BLOCK if moments == "int8" else 1


@cache
def _keeping(p: Policy, moments: str) -> Policy:
    return replace(p, moments=moments, modules=())


@cache
def _widths(p: Policy) -> Widths:
    roles: tuple[Role, ...] = (
        "compute",
        "stat",
        "index",
        "offset",
        "parameter",
        "gradient",
        "reduce",
        "moment",
        "code",
    )
    widths: dict[Role, int] = {role: BYTES[p.dtype(role)] for role in roles}
    widths["host"], widths["master"] = 0, BYTES[p.master] if p.master else 0
    return MappingProxyType(widths)


@cache
def _name(p: Policy) -> str:
    def alike(other: Policy) -> bool:
        return p.fp8 is not None and other.fp8 is not None and p.fp8.kind == other.fp8.kind

    def unlike(other: Policy) -> list[str]:
        apart = [f.name for f in fields(p) if getattr(p, f.name) != getattr(other, f.name)]
        return [f for f in apart if f != "modules" and not (f == "fp8" and alike(other))]

    nearest = min((n for n, r in RECIPES.items() if r.compute == p.compute), key=lambda n: len(unlike(RECIPES[n])))
    told = [f"{f} {getattr(p, f) or 'none'}" for f in unlike(RECIPES[nearest])]
    coded = p.fp8.unusual if p.fp8 and alike(RECIPES[nearest]) else ()
    return ", ".join([nearest, *told, *coded, *map(str, p.modules)])
