# SPDX-License-Identifier: MIT
"""Expert layers: ``moe_repack_mxfp4``, ``add_rms_norm_router``, ``moe_route``,
``moe_mxfp4``, ``norm_moe_norm`` and ``moe_fp8``.

T tokens, H hidden size, I intermediate size (of this rank), E experts of this rank (all of them
without expert parallelism), G experts of the model.

moe_repack_mxfp4(weight, scale, gate_up) -> (packed, packed_scale)
    Run once at load. weight [E, N, K/2] uint8 (two e2m1 codes a byte, low nibble = even k), scale
    [E, N, K/32] uint8 (e8m0), as vLLM and the gpt-oss checkpoints hold them; N a multiple of 64,
    K of 32. ``gate_up=True`` for w13 [E, 2I, H/2], whose rows alternate gate, up, gate, up (a
    layout [gates; ups] is interleaved first: ``w.view(E, 2, I, -1).transpose(1, 2)``), False for
    w2 [E, H, I/2]. packed has weight's shape and dtype; packed_scale is int32
    [E, N/64, ceil(K/128), 64]: as many bytes as scale, rounded up to whole chunks of 128 columns.
    Both are opaque; kernels/moe/mxfp4.py describes and inverts them.

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
    Below it the intermediate is rounded to x's dtype and sums are float32. Products are exact for
    bfloat16; of float16 values they take 9 significant bits, rounded. Both down to 2^-13 of a
    row's largest value.
    Safe under CUDA graphs: no host sync, and what runs depends on shapes only. Sums are in a fixed
    order, so results are reproducible. T = 0 is valid. Rows of x or router_logits that hold NaN
    come out as NaN and touch no other row.

norm_moe_norm(x, residual, weight, eps, gate, gate_bias, w13, w13_scale, w13_bias, w2, w2_scale,
              w2_bias, top_k, renormalize, fp8_min_tokens, next_weight, next_eps, next_scale,
              arrivals, prefetch_weights=False, bf16_rows=0) -> (q, scale, residual_out, levels)
    add_rms_norm_router, moe_mxfp4 of all experts ("swigluoai") and add_rms_norm_quant of its output
    with next_weight and next_scale [1] (None: a scale per token), without what lies between them:
    q [T, H] e4m3, scale [T, 1] or [1] float32, residual_out [T, H]. One token takes four launches.
    bf16_rows and levels: kernels/levels.py.
    arrivals: int32 scratch, whose first min(T, 16) entries are zeros before and after. Of at least
    16 + E entries, a kernel of one token writes E to the entries from 16 on, with prefetch_weights;
    what they held does not matter. Launches that overlap in time need buffers of their own.

moe_fp8(x, router_logits, w13, w13_scale, w13_bias, w2, w2_scale, w2_bias, top_k, renormalize,
        expert_map, activation) -> out
    The same layer with float8_e4m3fn weights w13 [E, 2I, H] (rows gate, up, gate, up) and w2
    [E, H, I], as stored, and channel scales float32 [E, 2I, 1] and [E, H, 1]; H and I multiples
    of 16. x and the intermediate (rounded to x's dtype) are quantised per token.

prefetch_weights is fp8_gemm's (kernels/gemm), for the norm's and the router's weights or w2.

Raises: ShapeMismatchError, UnsupportedDtypeError, UnsupportedDeviceError or SchemeError naming
the argument.
"""

from __future__ import annotations

import torch

from oss_fused.errors import ShapeMismatchError
from oss_fused.kernels.checks import FLOAT_DTYPES, FP8, check_shape
from oss_fused.kernels.contract import Between, Epsilon, OneOf, Operand, Rule, Scale
from oss_fused.kernels.levels import BF16_ROWS_RULE, check_bf16_rows
from oss_fused.kernels.moe import mxfp4, reference
from oss_fused.kernels.moe.config import SHARED_ROWS
from oss_fused.kernels.moe.mxfp4 import BLOCK, CHUNK, ROW_GROUP
from oss_fused.kernels.op import declare


def _check_top_k(router_logits: torch.Tensor, top_k: int) -> None:
    if not 1 <= top_k <= router_logits.shape[1]:
        raise ShapeMismatchError(f"top_k={top_k}: expected 1..{router_logits.shape[1]}")


def _check_routing(
    router_logits: torch.Tensor, w13: torch.Tensor, top_k: int, expert_map: torch.Tensor | None
) -> None:
    # without experts of its own a rank has a map that says so
    least = 1 if expert_map is None else 0
    if w13.shape[0] < least or not min(w13.shape[1:]):
        raise ShapeMismatchError(
            f"w13.shape={tuple(w13.shape)}: expected E of at least {least}, I and H of at least 1"
        )
    _check_top_k(router_logits, top_k)
    experts = w13.shape[0] if expert_map is None else expert_map.shape[0]
    check_shape("router_logits", router_logits, (router_logits.shape[0], experts))


def _check_mxfp4(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    top_k: int,
    expert_map: torch.Tensor | None,
) -> None:
    _check_routing(router_logits, w13, top_k, expert_map)
    experts, rows, _ = w13.shape
    hidden = x.shape[1]
    if rows % ROW_GROUP or hidden % ROW_GROUP:
        raise ShapeMismatchError(
            f"x.shape={tuple(x.shape)}, w13.shape={tuple(w13.shape)}: expected [T, H] and "
            f"[E, 2I, H/2] with H a multiple of {ROW_GROUP} and I a multiple of {BLOCK}"
        )
    check_shape("w13", w13, (experts, rows, hidden // 2))
    check_shape("w2", w2, (experts, hidden, rows // 4))
    for name, scale, n, k in (
        ("w13_scale", w13_scale, rows, hidden),
        ("w2_scale", w2_scale, hidden, rows // 2),
    ):
        check_shape(name, scale, (experts, n // ROW_GROUP, -(-k // CHUNK), ROW_GROUP))


def _check_router(gate: torch.Tensor) -> None:
    if not gate.numel():
        raise ShapeMismatchError(f"gate.shape={tuple(gate.shape)}: expected at least one expert, H")


def _check_fp8(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    top_k: int,
    expert_map: torch.Tensor | None,
) -> None:
    _check_routing(router_logits, w13, top_k, expert_map)
    experts, rows, hidden = w13.shape
    if rows % 32 or hidden % 16:
        raise ShapeMismatchError(
            f"x.shape={tuple(x.shape)}, w13.shape={tuple(w13.shape)}: expected [T, H] and "
            f"[E, 2I, H] with H and I multiples of 16"
        )
    check_shape("w2", w2, (experts, hidden, rows // 2))


def _check_repack(weight: torch.Tensor, scale: torch.Tensor) -> None:
    experts, rows, half = weight.shape
    if not rows or rows % ROW_GROUP or half % (BLOCK // 2):
        raise ShapeMismatchError(
            f"weight.shape={tuple(weight.shape)}: expected [E, N, K/2] with N a multiple of "
            f"{ROW_GROUP} and K a multiple of {BLOCK}"
        )
    check_shape("scale", scale, (experts, rows, 2 * half // BLOCK))


def _repack_fake(weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    experts, rows, half = weight.shape
    shape = (experts, rows // ROW_GROUP, -(-2 * half // CHUNK), ROW_GROUP)
    return weight.new_empty(weight.shape), scale.new_empty(shape, dtype=torch.int32)


def _empty_like_x(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


def _check_block(
    x: torch.Tensor,
    gate: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    top_k: int,
    next_scale: torch.Tensor | None,
    arrivals: torch.Tensor,
    bf16_rows: int = 0,
) -> None:
    check_bf16_rows(bf16_rows, "next_scale", next_scale)
    _check_router(gate)
    logits = x.new_empty((x.shape[0], gate.shape[0]), device="meta")
    _check_mxfp4(x, logits, w13, w13_scale, w2, w2_scale, top_k, None)
    least = min(x.shape[0], SHARED_ROWS)
    if arrivals.numel() < least or not arrivals.is_contiguous():
        raise ShapeMismatchError(
            f"arrivals.numel()={arrivals.numel()}: expected at least {least}, contiguous"
        )


def _block_fake(
    x: torch.Tensor, next_scale: torch.Tensor | None, bf16_rows: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    scale = (x.shape[0], 1) if next_scale is None else next_scale.shape
    return (
        x.new_empty(x.shape, dtype=FP8),
        x.new_empty(scale, dtype=torch.float32),
        x.new_empty(x.shape),
        x.new_empty(2 * bf16_rows, x.shape[1], dtype=FP8),
    )


_LAYER: dict[str, Rule] = {
    "x": Operand("T H", *FLOAT_DTYPES),
    "router_logits": Operand("T G", *FLOAT_DTYPES),
    "w13_bias": Operand("E rows", *FLOAT_DTYPES, dense=True),
    "w2_bias": Operand("E H", *FLOAT_DTYPES, dense=True),
    "expert_map": Operand("G", torch.int32),
    "activation": OneOf(*reference.ACTIVATIONS),
}


def _mxfp4_weights(rows: int, columns: int, gate_up: bool, packed: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(0, 256, (4, rows, columns // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(
        118, 122, (4, rows, columns // BLOCK), dtype=torch.uint8, generator=generator
    )
    return mxfp4.moe_repack_mxfp4(codes, scale, gate_up)[0 if packed else 1]


declare(
    mxfp4.moe_repack_mxfp4,
    {"weight": Operand("E N K/2", torch.uint8), "scale": Operand("E N K/32", torch.uint8)},
    {"triton": "mxfp4"},
    check=_check_repack,
    fake=_repack_fake,
    example={"E": 2, "N": 64, "K/2": 32, "K/32": 2, "gate_up": True},
)
declare(
    reference.add_rms_norm_router,
    {
        "x": Operand("T H", *FLOAT_DTYPES),
        "residual": Operand("T H", like="x"),
        "weight": Operand("H", *FLOAT_DTYPES),
        "gate": Operand("G H", like="x"),
        "gate_bias": Operand("G", like="x"),
        "eps": Epsilon(),
    },
    {"triton": "router_norm"},
    check=_check_router,
    example={"T": 3, "H": 64, "G": 8, "eps": 1e-5},
)
declare(
    reference.moe_route,
    {"router_logits": Operand("T G", *FLOAT_DTYPES)},
    {"triton": "router"},
    check=_check_top_k,
    example={"T": 5, "G": 8, "top_k": 2, "renormalize": True},
)
_EXAMPLE = {"T": 3, "H": 64, "G": 4, "E": 4, "rows": 64, "top_k": 2, "renormalize": True}
_MXFP4: dict[str, Rule] = {
    "w13": Operand("E rows H/2", torch.uint8, dense=True),
    "w13_scale": Operand("E w13_groups w13_chunks 64", torch.int32, dense=True),
    "w2": Operand("E H I/2", torch.uint8, dense=True),
    "w2_scale": Operand("E w2_groups w2_chunks 64", torch.int32, dense=True),
    "fp8_min_tokens": Between(-1),
}
_MXFP4_EXAMPLE = {
    "w13": lambda g: _mxfp4_weights(64, 64, gate_up=True, packed=True),
    "w13_scale": lambda g: _mxfp4_weights(64, 64, gate_up=True, packed=False),
    "w2": lambda g: _mxfp4_weights(64, 32, gate_up=False, packed=True),
    "w2_scale": lambda g: _mxfp4_weights(64, 32, gate_up=False, packed=False),
}
declare(
    reference.moe_mxfp4,
    {**_LAYER, **_MXFP4},
    {"triton": "triton"},
    check=_check_mxfp4,
    fake=_empty_like_x,
    example={**_EXAMPLE, **_MXFP4_EXAMPLE, "expert_map": None},
)
declare(
    reference.norm_moe_norm,
    {
        "x": Operand("T H", *FLOAT_DTYPES),
        "residual": Operand("T H", like="x"),
        "weight": Operand("H", *FLOAT_DTYPES),
        "gate": Operand("E H", like="x"),
        "gate_bias": Operand("E", like="x"),
        **{name: _LAYER[name] for name in ("w13_bias", "w2_bias")},
        **_MXFP4,
        "eps": Epsilon(),
        "next_weight": Operand("H", *FLOAT_DTYPES),
        "next_eps": Epsilon(),
        "next_scale": Scale(),
        "arrivals": Operand("...", torch.int32),
        "bf16_rows": BF16_ROWS_RULE,
    },
    {"triton": "block"},
    check=_check_block,
    fake=_block_fake,
    example={
        **_EXAMPLE,
        **_MXFP4_EXAMPLE,
        "eps": 1e-5,
        "fp8_min_tokens": -1,
        "next_eps": 1e-5,
        "next_scale": None,
        "arrivals": lambda g: torch.zeros(16, dtype=torch.int32),
    },
)
declare(
    reference.moe_fp8,
    {
        **_LAYER,
        "w13": Operand("E rows H", FP8, dense=True),
        "w13_scale": Operand("E rows 1", torch.float32, dense=True),
        "w2": Operand("E H I", FP8, dense=True),
        "w2_scale": Operand("E H 1", torch.float32, dense=True),
    },
    {"triton": "fp8"},
    check=_check_fp8,
    fake=_empty_like_x,
    example={**_EXAMPLE, "I": 32, "expert_map": None},
)
