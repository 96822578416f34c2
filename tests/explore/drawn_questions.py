"""Questions of the page, drawn so that most layouts are legal and every part of one occurs."""

from __future__ import annotations

import random
from typing import Any

from penteract.explore.answers.questions import opening_question

MODELS = {
    "llama-3.1-8b": (8192, 128), "llama-3.1-70b": (8192, 64), "qwen3-30b-a3b": (4096, 128), "gpt2": (1024, 64),
    "tiny": (256, 64), "tiny-moe": (256, 64), "tiny-latent": (256, 64),
}  # fmt: skip
EXPERTS = ("qwen3-30b-a3b", "tiny-moe", "tiny-latent")


def question(model: str = "llama-3.1-8b", layout: str = "dp=8,mbs=2,zero=1", **words: Any) -> dict[str, Any]:
    """An opening question as plain JSON."""
    return {**opening_question({"name": model}, words.pop("gpu", "H200"), layout, **words)}


# Of pages: experts over ranks, and every axis at once.
EXPERTS = question("tiny-moe", "dp=4,tp=2,pp=2,cp=1,ep=2,mbs=1,zero=1", sequence_length=256, global_batch_size=64)
DEEP = question("llama-3.1-8b", "dp=2,tp=2,pp=2,cp=2,mbs=1,zero=3,recompute=full", global_batch_size=64)


def drawn(seed: int) -> dict[str, Any]:
    """The question of a seed."""
    draw = random.Random(seed)
    model = draw.choice([*MODELS])
    length, batch = MODELS[model]
    dp, tp, pp, cp = (
        draw.choice([1, 2, 4, 8]),
        draw.choice([1, 1, 2, 4]),
        draw.choice([1, 1, 2, 4]),
        draw.choice([1, 1, 2]),
    )
    settings: dict[str, Any] = {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "micro_batch_size": draw.choice([1, 2])}
    settings["zero"] = draw.choice([0, 1, 2, 3])
    if model in EXPERTS:
        settings["ep"] = draw.choice([1, 2])
    if cp > 1:
        settings["cp_method"] = draw.choice(["all_gather", "ring", "ulysses"])
    if pp > 1:
        settings["schedule"] = draw.choice(["1f1b", "gpipe", "zb_h1"])
    if draw.random() < 0.5:
        settings["recompute"] = draw.choice(["full", "tp_all_gather+rms_norm+swiglu", "tp_all_gather+attention"])
    if draw.random() < 0.2:
        settings["offload_optimizer"] = True
    if draw.random() < 0.3:
        settings["loss"] = draw.choice(["reference", "chunked"])
    made = question(
        model, "", gpu=draw.choice(["H200", "H100", "A100-80GB"]), sequence_length=length, global_batch_size=batch
    )
    made["layout"] = settings
    if draw.random() < 0.3:
        made["parts"] = {"moments": "int8"}
    elif draw.random() < 0.2:
        made["precision"] = "bf16_pure"
    return made
