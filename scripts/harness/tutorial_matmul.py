# SPDX-License-Identifier: MIT
"""The matrix product in five steps, for docs/matmul-in-steps.md: a [M, K] @ b [K, N] -> [M, N].

v0 a program per row and block of columns, one k at a time; v1 tiles and tensor cores; v2 the same
kernel with a software pipeline and an order of tiles that reuses L2; v3 its tile sizes from the
tuner; v4 bias and SiLU in the epilogue. a, b bfloat16, float16 or float32; accumulation float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oss_fused.errors import ShapeMismatchError
from oss_fused.kernels.checks import FLOAT_DTYPES, check_dtype, check_same_device, check_shape
from oss_fused.kernels.integers import cdiv
from oss_fused.kernels.numerics import INTERPRETED, round_to

_NAIVE_COLUMNS = 128
# a good tile of 4096^2 bfloat16 on Hopper before any tuning
_DEFAULT = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 8}


@triton.jit
def _matmul_naive_kernel(
    a,
    b,
    out,
    n,
    k,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = cols < n
    acc = tl.zeros([BLOCK_N], tl.float32)
    for i in range(0, k):
        scalar = tl.load(a + row * stride_am + i * stride_ak).to(tl.float32)
        line = tl.load(b + i * stride_bk + cols * stride_bn, mask=mask, other=0.0)
        acc += scalar * line.to(tl.float32)
    tl.store(out + row * n + cols, round_to(acc, out.dtype.element_ty), mask=mask)


@triton.jit
def _matmul_tile_kernel(
    a,
    b,
    bias,
    out,
    m,
    n,
    k,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    SILU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    # GROUP_M row blocks walk the columns of b together: they find them in L2
    pid = tl.program_id(0)
    blocks_m = tl.cdiv(m, BLOCK_M)
    blocks_n = tl.cdiv(n, BLOCK_N)
    group = pid // (GROUP_M * blocks_n)
    inside = pid % (GROUP_M * blocks_n)
    size = tl.minimum(blocks_m - group * GROUP_M, GROUP_M)
    offs_m = ((group * GROUP_M + inside % size) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    offs_n = ((inside // size) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    offs_k = tl.arange(0, BLOCK_K).to(tl.int64)
    a_ptrs = a + offs_m[:, None] * stride_am + offs_k[None, :] * stride_ak
    b_ptrs = b + offs_k[:, None] * stride_bk + offs_n[None, :] * stride_bn
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, k, BLOCK_K):
        in_k = offs_k < k - start
        tile_a = tl.load(a_ptrs, mask=(offs_m[:, None] < m) & in_k[None, :], other=0.0)
        tile_b = tl.load(b_ptrs, mask=in_k[:, None] & (offs_n[None, :] < n), other=0.0)
        if INTERPRETED:
            # the interpreter multiplies bfloat16 bit patterns
            tile_a, tile_b = tile_a.to(tl.float32), tile_b.to(tl.float32)
        acc = tl.dot(tile_a, tile_b, acc, input_precision="ieee")
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    if bias is not None:
        acc += tl.load(bias + offs_n, mask=offs_n < n, other=0.0).to(tl.float32)[None, :]
    if SILU:
        acc = acc / (1.0 + tl.exp(-acc))
    mask = (offs_m[:, None] < m) & (offs_n[None, :] < n)
    out_ptrs = out + offs_m[:, None] * n + offs_n[None, :]
    tl.store(out_ptrs, round_to(acc, out.dtype.element_ty), mask=mask)


def _checked_output(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ShapeMismatchError(
            f"a.shape={tuple(a.shape)}, b.shape={tuple(b.shape)}: expected [M, K] and [K, N]"
        )
    check_dtype("a", a, FLOAT_DTYPES)
    check_dtype("b", b, (a.dtype,))
    check_same_device(a, b=b)
    return torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)


def _launch_tiles(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, silu: bool, **config: int
) -> torch.Tensor:
    out = _checked_output(a, b)
    m, n = out.shape
    if out.numel() == 0:
        return out
    if bias is not None:
        check_shape("bias", bias, (n,))
        bias = bias.contiguous()
    grid = (cdiv(m, config["BLOCK_M"]) * cdiv(n, config["BLOCK_N"]),)
    _matmul_tile_kernel[grid](
        a, b, bias, out, m, n, a.shape[1], *a.stride(), *b.stride(), SILU=silu, **config
    )
    return out


def matmul_v0(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Naive: every program reads its row of a and all of its columns of b alone."""
    out = _checked_output(a, b)
    m, n = out.shape
    if out.numel():
        _matmul_naive_kernel[(m, cdiv(n, _NAIVE_COLUMNS))](
            a, b, out, n, a.shape[1], *a.stride(), *b.stride(), BLOCK_N=_NAIVE_COLUMNS
        )
    return out


def matmul_v1(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Tiles on tensor cores: a loaded value serves a whole tile; loads and products alternate."""
    tile = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "GROUP_M": 1}
    return _launch_tiles(a, b, None, False, **tile, num_warps=4, num_stages=1)


def matmul_v2(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Larger tiles, three of them in flight while one is multiplied, and grouped tile order."""
    return _launch_tiles(a, b, None, False, **_DEFAULT, num_warps=4, num_stages=3)


def matmul_v3(
    a: torch.Tensor,
    b: torch.Tensor,
    BLOCK_M: int = 128,
    BLOCK_N: int = 256,
    BLOCK_K: int = 64,
    GROUP_M: int = 8,
    num_warps: int = 8,
    num_stages: int = 3,
) -> torch.Tensor:
    """v2 with its config as arguments, for the tuner; the default is a common one for Hopper."""
    tile = {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "BLOCK_K": BLOCK_K, "GROUP_M": GROUP_M}
    return _launch_tiles(a, b, None, False, **tile, num_warps=num_warps, num_stages=num_stages)


def matmul_v4(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor,
    BLOCK_M: int = 128,
    BLOCK_N: int = 256,
    BLOCK_K: int = 64,
    GROUP_M: int = 8,
    num_warps: int = 8,
    num_stages: int = 3,
) -> torch.Tensor:
    """``silu(a @ b + bias)``: the epilogue works on registers and saves two trips to memory."""
    tile = {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "BLOCK_K": BLOCK_K, "GROUP_M": GROUP_M}
    return _launch_tiles(a, b, bias, True, **tile, num_warps=num_warps, num_stages=num_stages)
