"""Every op once more, as a formula in float64 that autograd can follow: no op's kernel or helper is used here."""

from __future__ import annotations

from op_kernels.formulas import attention, blocks, dense, experts, forms, losses, norms, quantised, rotary
from op_kernels.formulas.truth import Formula

FORMULAS: dict[str, Formula] = {
    f.__name__: f
    for f in (
        dense.embedding, dense.linear, dense.add_bias, dense.merged_linear, dense.packed_swiglu, dense.merged_glu,
        dense.glu_linear, dense.swiglu, dense.gelu, dense.add,
        norms.rms_norm, norms.fork_norm, norms.add_norm, norms.layer_norm,
        rotary.rope,
        quantised.quantise, quantised.fp8_linear, quantised.fp8_glu,
        forms.sum_shares, forms.split, forms.join, forms.repeat_heads, forms.pack_heads, forms.unpack_heads,
        attention.packed_attention, attention.normed_attention, attention.attention, attention.unfold_heads,
        attention.merge_attention,
        losses.loss_and_gradient, losses.row_max, losses.exp_sum, losses.negative_log_likelihood,
        losses.cross_entropy_gradient, losses.rows, losses.join_rows, losses.logits, losses.logits_gradient,
        losses.loss,
        experts.router, experts.expert_permutation, experts.split_sizes, experts.expert_offsets, experts.permute,
        experts.sort_chunks, experts.expert_linear, experts.expert_pair, experts.unpermute, experts.balance_loss,
        experts.tokens_per_expert, experts.padded_permute, experts.padded_swiglu, experts.padded_unpermute,
        blocks.block_places, blocks.block_permute, blocks.sort_blocks, blocks.block_unpermute,
    )
}  # fmt: skip
