"""What the golden files answer: single layouts, and whole questions to the planner. A file's name is its key here."""

from __future__ import annotations

from dataclasses import dataclass

from penteract.api import plan
from penteract.planner.plan import Plan

NODE = ("llama-3.1-8b", "8xH200", 8192)  # the yardstick: most layouts differ from it in one thing


@dataclass(frozen=True, slots=True)
class Question:
    """One question, as `penteract plan` takes it. `layout` prices that one alone, `fix` holds settings of a search."""

    model: str
    gpus: str
    seq: int
    batch: str = "1Mi"
    layout: str | None = None
    fix: str | None = None

    @property
    def command(self) -> str:
        """What to type for the same answer."""
        op_names = f"penteract plan {self.model} --gpus {self.gpus} --seq {self.seq} --batch {self.batch}"
        op_names += f" --layout {self.layout}" if self.layout else ""
        return op_names + (f" --fix {self.fix}" if self.fix else "")

    def ask(self) -> Plan:
        """The answer: the layout, or the five best."""
        return plan(
            self.model, self.gpus, sequence_length=self.seq, batch=self.batch, layout=self.layout, fix=self.fix, top=5
        )


def layout(model: str, gpus: str, seq: int, written: str, batch: str = "1Mi") -> Question:
    return Question(model, gpus, seq, batch, written)


LAYOUTS = {
    # One node and one model: what each technique changes.
    "8b_dp8_zero1": layout(*NODE, "dp=8,zero=1"),
    "8b_dp8_zero0": layout(*NODE, "dp=8,zero=0"),
    "8b_dp8_zero2": layout(*NODE, "dp=8,zero=2"),
    "8b_dp8_zero3": layout(*NODE, "dp=8,zero=3"),
    "8b_dp8_recompute_full": layout(*NODE, "dp=8,zero=1,recompute=full"),
    "8b_tp2_dp4": layout(*NODE, "tp=2,dp=4,zero=1"),
    "8b_tp8": layout(*NODE, "tp=8"),
    "8b_pp2_1f1b": layout(*NODE, "pp=2,zero=1"),
    "8b_pp4_1f1b": layout(*NODE, "pp=4,zero=1"),
    "8b_pp4_gpipe": layout(*NODE, "pp=4,schedule=gpipe,zero=1"),
    "8b_pp4_interleaved_vpp2": layout(*NODE, "pp=4,schedule=interleaved,vpp=2,zero=1"),
    # In chunks the head's weight gradient cannot wait, and the last stage sets a slower pace: so, logits at once.
    "8b_pp4_zb_h1": layout(*NODE, "pp=4,schedule=zb_h1,zero=1,loss=reference"),
    "8b_cp2_gather": layout(*NODE, "cp=2,cp_method=all_gather,zero=1"),
    "8b_cp2_ring": layout(*NODE, "cp=2,cp_method=ring,zero=1"),
    "8b_cp2_ulysses": layout(*NODE, "cp=2,cp_method=ulysses,zero=1"),
    # One device, a tied table over a pipeline, other makers.
    "1b_1xh200": layout("llama-3.2-1b", "1xH200", 8192, "mbs=4"),
    "3b_tied_pp4": layout("llama-3.2-3b", "8xH200", 8192, "pp=4,zero=1"),
    "8b_8xmi300x": layout("llama-3.1-8b", "8xMI300X", 8192, "dp=8,zero=1"),
    "70b_gb200_nvl72": layout("llama-3.1-70b", "72xGB200", 8192, "tp=4,zero=1", batch="144seqs"),
    # Many nodes.
    "70b_64xh100": layout("llama-3.1-70b", "8x8xH100", 8192, "tp=8,pp=2,zero=1"),
    "405b_2048xh100": layout("llama-3.1-405b", "256x8xH100", 8192, "tp=8,pp=16,cp=2,zero=1", batch="16Mi"),
    "gpt3_175b_1024xa100": layout(
        "gpt3-175b", "128x8xA100-80GB", 2048, "tp=8,pp=16,schedule=interleaved,vpp=3,zero=1", batch="1536seqs"
    ),
    # Experts. Mixtral's states alone are 18 bytes of 46.7B parameters over 8 GPUs: it does not fit, and says so.
    "mixtral_8xa100": layout("mixtral-8x7b", "8xA100-80GB", 4096, "ep=8,zero=1"),
    "qwen3_30b_64xh200_ep8": layout("qwen3-30b-a3b", "8x8xH200", 4096, "ep=8,zero=1,mbs=2"),
    "qwen3_30b_64xh200_expert_tp2": layout("qwen3-30b-a3b", "8x8xH200", 4096, "tp=2,ep=4,expert_tp=2,zero=1,mbs=2"),
    "deepseek_v3_256xb200": layout("deepseek-v3", "32x8xB200", 4096, "tp=2,pp=8,ep=16,zero=1", batch="16Mi"),
}

PLANS = {
    "8b_8xh200": Question(*NODE),
    "8b_8xh200_128k": Question("llama-3.1-8b", "8xH200", 131_072),
    "70b_32xh100": Question("llama-3.1-70b", "4x8xH100", 8192, fix="cp=1"),
    "1b_8xa100_40gb": Question("llama-3.2-1b", "8xA100-40GB", 8192),
    "qwen3_30b_16xh200": Question("qwen3-30b-a3b", "2x8xH200", 8192, fix="recompute=none,micro_batch_size=1,zero=1"),
    "gpt2_1xh200": Question("gpt2", "1xH200", 1024),
}
