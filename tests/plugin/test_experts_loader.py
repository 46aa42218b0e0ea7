# SPDX-License-Identifier: MIT
"""Every rank's part of gpt-oss experts, without an engine."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from oss_fused.errors import CheckpointError
from oss_fused.layers.vllm.experts.loader import ExpertsLoader

EXPERTS, HIDDEN, INTERMEDIATE = 4, 64, 96
PARENT = "model.layers.0.mlp.experts.routed_experts"


def loader(layout, rank=0, ranks=1, first=0, count=EXPERTS):
    parallel = SimpleNamespace(tp_rank=rank, tp_size=ranks)
    return ExpertsLoader(
        SimpleNamespace(
            moe_config=SimpleNamespace(
                moe_parallel_config=parallel,
                hidden_dim_unpadded=HIDDEN,
                intermediate_size_per_partition_unpadded=INTERMEDIATE // ranks,
            ),
            global_num_experts=EXPERTS,
            _map_global_expert_id_to_local_expert_id=lambda e: (
                e - first if first <= e < first + count else -1
            ),
        ),
        layout,
    ).load


def load(layout, kind, tensor, shape, rank=0, ranks=1, **experts):
    param = nn.Parameter(torch.zeros(shape, dtype=tensor.dtype), requires_grad=False)
    loader(layout, rank, ranks, **experts)(param, tensor, weight_name=f"{PARENT}.{kind}")
    return param.data


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_bf16_ranks_make_the_whole(ranks):
    share = INTERMEDIATE // ranks
    w13 = torch.randn(EXPERTS, HIDDEN, 2 * INTERMEDIATE)
    w2 = torch.randn(EXPERTS, INTERMEDIATE, HIDDEN)
    parts13 = [
        load("bf16", "w13_weight", w13, (EXPERTS, 2 * share, HIDDEN), r, ranks)
        for r in range(ranks)
    ]
    parts2 = [
        load("bf16", "w2_weight", w2, (EXPERTS, HIDDEN, share), r, ranks) for r in range(ranks)
    ]
    assert torch.equal(torch.cat(parts13, 1), w13.transpose(1, 2))
    assert torch.equal(torch.cat(parts2, 2), w2.transpose(1, 2))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_mxfp4_ranks_hold_whole_blocks(ranks):
    # 3 blocks of 32 over 2 ranks: 2 and 1; the second rank is padded with zeros
    share = -(-(INTERMEDIATE // 32) // ranks) * 32
    blocks = torch.randint(1, 255, (EXPERTS, HIDDEN, INTERMEDIATE // 32, 16), dtype=torch.uint8)
    scales = torch.randint(1, 255, (EXPERTS, HIDDEN, INTERMEDIATE // 32), dtype=torch.uint8)
    w13 = torch.randint(1, 255, (EXPERTS, 2 * INTERMEDIATE, HIDDEN // 32, 16), dtype=torch.uint8)

    def parts(kind, tensor, shape):
        return [load("mxfp4", kind, tensor, shape, r, ranks) for r in range(ranks)]

    w2 = torch.cat(parts("w2_weight", blocks, (EXPERTS, HIDDEN, share // 2)), 2)
    s2 = torch.cat(parts("w2_weight_scale", scales, (EXPERTS, HIDDEN, share // 32)), 2)
    w1 = torch.cat(parts("w13_weight", w13, (EXPERTS, 2 * share, HIDDEN // 2)), 1)
    assert torch.equal(w2[..., : INTERMEDIATE // 2], blocks.flatten(2))
    assert torch.equal(s2[..., : INTERMEDIATE // 32], scales)
    assert torch.equal(w1[:, : 2 * INTERMEDIATE], w13.flatten(2))
    assert not w2[..., INTERMEDIATE // 2 :].any()


def test_bias_of_w2_counts_once():
    bias = torch.randn(EXPERTS, HIDDEN)
    assert torch.equal(load("fp8", "w2_bias", bias, bias.shape, 0, 2), bias)
    assert not load("fp8", "w2_bias", bias, bias.shape, 1, 2).any()


def test_fp8_experts_come_one_by_one():
    param = nn.Parameter(torch.zeros(2, 2 * INTERMEDIATE // 2, 1), requires_grad=False)
    scale = torch.rand(2 * INTERMEDIATE, 1)
    put = loader("fp8", 1, 2, first=2, count=2)
    name = f"{PARENT}.w13_weight_scale"
    assert put(param, scale, name, "gpt_oss_w13", 3, return_success=True)
    assert put(param, scale, name, "gpt_oss_w13", 0, return_success=False) is None
    assert put(param, scale, name, "gpt_oss_w13", 0, return_success=True) is False
    assert torch.equal(param.data[1], scale[INTERMEDIATE:])
    assert not param.data[0].any()


def test_expert_parallel_ranks_take_their_experts():
    w2 = torch.randn(EXPERTS, INTERMEDIATE, HIDDEN)
    part = load("bf16", "w2_weight", w2, (2, HIDDEN, INTERMEDIATE), first=2, count=2)
    assert torch.equal(part, w2[2:].transpose(1, 2))


# each fits into the layer, which kernels may pad
@pytest.mark.parametrize(
    ("layout", "kind", "shape", "expected"),
    [
        ("bf16", "w2_weight", (97, HIDDEN), (INTERMEDIATE, HIDDEN)),
        ("bf16", "w2_weight", (INTERMEDIATE, 32), (INTERMEDIATE, HIDDEN)),
        ("bf16", "w13_weight", (HIDDEN, 190), (HIDDEN, 192)),
        ("mxfp4", "w13_weight", (128, 2, 16), (192, 2, 16)),
        ("mxfp4", "w13_weight_scale", (192, 1), (192, 2)),
        ("mxfp4", "w2_weight", (HIDDEN, 2, 16), (HIDDEN, 3, 16)),
        ("mxfp4", "w2_bias", (32,), (HIDDEN,)),
        ("fp8", "w13_weight", (192, 32), (192, HIDDEN)),
        ("fp8", "w2_weight_scale", (32, 1), (HIDDEN, 1)),
        ("fp8", "w13_bias", (190,), (192,)),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_wrong_shape_is_refused(layout, kind, shape, expected, ranks):
    dtype = torch.uint8 if layout == "mxfp4" else torch.float32
    if (layout, kind) == ("fp8", "w13_weight"):
        dtype = torch.float8_e4m3fn
    elif kind.endswith("_bias"):
        dtype = torch.bfloat16
    said = f"experts.{kind}', expert 0: shape {shape}; expected {expected}"
    with pytest.raises(CheckpointError, match=re.escape(said)):
        load(layout, kind, torch.zeros(EXPERTS, *shape, dtype=dtype), (EXPERTS, 512, 512), 0, ranks)


def test_mxfp4_weights_may_come_without_blocks():
    w2 = torch.randint(1, 255, (EXPERTS, HIDDEN, INTERMEDIATE // 2), dtype=torch.uint8)
    assert torch.equal(load("mxfp4", "w2_weight", w2, w2.shape), w2)


@pytest.mark.parametrize("by_one", [False, True])
def test_an_expert_that_the_model_has_not_is_refused(by_one):
    bias = torch.zeros(EXPERTS + 1, HIDDEN)
    param = nn.Parameter(bias[:EXPERTS].clone(), requires_grad=False)
    said = f"experts.routed_experts.w2_bias' has an expert {EXPERTS}; expected experts 0 to 3"
    with pytest.raises(CheckpointError, match=said):
        if by_one:
            loader("fp8")(param, bias[0], f"{PARENT}.w2_bias", expert_id=EXPERTS)
        else:
            loader("bf16")(param, bias, f"{PARENT}.w2_bias")
