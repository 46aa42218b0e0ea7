# SPDX-License-Identifier: MIT
"""RMSNorm + rotary embedding of whole rows, in one launch.

x [B, S, H], weight [H], cos and sin [S, D]: y = x * rsqrt(mean(x^2) + eps) * weight, and for
each head of D values out = y * cos + rotate_half(y) * sin. A CTA holds both halves of a
row's heads in registers; the intermediate never leaves them. CTAs are small and live for one row:
a multiprocessor runs a dozen side by side, and what one waits for the others hide. Where registers
leave room for fewer, each asks L2 for the row of a CTA that starts about when it ends.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oss_fused.kernels.integers import cdiv, next_power_of_2
from oss_fused.kernels.launch import (
    multiprocessors,
    pdl_options,
    prefetch_line,
    start_next,
    wait_for_inputs,
)
from oss_fused.kernels.numerics import round_to

# 16-bit values of a cache line
_LINE = tl.constexpr(64)
# values of a thread, and the warps of a multiprocessor for which their registers leave room
_VALUES, _WARPS = 64, 16


@triton.jit
def _load_more(row, left, half, mask, hint: tl.constexpr):
    """Both halves of the heads of the second tile."""
    x_left = tl.load(row + left, mask=mask, other=0.0, eviction_policy=hint)
    x_right = tl.load(row + left + half, mask=mask, other=0.0, eviction_policy=hint)
    return x_left, x_right


@triton.jit
def _ask_for(x, row, rows, sequence, strides, columns, LINES: tl.constexpr):
    """Ask L2 for a row, if there is one."""
    if row < rows:
        wide = tl.program_id(0).to(tl.int64) * 0
        place = (row // sequence + wide) * strides[0] + (row % sequence + wide) * strides[1]
        prefetch_line(x + place + tl.minimum(tl.arange(0, LINES) * _LINE, columns - 1))


@triton.jit(do_not_specialize=["rows", "sequence"])
def _rmsnorm_rope_kernel(
    x,
    weight,
    cos,
    sin,
    out,
    rows,
    sequence,
    heads,
    half,
    stride_batch,
    stride_token,
    stride_cos,
    stride_sin,
    eps,
    HEADS: tl.constexpr,
    MORE: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
):
    head = tl.arange(0, HEADS)[:, None]
    lane = tl.arange(0, HALF)[None, :]
    mask = (head < heads) & (lane < half)
    left = head * (2 * half) + lane
    right = left + half
    in_half = lane < half
    dtype: tl.constexpr = out.dtype.element_ty
    wait_for_inputs()
    start_next()
    gain_left = tl.load(weight + left, mask=mask, other=0.0)
    gain_right = tl.load(weight + right, mask=mask, other=0.0)
    if MORE:
        others = HEADS + tl.arange(0, MORE)[:, None]
        more = others * (2 * half) + lane
        in_more = (others < heads) & in_half
        more_gains = _load_more(weight, more, half, in_more, "")
    # added after the divisions, which cost much more in 64 bits than in 32
    wide = tl.program_id(0).to(tl.int64) * 0
    strides = (stride_batch, stride_token)
    LINES: tl.constexpr = (4 if MORE else 2) * HEADS * HALF // _LINE
    for index in tl.range(0, ROWS, num_stages=STAGES):
        # beyond the end the last row once more
        row = tl.minimum(tl.program_id(0) * ROWS + index, rows - 1)
        token = row % sequence + wide
        source = x + (row // sequence + wide) * stride_batch + token * stride_token
        # x and out pass L2 as a stream: only both hints together are worth anything, a tenth
        x_left = tl.load(source + left, mask=mask, other=0.0, eviction_policy="evict_first")
        x_right = tl.load(source + right, mask=mask, other=0.0, eviction_policy="evict_first")
        if MORE:
            x_more = _load_more(source, more, half, in_more, "evict_first")
        elif AHEAD > 0:
            _ask_for(x, row + AHEAD, rows, sequence, strides, heads * 2 * half, LINES)
        cos_row = cos + token * stride_cos
        sin_row = sin + token * stride_sin
        cos_left = tl.load(cos_row + lane, mask=in_half, other=0.0).to(tl.float32)
        cos_right = tl.load(cos_row + half + lane, mask=in_half, other=0.0).to(tl.float32)
        sin_left = tl.load(sin_row + lane, mask=in_half, other=0.0).to(tl.float32)
        sin_right = tl.load(sin_row + half + lane, mask=in_half, other=0.0).to(tl.float32)
        if MORE and AHEAD > 0:
            # behind cos and sin: their loads come after this branch, and would wait for x
            _ask_for(x, row + AHEAD, rows, sequence, strides, heads * 2 * half, LINES)
        x_left = x_left.to(tl.float32)
        x_right = x_right.to(tl.float32)
        squares = x_left * x_left + x_right * x_right
        if MORE:
            more_left, more_right = x_more[0].to(tl.float32), x_more[1].to(tl.float32)
            # heads MORE apart lie in one thread: nothing is exchanged before the reduction
            squares = tl.sum(tl.reshape(squares, [HEADS // MORE, MORE, HALF]), 0)
            squares += more_left * more_left + more_right * more_right
        rstd = tl.rsqrt(tl.sum(squares) / (heads * 2 * half) + eps)
        # rstd goes to the few factors of a row's lanes, not to all of its values
        y_left = x_left * gain_left.to(tl.float32)
        y_right = x_right * gain_right.to(tl.float32)
        target = out + (row + wide) * (heads * 2 * half)
        out_left = y_left * (cos_left * rstd) - y_right * (sin_left * rstd)
        out_right = y_right * (cos_right * rstd) + y_left * (sin_right * rstd)
        tl.store(target + left, round_to(out_left, dtype), mask=mask, cache_modifier=".cs")
        tl.store(target + right, round_to(out_right, dtype), mask=mask, cache_modifier=".cs")
        if MORE:
            y_left = more_left * more_gains[0].to(tl.float32)
            y_right = more_right * more_gains[1].to(tl.float32)
            out_left = round_to(y_left * (cos_left * rstd) - y_right * (sin_left * rstd), dtype)
            out_right = round_to(y_right * (cos_right * rstd) + y_left * (sin_right * rstd), dtype)
            tl.store(target + more, out_left, mask=in_more, cache_modifier=".cs")
            tl.store(target + more + half, out_right, mask=in_more, cache_modifier=".cs")


def _rule(heads: int, half: int) -> dict[str, int]:
    """Warps of a CTA, rows that it takes, and how many of them are on their way at once.

    64 values a thread where the heads allow it: cos and sin are half of what a thread loads, and
    serve all of its heads. Fewer threads than values in half a head would make Triton exchange
    them through shared memory.
    """
    return {"num_warps": min(max(heads * half // 1024, half // 16, 1), 16), "rows": 1, "stages": 1}


def _tiles(block: int, heads: int, half: int, warps: int) -> tuple[int, int]:
    """Heads of the first and of the second tile of a row, of which ``block`` is the power of two.

    Two tiles where they leave a quarter of ``block`` out and the second has a vector for each
    thread; else the second is 0.
    """
    split = 4 * heads <= 3 * block and block * half >= 1024 * warps
    return (block // 2, block // 4) if split else (block, 0)


def _ahead(values: int, config: dict[str, int], device: torch.device) -> int:
    """Rows from that of a program to the one that it asks L2 for; 0: to none.

    ``values``: of a padded row. Measured on an H200: the rows of all programs that run at once.
    """
    warps = config["num_warps"]
    if config["rows"] > 1 or values < _VALUES * 32 * warps:
        return 0
    return multiprocessors(device) * (_WARPS // warps)


def rmsnorm_rope(
    x: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
    config: dict[str, int] | None = None,
) -> torch.Tensor:
    """``y * cos + rotate_half(y) * sin`` of ``y = rms_norm(x)``; see kernels/rope.

    ``config`` is the tuner's: what ``_rule`` would return.
    """
    batch, sequence, hidden = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    x = x if x.stride(2) == 1 else x.contiguous()
    cos = cos if cos.stride(1) == 1 else cos.contiguous()
    sin = sin if sin.stride(1) == 1 else sin.contiguous()
    half = cos.shape[1] // 2
    heads = hidden // cos.shape[1]
    head_block, half_block = next_power_of_2(heads), next_power_of_2(half)
    rows = batch * sequence
    config = config or _rule(head_block, half_block)
    first, second = _tiles(head_block, heads, half_block, config["num_warps"])
    _rmsnorm_rope_kernel[(cdiv(rows, config["rows"]),)](
        x,
        weight.contiguous(),
        cos,
        sin,
        out,
        rows,
        sequence,
        heads,
        half,
        x.stride(0),
        x.stride(1),
        cos.stride(0),
        sin.stride(0),
        eps,
        HEADS=first,
        MORE=second,
        HALF=half_block,
        ROWS=config["rows"],
        STAGES=config["stages"],
        AHEAD=_ahead(2 * head_block * half_block, config, x.device),
        num_warps=config["num_warps"],
        **pdl_options(x.device),
    )
    return out
