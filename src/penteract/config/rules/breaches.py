"""The rules of legal layouts: divisibility and the sizes of schedules, each with the setting at fault."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from penteract.config.layout import (
    ATTENTION_KERNELS,
    COLLECTIVES,
    CP_METHODS,
    DETERMINISM,
    ELEMENTWISE,
    EP_METHODS,
    EVERY_FUSION,
    EXPERT_KERNELS,
    EXPERT_ROWS,
    LOSS_KERNELS,
    MOST_LOSS_CHUNKS,
    MOST_MICRO_BATCHES,
    MOST_TOKENS,
    ZERO_STAGES,
    Layout,
)
from penteract.config.model import LatentSpec, ModelSpec, MoESpec, RopeScaling
from penteract.config.rules.case import Case
from penteract.config.rules.expert_kernels import expert_breaches
from penteract.config.rules.kernel_limits import glu_breaches, kernel_breaches
from penteract.schedule.registry import SCHEDULES, breach, schedule_of

Breach = tuple[str, str]  # (setting, what is wrong)

_COUNTS = ("dp", "tp", "pp", "cp", "ep", "vpp", "expert_tp", "micro_batch_size", "gradient_accumulation_steps",
           "sequence_length", "recompute_every", "offload_every")  # fmt: skip
_FROM_0 = ("last_stage_less_layers", "recompute_first", "bucket_bytes", "shard_group", "loss_chunk")
# setting -> its values, and what one is
CHOICES: Mapping[str, tuple[Collection[object], str]] = {
    "zero": (ZERO_STAGES, "stage of ZeRO here"),
    "schedule": (SCHEDULES, "schedule"),
    "cp_method": (CP_METHODS, "cp_method"),
    "ep_method": (EP_METHODS, "ep_method"),
    "expert_rows": (EXPERT_ROWS, "size of experts' registers"),
    "attention": (ATTENTION_KERNELS, "attention kernel"),
    "loss": (LOSS_KERNELS, "kernel of the loss"),
    "elementwise": (ELEMENTWISE, "element-wise kernel"),
    "experts": (EXPERT_KERNELS, "kernel of experts' products"),
    "collectives": (COLLECTIVES, "way of collectives"),
    "determinism": (DETERMINISM, "kind of determinism"),
}


def breaches(case: Case) -> list[Breach]:
    """Every broken rule, the most basic first. An empty list means legal."""
    basic = list(_counts(case))
    if basic:
        return basic
    found: list[Breach] = []
    for rule in (_model, _world, _tensor, _context, _pipeline, _experts, _shards, _batch, _length):
        found.extend(rule(case))
    found.extend(kernel_breaches(case.model, case.layout))
    found.extend(expert_breaches(case.model, case.layout))
    found.extend(glu_breaches(case.model, case.layout))
    return found


def _counts(case: Case) -> Iterator[Breach]:
    least = {setting: 1 for setting in _COUNTS} | {setting: 0 for setting in _FROM_0} | {"capacity_percent": 100}
    if case.global_batch_size is not None:
        least["global_batch_size"] = 1
    for setting, n in least.items():
        if case.get(setting) < n:
            yield setting, f"{setting} is less than {n}"
    for setting, (choices, what) in CHOICES.items():
        if case.get(setting) not in choices:
            yield setting, f"no such {what}"
    if not {*case.layout.fuse} <= {*EVERY_FUSION}:
        yield "fuse", "no such fusion"


def _model(case: Case) -> Iterator[Breach]:
    model = case.model
    if model.heads % model.kv_heads:
        yield "kv_heads", f"{model.heads} query heads do not divide into groups over {model.kv_heads} KV heads"
    if model.latent:
        yield from _latent(model, model.latent)
    elif model.positions == "rope" and model.head_size % 2:
        yield "head_size", "rotary positions turn pairs: an odd head size has none for its last element"
    if model.moe:
        yield from _routing(model.moe)
    if model.rope_scaling:
        yield from _scaling(model.rope_scaling)
    if model.positions == "learned" and case.sequence_length > model.max_positions:
        yield "sequence_length", f"the learned table has {model.max_positions} positions"


def _latent(model: ModelSpec, latent: LatentSpec) -> Iterator[Breach]:
    if model.positions == "rope" and latent.rope_size % 2:
        yield "rope_size", "rotary positions turn pairs: an odd size has none for its last element"
    if model.head_size != latent.plain_size + latent.rope_size:
        yield "head_size", f"a head is its plain and its rotated part: {latent.plain_size} + {latent.rope_size}"
    if model.kv_heads != model.heads:
        yield "kv_heads", f"keys and values unfold for each of the {model.heads} heads"
    if model.qk_norm:
        yield "qk_norm", "latents are normalised, and no head after them"


def _scaling(rope: RopeScaling) -> Iterator[Breach]:
    low, slow = rope.low_frequency_factor, rope.slow_rotations
    if rope.kind == "llama3" and rope.high_frequency_factor <= low:
        yield "high_frequency_factor", f"the smooth band begins above where it ends, low_frequency_factor = {low:g}"
    if rope.kind == "yarn" and rope.fast_rotations < slow:
        yield "fast_rotations", f"dims that keep their wavelength turn no slower than slow_rotations = {slow:g}"


def _routing(moe: MoESpec) -> Iterator[Breach]:
    if moe.top_k > moe.experts:
        yield "top_k", f"a token cannot visit {moe.top_k} of {moe.experts} experts"
    elif moe.experts % moe.groups:
        yield "groups", f"{moe.experts} experts are not divisible by {moe.groups} groups"
    elif moe.groups > 1 and moe.group_score == "top2" and moe.experts == moe.groups:
        yield "groups", "a group is as good as its best two experts, and has one"
    elif moe.top_groups > moe.groups:
        yield "top_groups", f"a token cannot choose among {moe.top_groups} of {moe.groups} groups"
    elif moe.top_k * moe.groups > moe.top_groups * moe.experts:
        yield "top_k", f"{moe.top_groups} of {moe.groups} groups have fewer than {moe.top_k} experts"


def _world(case: Case) -> Iterator[Breach]:
    lay, world = case.layout, case.world
    if world is None or lay.world == world:
        return
    rest = lay.tp * lay.pp * lay.cp
    product = f"dp·tp·pp·cp = {lay.dp}·{lay.tp}·{lay.pp}·{lay.cp} = {lay.world}, not the number of ranks, {world}"
    if world % rest == 0:
        yield "dp", product
        return
    worst = max(("tp", "pp", "cp"), key=lambda axis: (world % case.get(axis) != 0, case.get(axis)))
    yield worst, f"tp·pp·cp = {lay.tp}·{lay.pp}·{lay.cp} does not divide the number of ranks, {world}"


def _tensor(case: Case) -> Iterator[Breach]:
    model, tp = case.model, case.layout.tp
    broken = False
    sizes = [("attention heads", model.heads), ("ffn_size", model.ffn_size)]
    if model.moe:
        sizes.append(("shared_ffn_size", model.moe.shared_ffn_size))
    for name, size in sizes:
        if size % tp:
            broken = True
            yield "tp", f"tp = {tp} does not divide {name} = {size}"
    if model.kv_heads % tp and tp % model.kv_heads:
        broken = True
        yield "tp", f"tp = {tp} neither divides the {model.kv_heads} KV heads nor is a multiple of them"
    if model.vocab_size % tp and not broken:  # padding the table is the smaller change
        yield "vocab_size", f"tp = {tp} does not divide vocab_size = {model.vocab_size}"


def _context(case: Case) -> Iterator[Breach]:
    model, lay, tokens = case.model, case.layout, case.sequence_length
    cp, tp = lay.cp, lay.tp
    # If the degree is a power of two, the sequence length is at fault.
    blamed = "sequence_length" if cp & (cp - 1) == 0 else "cp"
    if cp > 1 and tokens % (2 * cp):
        yield blamed, f"sequence_length = {tokens} does not cut into 2·cp = {2 * cp} equal chunks"
    elif (tokens // cp) % tp and model.heads % tp == 0:
        yield "sequence_length", f"tp = {tp} does not divide the {tokens // cp} tokens of a context rank"
    if cp > 1 and lay.cp_method == "ulysses" and model.heads % tp == 0:
        heads, kv_heads = model.heads // tp, max(1, model.kv_heads // tp)
        if heads % cp:
            yield "cp", f"Ulysses shards heads: cp = {cp} does not divide the {heads} heads of a tensor rank"
        elif kv_heads % cp and cp % kv_heads:
            yield "cp", f"Ulysses shards heads: cp = {cp} and the {kv_heads} KV heads of a tensor rank do not divide"


def _pipeline(case: Case) -> Iterator[Breach]:
    lay, layers = case.layout, case.model.layers
    if lay.pp * lay.vpp > layers:
        fewest = schedule_of(lay.schedule).min_vpp
        setting = "pp" if lay.vpp <= fewest or lay.pp * fewest > layers else "vpp"
        yield setting, f"pp·vpp = {lay.pp}·{lay.vpp} is more stages than the {layers} layers"
    elif (less := lay.last_stage_less_layers) and lay.stages == 1:
        yield "last_stage_less_layers", "one stage has all layers"
    elif (layers + less) // lay.stages <= less:
        yield (
            "last_stage_less_layers",
            f"{less} fewer leave no layer to the last of {lay.stages} stages",
        )
    wrong = breach(lay.schedule, lay.pp, lay.vpp, lay.gradient_accumulation_steps)
    if wrong is not None:
        setting, what = wrong
        # With a given global batch, accumulation steps are derived: then the batch is what to change.
        derived = setting == "gradient_accumulation_steps" and case.global_batch_size is not None
        yield "global_batch_size" if derived else setting, what


def _experts(case: Case) -> Iterator[Breach]:
    lay, moe = case.layout, case.model.moe
    if lay.ep > 1 and moe is None:
        yield "ep", "the model has no experts to share"
    elif moe and moe.experts % lay.ep:
        yield "ep", f"ep = {lay.ep} does not divide the {moe.experts} experts"
    if (lay.dp * lay.cp) % lay.ep:
        yield "ep", f"ep = {lay.ep} does not divide dp·cp = {lay.dp * lay.cp}"
    if lay.expert_tp not in (1, lay.tp):
        yield "expert_tp", f"experts are whole (1) or split over all of tp = {lay.tp}"
    elif moe and moe.ffn_size % lay.expert_tp:
        yield "expert_tp", f"expert_tp = {lay.expert_tp} does not divide an expert's ffn_size = {moe.ffn_size}"
    if why := not_padded(case.model, lay):
        yield "expert_rows", why


def not_padded(model: ModelSpec, lay: Layout) -> str:
    """Why a layout that asks for padded rows of experts cannot have them, but for its kernels; else empty."""
    if lay.expert_rows != "padded" or (lay.ep > 1 and model.moe is not None):
        return ""
    if model.moe is None:
        return "the model has no experts whose rows could be padded"
    return "experts' rows are padded where ranks share experts: one rank's experts get all, a known number"


def _shards(case: Case) -> Iterator[Breach]:
    lay, group = case.layout, case.layout.shard_group
    if group and not lay.zero:
        yield "shard_group", "nothing is cut under ZeRO 0 that a group could share"
    elif group and (lay.dp * lay.cp) % group:
        yield "shard_group", f"shard_group = {group} does not divide dp·cp = {lay.dp * lay.cp}"
    elif group and group % lay.ep and lay.ep % group:
        yield "shard_group", f"shard_group = {group} and ep = {lay.ep}: neither is a multiple of the other"
    for setting in ("reduce_scatter_once", "reshard_after_step"):
        if case.get(setting) and lay.zero != 3:
            yield setting, f"{setting} is a choice of ZeRO 3 alone, not of ZeRO {lay.zero}"


def _length(case: Case) -> Iterator[Breach]:
    """A step is a list of its micro-batches, and of a micro-batch's chunks of the loss: it must end."""
    lay, steps = case.layout, case.layout.gradient_accumulation_steps
    tokens = lay.micro_batch_size * case.sequence_length
    if steps > MOST_MICRO_BATCHES:
        setting = "gradient_accumulation_steps" if case.global_batch_size is None else "global_batch_size"
        yield setting, f"{steps} micro-batches of a rank's step, more than {MOST_MICRO_BATCHES}"
    if tokens > MOST_TOKENS:
        yield "micro_batch_size", f"{tokens} tokens of a micro-batch, more than {MOST_TOKENS}"
    elif lay.loss == "chunked" and lay.loss_chunk and tokens > lay.cp * lay.loss_chunk * MOST_LOSS_CHUNKS:
        chunks = -(-tokens // (lay.cp * lay.loss_chunk))
        yield "loss_chunk", f"{chunks} chunks of the loss in a micro-batch, more than {MOST_LOSS_CHUNKS}"


def _batch(case: Case) -> Iterator[Breach]:
    lay, total = case.layout, case.global_batch_size
    if total is None or total == lay.global_batch_size:
        return
    if total % lay.dp:
        yield "global_batch_size", f"global_batch_size = {total} is not divisible by dp = {lay.dp}"
    else:
        yield (
            "micro_batch_size",
            f"micro_batch_size = {lay.micro_batch_size} does not divide a replica's {total // lay.dp} sequences a step",
        )
