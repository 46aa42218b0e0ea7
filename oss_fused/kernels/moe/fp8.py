# SPDX-License-Identifier: MIT
"""FP8 experts with channel scales and FP8 activations: the MXFP4 layer's plan, other products.

The intermediate is rounded to x's dtype and then quantised per token, since its scale is known only
when the row is complete.
"""

from __future__ import annotations

import torch

from oss_fused.kernels.checks import HALF_DTYPES, check_dtype
from oss_fused.kernels.eviction import activation_policy
from oss_fused.kernels.integers import cdiv
from oss_fused.kernels.launch import pdl_options
from oss_fused.kernels.moe.combine_norm import Summands, combine
from oss_fused.kernels.moe.config import fp8_rows
from oss_fused.kernels.moe.encode import encode_rows
from oss_fused.kernels.moe.gemm import Product, _down_kernel, _gate_up_kernel
from oss_fused.kernels.moe.router import route


def moe_fp8(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    w2_bias: torch.Tensor | None,
    top_k: int,
    renormalize: bool,
    expert_map: torch.Tensor | None = None,
    activation: str = "swigluoai",
) -> torch.Tensor:
    """FP8 experts; see kernels/moe for the contract."""
    check_dtype("x", x, HALF_DTYPES)
    tokens, hidden = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    experts, rows13, _ = w13.shape
    if tokens == 0 or experts == 0:
        return out.zero_()
    pairs, inter = tokens * top_k, rows13 // 2
    rows = fp8_rows(pairs, experts)
    routing = route(
        router_logits, top_k, renormalize, expert_map, experts, rows, x, 1, permute=False
    )
    policy = activation_policy(tokens)
    first = Product(rows13, hidden, rows, promote=rows <= 16, policy=policy)
    options = {"num_warps": 4, **pdl_options(x.device)}
    tiles = routing.tiles.shape[0]
    act = torch.empty(pairs, inter, dtype=x.dtype, device=x.device)
    _gate_up_kernel[(cdiv(rows13, 64), tiles)](
        routing.codes,
        routing.scale,
        w13,
        w13_scale,
        w13_bias,
        act,
        routing.order,
        routing.tiles,
        TOP_K=top_k,
        SILU=activation == "silu",
        DTYPE=None,
        P=first,
        **options,
    )
    codes, scale = encode_rows(act, 1, permute=False, tokens=tokens)
    y_dtype = torch.float32 if rows <= 32 else torch.bfloat16
    y = torch.empty(1, pairs, hidden, dtype=y_dtype, device=x.device)
    second = first._replace(n=hidden, k=inter)
    arguments = (codes, scale, w2, w2_scale, w2_bias, y, routing.tiles, pairs)
    _down_kernel[(cdiv(hidden, 64), tiles)](*arguments, PREFETCH=False, P=second, **options)
    summands = Summands(y, routing.topk_weights, routing.place)
    return combine(summands, top_k, renormalize, out)
