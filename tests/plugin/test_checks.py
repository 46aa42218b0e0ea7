# SPDX-License-Identifier: MIT
"""Bad tensors are refused by the name that they have in the checkpoint."""

from __future__ import annotations

import pytest
import torch

from oss_fused.errors import CheckpointError
from oss_fused.plugin.checks import MISSING, check_finite, check_scale, check_weight

QKV = "model.layers.0.attn.qkv_proj.weight_scale"


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_scale(value):
    scale = torch.ones(8, 1)
    scale[5] = value
    with pytest.raises(CheckpointError, match=r"'model.layers.0.self_attn.k_proj.weight_scale'"):
        check_scale(QKV, scale, [4, 2, 2])


def test_missing_scale():
    scale = torch.ones(8, 1)
    scale[6:] = MISSING
    with pytest.raises(CheckpointError, match=r"'.*v_proj.weight_scale' is missing"):
        check_scale(QKV, scale, [4, 2, 2])


def test_good_scale():
    check_scale(QKV, torch.full((8, 1), 1e-30), [4, 2, 2])
    check_scale("lm_head.weight_scale", torch.ones(8, 1), [8])


def test_nan_codes():
    codes = torch.ones(4, 8).to(torch.float8_e4m3fn)
    check_weight("model.layers.1.mlp.gate_up_proj.weight", codes, [2, 2])
    codes[3, 1] = float("nan")
    with pytest.raises(CheckpointError, match=r"'model.layers.1.mlp.up_proj.weight'"):
        check_weight("model.layers.1.mlp.gate_up_proj.weight", codes, [2, 2])


def test_weight_that_is_not_finite():
    check_finite("lm_head.weight", torch.ones(2, 2))
    with pytest.raises(CheckpointError, match=r"'lm_head.weight'"):
        check_finite("lm_head.weight", torch.tensor([[1.0, float("inf")]]))
