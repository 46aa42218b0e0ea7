# SPDX-License-Identifier: MIT
"""Expert layers: ``oss_fused::moe_repack_mxfp4``, ``add_rms_norm_router``, ``moe_route``,
``moe_mxfp4`` and ``moe_fp8``.

T tokens, H hidden size, I intermediate size (of this rank), E experts of this rank (all of them
without expert parallelism), G experts of the model.

moe_repack_mxfp4(weight, scale, gate_up) -> (packed, packed_scale)
    Run once at load. weight [E, N, K/2] uint8 (two e2m1 codes a byte, low nibble = even k), scale
    [E, N, K/32] uint8 (e8m0), as vLLM and the gpt-oss checkpoints hold them; N a multiple of 64,
    K of 32. ``gate_up=True`` for w13 [E, 2I, H/2], whose rows alternate gate, up, gate, up (a
    layout [gates; ups] is interleaved first: ``w.view(E, 2, I, -1).transpose(1, 2)``), False for
    w2 [E, H, I/2]. packed has weight's shape and dtype; packed_scale is int32
    [E, N/64, ceil(K/128), 64]: as many bytes as scale, rounded up to whole chunks of 128 columns.
    Both are opaque; kernels/reference/mxfp4.py describes and inverts them.

add_rms_norm_router(x, residual, weight, eps, gate, gate_bias, prefetch_weights=False)
        -> (normed, residual_out, logits)
    What comes before the experts, for few tokens in one launch. x, residual [T, H], weight [H],
    gate [G, H], gate_bias [G], all of one dtype: residual_out = x + residual (a copy of x without
    residual), normed = rms_norm(residual_out) * weight rounded as in add_rms_norm_quant, logits
    [T, G] = normed @ gate.T + gate_bias, summed in float32.

moe_route(router_logits, top_k, renormalize) -> (topk_weights, topk_ids)
    router_logits [T, G] float; topk_weights [T, top_k] float32, topk_ids [T, top_k] int32, largest
    first, the lower id first among equals. ``renormalize`` takes the softmax over the chosen
    logits (gpt-oss), else the weights are the chosen probabilities of a softmax over all. A row
    with NaN logits gets valid ids and NaN weights.

moe_mxfp4(x, router_logits, w13, w13_scale, w13_bias, w2, w2_scale, w2_bias, top_k, renormalize,
          expert_map, activation, fp8_min_tokens, prefetch_weights=False) -> out
    out [T, H] = sum over the chosen experts of weight * (w2 @ act(w13 @ x + w13_bias) + w2_bias),
    in x's dtype. No all-reduce: with tensor parallelism pass w2_bias on one rank only, with expert
    parallelism each rank returns the share of its own experts.
    x [T, H], H a multiple of 64; router_logits [T, G]; w13, w2 and their scales from
    moe_repack_mxfp4; w13_bias [E, 2I] (gate, up, gate, up) and w2_bias [E, H], float32 or half, or
    None; expert_map [G] int32 gives the local id of a global expert, -1 where it is not here (its
    share is then zero), or None. I is a multiple of 32: a rank's share of I is rounded up, with
    zero weights, scales and biases in the padding.
    activation: "swigluoai" (gate clamped to <= 7, up to +-7, gate * sigmoid(1.702 gate) *
    (up + 1)) or "silu" (gate * sigmoid(gate) * up).
    fp8_min_tokens: batches of at least that many tokens use FP8 activations (x per token, the
    intermediate with the static scale 1/8 that the clamps allow; "swigluoai" only); -1 never.
    Below it the arithmetic is that of x's dtype: products exact, float32 sums, the intermediate
    rounded to x's dtype.
    Safe under CUDA graphs: no host sync, and what runs depends on shapes only. Sums are in a fixed
    order, so results are reproducible. T = 0 is valid. Rows of x or router_logits that hold NaN
    come out as NaN and touch no other row.

moe_fp8(x, router_logits, w13, w13_scale, w13_bias, w2, w2_scale, w2_bias, top_k, renormalize,
        expert_map, activation) -> out
    The same layer with float8_e4m3fn weights w13 [E, 2I, H] (rows gate, up, gate, up) and w2
    [E, H, I], as stored, and channel scales float32 [E, 2I, 1] and [E, H, 1]; H and I multiples
    of 16. x and the intermediate (rounded to x's dtype) are quantised per token.

prefetch_weights is fp8_gemm's (ops/gemm.py), for the norm's and the router's weights or w2.

Raises: ShapeMismatchError, UnsupportedDtypeError, UnsupportedDeviceError or SchemeError naming
the argument.
"""

from __future__ import annotations

import torch

from oss_fused.ops.registration import register_op


def _moe_repack_mxfp4_fake(
    weight: torch.Tensor, scale: torch.Tensor, gate_up: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    experts, rows, half = weight.shape
    shape = (experts, rows // 64, -(-half // 64), 64)
    return weight.new_empty(weight.shape), scale.new_empty(shape, dtype=torch.int32)


def _add_rms_norm_router_fake(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    gate: torch.Tensor,
    gate_bias: torch.Tensor | None,
    prefetch_weights: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape), x.new_empty(x.shape[0], gate.shape[0])


def _moe_route_fake(
    router_logits: torch.Tensor, top_k: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (router_logits.shape[0], top_k)
    return (
        router_logits.new_empty(shape, dtype=torch.float32),
        router_logits.new_empty(shape, dtype=torch.int32),
    )


def _moe_mxfp4_fake(
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
    fp8_min_tokens: int = -1,
    prefetch_weights: bool = False,
) -> torch.Tensor:
    return x.new_empty(x.shape)


def _moe_fp8_fake(
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
    return x.new_empty(x.shape)


register_op(
    "moe_repack_mxfp4(Tensor weight, Tensor scale, bool gate_up) -> (Tensor, Tensor)",
    _moe_repack_mxfp4_fake,
)
register_op(
    "add_rms_norm_router(Tensor x, Tensor? residual, Tensor weight, float eps, Tensor gate, "
    "Tensor? gate_bias, bool prefetch_weights=False) -> "
    "(Tensor normed, Tensor residual_out, Tensor logits)",
    _add_rms_norm_router_fake,
)
register_op(
    "moe_route(Tensor router_logits, int top_k, bool renormalize) -> (Tensor, Tensor)",
    _moe_route_fake,
)
register_op(
    "moe_mxfp4(Tensor x, Tensor router_logits, Tensor w13, Tensor w13_scale, Tensor? w13_bias, "
    "Tensor w2, Tensor w2_scale, Tensor? w2_bias, int top_k, bool renormalize, "
    'Tensor? expert_map=None, str activation="swigluoai", int fp8_min_tokens=-1, '
    "bool prefetch_weights=False) -> Tensor",
    _moe_mxfp4_fake,
)
register_op(
    "moe_fp8(Tensor x, Tensor router_logits, Tensor w13, Tensor w13_scale, Tensor? w13_bias, "
    "Tensor w2, Tensor w2_scale, Tensor? w2_bias, int top_k, bool renormalize, "
    'Tensor? expert_map=None, str activation="swigluoai") -> Tensor',
    _moe_fp8_fake,
)
