# SPDX-License-Identifier: MIT
"""The MXFP4 experts of a decoder layer with the norms around them, in as few launches as a batch
allows."""

from __future__ import annotations

import torch

from oss_fused.kernels.checks import HALF_DTYPES, check_dtype
from oss_fused.kernels.moe.combine_norm import Summands, combine_norm
from oss_fused.kernels.moe.config import (
    SHARED_ROWS,
    ExpertShape,
    choose_config,
    is_unrouted,
    takes_few_gate_up,
)
from oss_fused.kernels.moe.encode import empty_codes
from oss_fused.kernels.moe.place import unrouted
from oss_fused.kernels.moe.reference import uses_fp8_activations
from oss_fused.kernels.moe.router_norm import add_rms_norm_router
from oss_fused.kernels.moe.triton import down, encode, gate_up, runs_gluon_products
from oss_fused.kernels.norm.triton import add_rms_norm_quant


def _expected_logits(arrivals: torch.Tensor, experts: int) -> torch.Tensor | None:
    """Float32 scratch [experts] behind the counters, where there is room.

    A kernel writes it before its wait. New memory may be what the kernel ahead still reads.
    """
    scratch = arrivals[SHARED_ROWS : SHARED_ROWS + experts]
    return scratch.view(torch.float32) if scratch.shape[0] == experts else None


def norm_moe_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    gate: torch.Tensor,
    gate_bias: torch.Tensor | None,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    w2_bias: torch.Tensor | None,
    top_k: int,
    renormalize: bool,
    fp8_min_tokens: int,
    next_weight: torch.Tensor,
    next_eps: float,
    next_scale: torch.Tensor | None,
    arrivals: torch.Tensor,
    prefetch_weights: bool = False,
    bf16_rows: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scale, residual and levels of the next layer's input; see kernels/moe."""
    check_dtype("x", x, HALF_DTYPES)
    tokens, hidden = x.shape
    x, residual = x.contiguous(), residual.contiguous()
    if tokens == 0:
        nothing = (residual, next_weight, next_eps, next_scale, False, False, bf16_rows)
        q, scale, added, _, both = add_rms_norm_quant(x, *nothing)
        return q, scale, added, both
    experts, rows13, _ = w13.shape
    fp8 = uses_fp8_activations(tokens, "swigluoai", fp8_min_tokens)
    levels = 1 if fp8 else 2
    gluon = runs_gluon_products(x.device, rows13, hidden)
    shape = ExpertShape(top_k, experts, experts, hidden, rows13 // 2)
    config = choose_config(tokens, shape, fp8, gluon)
    norm = (x, residual, weight, eps, gate, gate_bias, prefetch_weights)
    if is_unrouted(tokens, experts):
        coded = empty_codes(x, 1, levels)
        asks = prefetch_weights and takes_few_gate_up(config, tokens, hidden, experts)
        expected = _expected_logits(arrivals, experts) if asks else None
        _, residual, logits = add_rms_norm_router(*norm, coded, expected)
        routing = unrouted(logits, coded.codes, coded.scale, expected)
    else:
        normed, residual, logits = add_rms_norm_router(*norm)
        routing = encode(normed, logits, top_k, renormalize, None, experts, levels, config)
    first = (w13, w13_scale, w13_bias, hidden, top_k, "swigluoai", x.dtype, levels, config)
    act, act_scale = gate_up(routing, *first)
    y_dtype = x.dtype if fp8 or config.large else torch.float32
    second = (w2, w2_scale, w2_bias, rows13 // 2, y_dtype, config, prefetch_weights)
    y = down(routing, act, act_scale, *second)
    summands = Summands(y, routing.topk_weights, routing.place)
    following = (next_weight, next_eps, next_scale, arrivals, prefetch_weights, bf16_rows)
    return combine_norm(summands, top_k, renormalize, residual, *following)
