"""Wavelengths as others have them: what `transformers` computes for published settings, to its single precision."""

from __future__ import annotations

import pytest
import torch

from penteract.config.model import RopeScaling
from penteract.engine.kernels.rotary import angles
from penteract.ops.tape import Site

FEATURES = (0, 9, 12, 16, 22, 31)  # of 32, with theta = 10 000
YARN = {"kind": "yarn", "factor": 40.0, "original_positions": 4096}  # DeepSeek-V2 and V3


@pytest.mark.parametrize(
    ("scaling", "published"),
    [
        (RopeScaling(**YARN), (1, 0.0749894, 0.0268794, 0.0055, 0.000177828, 3.3338e-06)),
        (
            RopeScaling(**YARN, fast_rotations=16, slow_rotations=2),
            (1, 0.0749894, 0.0316228, 0.00566667, 4.4457e-05, 3.3338e-06),
        ),
        (
            RopeScaling(kind="linear", factor=3.0),
            (0.333333, 0.0249965, 0.0105409, 0.00333333, 0.00059276, 4.44507e-05),
        ),
    ],
)
def test_turns_for_one_step_of_position(scaling: RopeScaling, published: tuple[float, ...]) -> None:
    site = Site("rope", (), (), attrs={"head_size": 64, "plain_size": 0, "theta": 1e4, "scaling": scaling})
    cos, sin = angles(site, torch.tensor([[1]]), torch.float64)
    turned = torch.atan2(sin, cos).flatten()[list(FEATURES)]
    assert turned.tolist() == pytest.approx(published, rel=1e-5)
