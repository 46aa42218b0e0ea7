# SPDX-License-Identifier: MIT
"""Every rank's part of gpt-oss experts, without an engine."""

from __future__ import annotations

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
            moe_config=SimpleNamespace(moe_parallel_config=parallel),
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


def test_wrong_shape_is_refused():
    with pytest.raises(CheckpointError, match=r"experts.w2_weight', expert 0: shape \(97, 64\)"):
        load("bf16", "w2_weight", torch.zeros(1, 97, HIDDEN), (EXPERTS, HIDDEN, INTERMEDIATE))
