"""One layer, three ways: plain torch, the tape run, the tape priced. Same output, same gradients, known bytes.

The point: `model/block.py` is written once. Calling it records a tape; what a tape means is up to who walks it. The two
readings below are the whole idea in miniature; the real ones are engine/executor/executor.py and readings/price.py.

    python examples/01_one_layer.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from penteract import Layout, ModelSpec
from penteract.config.mesh import Mesh
from penteract.config.precision.policy import RECIPES
from penteract.engine.kernels.kernel import Env
from penteract.engine.kernels.reference import REFERENCE
from penteract.model.block import block
from penteract.ops.do import Do
from penteract.ops.lower import Chunk, lower

S, B = 32, 2  # tokens, sequences
MODEL = ModelSpec(layers=1, hidden_size=64, heads=4, kv_heads=2, head_size=16, ffn_size=128, vocab_size=256)
Tensors = dict[str, torch.Tensor]


def record() -> Do:
    """Record the layer once. Nothing is computed: values are shapes."""
    do = Do(Mesh(Layout(micro_batch_size=B)))
    x = do.receive((S, B, MODEL.hidden_size))
    do.send(do.layers([0], lambda i, x: block(do, MODEL, i, x, S), x))
    return do


# ---- one: plain torch ------------------------------------------------------------------------------------------------


def rope(x: torch.Tensor) -> torch.Tensor:
    """x [S, B, heads, C], each head's halves rotated by its position."""
    half = x.shape[-1] // 2
    angle = torch.outer(torch.arange(S).double(), MODEL.rope_theta ** (-torch.arange(half).double() / half))
    cos, sin = angle.cos()[:, None, None], angle.sin()[:, None, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def plain(x: torch.Tensor, w: Tensors) -> torch.Tensor:
    """The layer as one would write it in a notebook, for autograd."""
    m, n = MODEL, "layers.0"
    h = F.rms_norm(x, (m.hidden_size,), w[f"{n}.norm1.weight"], m.norm_epsilon)
    q, k, v = (F.linear(h, w[f"{n}.attention.{p}.weight"]).unflatten(-1, (-1, m.head_size)) for p in "qkv")
    q, k, v = (t.permute(1, 2, 0, 3) for t in (rope(q), rope(k), v))  # [B, heads, S, C]
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x = x + F.linear(o.permute(2, 0, 1, 3).flatten(2), w[f"{n}.attention.o.weight"])
    h = F.rms_norm(x, (m.hidden_size,), w[f"{n}.norm2.weight"], m.norm_epsilon)
    gate, up, down = (w[f"{n}.mlp.{p}.weight"] for p in ("gate", "up", "down"))
    return x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)


# ---- two: run the tape -----------------------------------------------------------------------------------------------


def run(chunk: Chunk, action: str, registers: dict[int, torch.Tensor], w: Tensors, into: Tensors) -> int:
    """Walk one action with torch kernels. Returns the bytes of the registers that are alive after it."""
    env = Env(Mesh(Layout(micro_batch_size=B)), 0, torch.float64)
    for instruction in chunk.actions[action]:
        site, phase = instruction.call.site, instruction.call.phase
        kernel, ins = REFERENCE[site.op_name], [registers[r] for r in instruction.call.ins]
        if phase == "weight_gradient":
            kernel.weight_gradient(env, site, ins, [into[n] for n in site.params], False)
        else:
            outs = [torch.empty(chunk.specs[r].shape, dtype=torch.float64) for r in instruction.call.outs]
            getattr(kernel, phase)(env, site, ins, [w[n] for n in site.params], outs)
            registers |= zip(instruction.call.outs, outs, strict=True)
        for r in instruction.frees:
            del registers[r]
    return sum(t.nbytes for r, t in registers.items() if r not in chunk.inputs)


# ---- three: price the tape -------------------------------------------------------------------------------------------


def price(chunk: Chunk, action: str, registers: dict[int, int]) -> int:
    """The same walk where a register is a size. It could run without torch."""
    for instruction in chunk.actions[action]:
        for r in instruction.call.outs:
            spec = chunk.specs[r]
            registers[r] = spec.numel() * RECIPES["fp64"].widths[spec.role]
        for r in instruction.frees:
            del registers[r]
    return sum(registers.values())


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    do = record()
    chunk = lower(do.tape)
    w = {n: torch.randn(p.shape, dtype=torch.float64) * 0.1 for n, p in do.params.items()}
    x, g = torch.randn(2, S, B, MODEL.hidden_size, dtype=torch.float64)  # the input, and the gradient of the output

    leaves = {n: t.clone().requires_grad_() for n, t in w.items()}
    entry = x.clone().requires_grad_()
    plain_y = plain(entry, leaves)
    plain_y.backward(g)

    tokens = torch.arange(S)
    data = {"positions": tokens[:, None].expand(S, B), "index": tokens, "start": torch.zeros(S, B, dtype=torch.int64)}
    registers = {r: data[name] for r, name in chunk.inputs.items()} | {chunk.entry: x}
    gradients = {n: torch.empty_like(t) for n, t in w.items()}
    kept = run(chunk, "Fwd", registers, w, gradients)
    y = registers.pop(chunk.exit)  # who sends a value frees it
    registers[chunk.exit_gradient] = g
    run(chunk, "Bwd", registers, w, gradients)

    sizes = {chunk.entry: x.nbytes}
    priced = price(chunk, "Fwd", sizes)
    del sizes[chunk.exit]
    sizes[chunk.exit_gradient] = g.nbytes
    left = price(chunk, "Bwd", sizes)

    worst = max((gradients[n] - leaves[n].grad).abs().max().item() for n in w)
    through = (registers[chunk.entry_gradient] - entry.grad).abs().max().item()
    forward, backward = (len(chunk.actions[action]) for action in ("Fwd", "Bwd"))
    apart = (y - plain_y).abs().max().item()
    print(f"the tape: {len(do.tape.ops)} ops, which become {forward} forward and {backward} backward instructions")
    print(f"  run against plain torch   output {apart:.0e} apart, gradients {max(worst, through):.0e}")
    print(f"  bytes alive after forward {kept:,} run, {priced:,} priced")
    print(f"  bytes left after backward {left:,}: the gradient for the layer before")
    print("the first lines of the tape, and where they are written:")
    for op in do.tape.ops[:8]:
        print(f"  {op.site.op_name:10} {' '.join(str(list(s.shape)) for s in op.site.ins):28} {op.site.line}")

    assert apart < 1e-12 and max(worst, through) < 1e-11
    assert kept == priced, "the price is the run's own bytes, to the byte"
    assert left == x.nbytes and set(registers) - set(chunk.inputs) == {chunk.entry_gradient}


if __name__ == "__main__":
    main()
