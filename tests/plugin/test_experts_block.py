# SPDX-License-Identifier: MIT
"""gpt-oss's blocks hand each other quantised inputs where one operator runs experts and norms."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from torch import nn
from vllm.config.aux_output import AuxOutputConfig
from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8DynamicTokenSym

from oss_fused.kernels.moe.config import SHARED_ROWS
from oss_fused.kernels.op import get_kernel
from oss_fused.layers.vllm.decoder import OssTransformerBlock
from oss_fused.layers.vllm.experts import block as joined
from oss_fused.layers.vllm.experts.mxfp4 import OssMxfp4MoEMethod
from oss_fused.layers.vllm.linear import OssFp8LinearMethod
from oss_fused.plugin.models import OssGptOssModel
from oss_fused.quant.scheme import FP8_DYNAMIC
from oss_fused.quant.settings import ServingOptions

HIDDEN, INTER, EXPERTS = 64, 32, 4
ONE_RANK = {"tp_size": 1, "dp_size": 1, "ep_size": 1, "pcp_size": 1}


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter((torch.rand(HIDDEN) + 0.5).bfloat16(), requires_grad=False)
        self.variance_epsilon = 1e-5


def experts(ranks):
    def packed(rows, columns, gate_up):
        codes = torch.randint(0, 256, (EXPERTS, rows, columns // 2), dtype=torch.uint8)
        scale = torch.randint(118, 122, (EXPERTS, rows, columns // 32), dtype=torch.uint8)
        return torch.ops.oss_fused.moe_repack_mxfp4(codes, scale, gate_up)

    method = OssMxfp4MoEMethod.__new__(OssMxfp4MoEMethod)
    method.fp8_min_tokens = -1
    method.moe = SimpleNamespace(moe_parallel_config=SimpleNamespace(**ranks))
    w13, w2 = packed(2 * INTER, HIDDEN, True), packed(HIDDEN, INTER, False)
    return SimpleNamespace(
        quant_method=method, top_k=2, renormalize=True,
        w13_weight=w13[0], w13_weight_scale=w13[1], w13_bias=torch.randn(EXPERTS, 2 * INTER),
        w2_weight=w2[0], w2_weight_scale=w2[1], w2_bias=torch.randn(EXPERTS, HIDDEN),
    )  # fmt: skip


class Attention(nn.Module):
    """A projection of what it gets, and what that was."""

    def __init__(self):
        super().__init__()
        self.qkv_proj = nn.Linear(1, 1)
        self.qkv_proj._input_quant_key = kFp8DynamicTokenSym
        self.matrix = torch.randn(HIDDEN, HIDDEN) * 0.1
        self.seen = []

    def forward(self, x, positions):
        self.seen.append(type(x))
        assert isinstance(x, QuantizedActivation) and x.orig_dtype == torch.bfloat16
        return (x.data.float() * x.scale @ self.matrix).bfloat16()


def block(ranks=ONE_RANK):
    made = OssTransformerBlock.__new__(OssTransformerBlock)
    nn.Module.__init__(made)
    made.input_layernorm, made.post_attention_layernorm = Norm(), Norm()
    made.attn = Attention()
    router = SimpleNamespace(
        weight=torch.randn(EXPERTS, HIDDEN).bfloat16(),
        bias=torch.randn(EXPERTS).bfloat16(),
        is_unquantized=True,
    )
    mixture = SimpleNamespace(routed_experts=experts(ranks))
    made.mlp = SimpleNamespace(router=router, experts=mixture, is_sequence_parallel=False)
    return made


def model_of(blocks):
    model = nn.Module()
    model.layers = nn.ModuleList(blocks)
    return model


CONFIG = SimpleNamespace(aux_output_config=AuxOutputConfig())


@pytest.fixture
def blocks(monkeypatch):
    """Two blocks; their CPU tensors pass for a GPU's, and the experts' sum is the operator's."""
    torch.manual_seed(0)
    monkeypatch.setattr(joined, "router_joins_norm", lambda mlp, dtype: True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)

    def in_turn(norm, mlp, x, residual):
        router, of = mlp.router, mlp.experts.routed_experts
        x, residual, logits = get_kernel("torch", "add_rms_norm_router")(
            x, residual, norm.weight, norm.variance_epsilon, router.weight, router.bias
        )
        return get_kernel("torch", "moe_mxfp4")(
            x, logits, of.w13_weight, of.w13_weight_scale, of.w13_bias,
            of.w2_weight, of.w2_weight_scale, of.w2_bias, of.top_k, of.renormalize,
        ), residual  # fmt: skip

    monkeypatch.setattr("oss_fused.layers.vllm.decoder.norm_and_experts", in_turn)
    return [block(), block()]


def run(blocks, x, read=()):
    """The last block's result, and what a draft model reads behind the layers ``read``."""
    residual, states = None, []
    model = OssGptOssModel.__new__(OssGptOssModel)
    nn.Module.__init__(model)
    model.aux_hidden_state_layers = read
    model._maybe_add_hidden_state(states, 0, x, residual)
    for number, each in enumerate(blocks, 1):
        x, residual = each.forward(x, torch.arange(x.data.shape[0]), residual)
        model._maybe_add_hidden_state(states, number, x, residual)
    return x, residual, *states


# states behind the embedding, behind a block that ran the next norm, and behind one that did not
@pytest.mark.parametrize("read", [(), (1,), (0, 1, 2)])
def test_joined_blocks_compute_what_they_do_apart(read, blocks, monkeypatch):
    x = torch.randn(3, HIDDEN).bfloat16()
    monkeypatch.delattr(torch.Tensor, "is_cuda")
    apart = run(blocks, x, read)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    joined.join_blocks(model_of(blocks), OssTransformerBlock, CONFIG, ServingOptions())
    assert blocks[0].following is not None and blocks[1].following is None
    calls = []
    operator = get_kernel("torch", "norm_moe_norm")
    monkeypatch.setattr(
        torch.ops.oss_fused, "norm_moe_norm", lambda *a: (calls.append(1), operator(*a))[1]
    )
    together = run(blocks, x, read)
    assert len(calls) == 1 and len(together) == 2 + len(read)
    for a, b in zip(together, apart, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("tokens", [1, 8, 9])
def test_the_next_block_reads_both_levels_of_few_tokens(tokens, blocks):
    joined.join_blocks(model_of(blocks), OssTransformerBlock, CONFIG, ServingOptions())
    reader, norm = blocks[1].attn.qkv_proj, blocks[1].input_layernorm
    weight = torch.randn(96, HIDDEN)
    codes, scale = get_kernel("torch", "quantize_fp8")(weight, None, "channel")
    reader.weight, reader.weight_scale = (nn.Parameter(t, False) for t in (codes, scale))
    reader.quant_method = OssFp8LinearMethod(FP8_DYNAMIC, True, "qkv_proj")
    x, residual = torch.randn(tokens, HIDDEN).bfloat16(), torch.randn(tokens, HIDDEN).bfloat16()

    def product(bf16_rows):
        reader.quant_method.bf16_rows = bf16_rows
        activation, added = joined.norm_experts_norm(blocks[0], x, residual)
        return reader.quant_method.apply(reader, activation).double(), added

    (one_level, added), (both, _) = product(0), product(8)
    if tokens > 8:
        assert torch.equal(both, one_level)
        return
    normed = get_kernel("torch", "add_rms_norm_quant")(added, None, norm.weight, 1e-5, None)[3]
    want = normed.double() @ (codes.double() * scale.double()).t()
    assert (both - want).norm() < 0.005 * want.norm()
    assert (both - want).norm() * 3 < (one_level - want).norm()


@pytest.mark.parametrize("rank", list(ONE_RANK))
def test_experts_that_ranks_share_stay_apart(blocks, rank):
    blocks[0] = block(ONE_RANK | {rank: 2})
    joined.join_blocks(model_of(blocks), OssTransformerBlock, CONFIG, ServingOptions())
    assert not joined.joins(blocks[0], torch.zeros(1, HIDDEN))


def test_blocks_share_room_for_arrivals_and_the_logits_of_64_experts(blocks):
    joined.join_blocks(model_of(blocks), OssTransformerBlock, CONFIG, ServingOptions())
    scratch = blocks[0].oss_arrivals
    # of two blocks the last one has none that follows
    assert scratch.numel() >= SHARED_ROWS + 64 and not scratch.any()
    assert not hasattr(blocks[1], "oss_arrivals")


def test_what_else_keeps_blocks_apart(blocks):
    x = torch.zeros(1, HIDDEN)
    watched = ServingOptions(monitor_every=8)
    joined.join_blocks(model_of(blocks), OssTransformerBlock, CONFIG, watched)
    assert not joined.joins(blocks[0], x)
    returned = SimpleNamespace(aux_output_config=AuxOutputConfig(enable_return_routed_experts=True))
    joined.join_blocks(model_of(blocks), OssTransformerBlock, returned, ServingOptions())
    assert not joined.joins(blocks[0], x)
    joined.join_blocks(model_of(blocks), OssTransformerBlock, CONFIG, ServingOptions())
    assert joined.joins(blocks[0], x) and not joined.joins(blocks[1], x)
    # LoRA, which takes the projection's place, reads what the norm wrote
    projection, blocks[1].attn.qkv_proj = blocks[1].attn.qkv_proj, nn.Linear(1, 1)
    assert not joined.joins(blocks[0], x)
    blocks[1].attn.qkv_proj = projection
    blocks[0].mlp.experts.routed_experts.quant_method = object()
    assert not joined.joins(blocks[0], x)
