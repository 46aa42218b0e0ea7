# SPDX-License-Identifier: MIT
"""Reports say in what arithmetic each arm computes."""

from __future__ import annotations

import pytest
from harness.arithmetic import describe_arithmetic

_OSS = ["--quantization", "oss_fp8"]
_FP8 = "linear layers: FP8 weights and activations"
_FEW = "these in bf16 precision in steps of at most 8 tokens on Hopper (not in a fused dense MLP)"
_LINEAR = f"{_FP8}, {_FEW}"
_BF16 = '--additional-config={"oss_fused": {"expert_activations": "bf16"}}'


@pytest.mark.parametrize(
    ("flags", "mxfp4", "expected"),
    [
        ([], False, "as the checkpoint says"),
        ([], True, "linear layers: bf16; MXFP4 experts: activations in bf16"),
        (["--quantization=fp8_per_channel"], False, "vLLM's fp8_per_channel"),
        (_OSS, False, _LINEAR),
        (_OSS, True, f"{_LINEAR}; MXFP4 experts: activations in bf16 precision in steps"),
        (_OSS, True, "bf16 precision in steps of fewer than 512 tokens, FP8 from 512 on"),
        ([*_OSS, _BF16], True, "bf16 precision in all steps"),
        (
            [*_OSS, "--additional_config.oss_fused.expert-activations", "fp8"],
            True,
            "FP8 in steps of 256 tokens",
        ),
        ([*_OSS, "--kv-cache-dtype", "fp8"], False, "KV cache: fp8"),
    ],
)
def test_arithmetic_of_an_arm(flags, mxfp4, expected):
    assert expected in describe_arithmetic(flags, mxfp4)


@pytest.mark.parametrize(
    "flags",
    [
        ["--additional-config", '{"oss_fused": {"linear_activations": "fp8"}}'],
        ["--additional-config.oss_fused.linear_activations=fp8"],
    ],
)
def test_precision_of_linear_layers(flags):
    assert describe_arithmetic([*_OSS, *flags], False) == _FP8
    assert describe_arithmetic([*_OSS, *flags], True).startswith(f"{_FP8}; MXFP4 experts:")


def test_activations_that_stay_in_16_bits():
    flags = [*_OSS, "--additional-config.oss_fused.scheme", "W8A16"]
    assert describe_arithmetic(flags, False) == "linear layers: FP8 weights, activations in 16 bits"
    assert "; MXFP4 experts: activations in bf16" in describe_arithmetic(flags, True)
