# SPDX-License-Identifier: MIT
"""Attention before flash attention, for the tutorial; q, k [B, H, N, D], v [B, H, N, Dv].

Level a: product, softmax, product, three kernels with the matrix of logits between them. Level b:
product and softmax in one kernel, which writes the weights, then the product. Level c is
oss_fused.flash_attention, which writes neither.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oss_fused.errors import ShapeMismatchError
from oss_fused.kernels.checks import FLOAT_DTYPES, check_dtype, check_same_device
from oss_fused.kernels.integers import cdiv, next_power_of_2
from oss_fused.kernels.numerics import INTERPRETED, round_to
from oss_fused.normalization import softmax

_BLOCK = 32
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tile(base, first, rows, column, columns, stride, step, BLOCK_R: tl.constexpr, BLOCK_C):
    row = first + tl.arange(0, BLOCK_R)[:, None]
    cols = column + tl.arange(0, BLOCK_C)[None, :]
    mask = (row < rows) & (cols < columns)
    tile = tl.load(base + row * stride + cols * step, mask=mask, other=0.0)
    if INTERPRETED:
        # the interpreter multiplies bfloat16 bit patterns
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def _product_kernel(
    a, b, out, m, n, k, scale, stride_bk, stride_bn, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr
):
    """out [M, N] = scale * a [M, K] b [K, N] of one head; axis 0 counts heads."""
    head = tl.program_id(0).to(tl.int64)
    a += head * m * k
    b += head * k * n
    first, column = tl.program_id(1) * BLOCK, tl.program_id(2) * BLOCK
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for start in range(0, k, BLOCK_K):
        left = _tile(a, first, m, start, k, k, 1, BLOCK, BLOCK_K)
        right = _tile(b, start, k, column, n, stride_bk, stride_bn, BLOCK_K, BLOCK)
        acc = tl.dot(left, right, acc, input_precision="ieee")
    row = first + tl.arange(0, BLOCK)[:, None]
    cols = column + tl.arange(0, BLOCK)[None, :]
    place = out + head * m * n + row * n + cols
    tl.store(place, round_to(acc * scale, out.dtype.element_ty), mask=(row < m) & (cols < n))


@triton.jit
def _weights_kernel(
    q, k, out, queries, keys, dim, scale, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Softmax of q k' of BLOCK queries: one walk over the keys for the sum, one to write."""
    head = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    k += head * keys * dim
    tile = _tile(q + head * queries * dim, first, queries, 0, dim, dim, 1, BLOCK, BLOCK_D)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    scale *= _LOG2E
    for start in range(0, keys, BLOCK):
        other = _tile(k, start, keys, 0, dim, dim, 1, BLOCK, BLOCK_D)
        logits = tl.dot(tile, tl.trans(other), input_precision="ieee") * scale
        n = start + tl.arange(0, BLOCK)[None, :]
        logits = tl.where(n < keys, logits, float("-inf"))
        new_best = tl.maximum(best, tl.max(logits, 1))
        total = total * tl.exp2(best - new_best)
        total += tl.sum(tl.exp2(logits - new_best[:, None]), 1)
        best = new_best
    row = first + tl.arange(0, BLOCK)[:, None]
    for start in range(0, keys, BLOCK):
        other = _tile(k, start, keys, 0, dim, dim, 1, BLOCK, BLOCK_D)
        logits = tl.dot(tile, tl.trans(other), input_precision="ieee") * scale
        weights = tl.exp2(logits - best[:, None]) / total[:, None]
        n = start + tl.arange(0, BLOCK)[None, :]
        place = out + head * queries * keys + row * keys + n
        inside = (row < queries) & (n < keys)
        tl.store(place, round_to(weights, out.dtype.element_ty), mask=inside)


def _checked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if not q.dim() == k.dim() == v.dim() == 4 or q.shape[3] != k.shape[3]:
        raise ShapeMismatchError(
            f"q.shape={tuple(q.shape)}, k.shape={tuple(k.shape)}: expected [B, H, N, D] of one D"
        )
    if q.shape[:2] != k.shape[:2] or k.shape[:3] != v.shape[:3]:
        raise ShapeMismatchError(
            f"k.shape={tuple(k.shape)}, v.shape={tuple(v.shape)}: expected the batch, heads and "
            f"keys of each other, and of q.shape={tuple(q.shape)}"
        )
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_dtype(name, tensor, FLOAT_DTYPES if name == "q" else (q.dtype,))
    check_same_device(q, k=k, v=v)
    return q.contiguous(), k.contiguous(), v.contiguous()


def _product(
    a: torch.Tensor, b: torch.Tensor, columns: int, scale: float, strides: tuple[int, int]
) -> torch.Tensor:
    """a [B, H, M, K] times b, whose element (k, n) lies at ``strides``; [B, H, M, columns]."""
    batch, heads, rows, inner = a.shape
    out = torch.empty(batch, heads, rows, columns, dtype=a.dtype, device=a.device)
    if out.numel():
        grid = (batch * heads, cdiv(rows, _BLOCK), cdiv(columns, _BLOCK))
        _product_kernel[grid](
            a, b, out, rows, columns, inner, scale, *strides, BLOCK=_BLOCK, BLOCK_K=_BLOCK
        )
    return out


def attention_a(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Three kernels; logits and weights [B, H, N, N] go through memory."""
    q, k, v = _checked(q, k, v)
    dim = q.shape[3]
    # k' is k read with its strides exchanged
    logits = _product(q, k, k.shape[2], dim**-0.5, (1, dim))
    return _product(softmax(logits), v, v.shape[3], 1.0, (v.shape[3], 1))


def attention_b(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Two kernels; the weights [B, H, N, N] go through memory."""
    q, k, v = _checked(q, k, v)
    batch, heads, queries, dim = q.shape
    weights = torch.empty(batch, heads, queries, k.shape[2], dtype=q.dtype, device=q.device)
    if weights.numel():
        _weights_kernel[(batch * heads, cdiv(queries, _BLOCK))](
            q,
            k,
            weights,
            queries,
            k.shape[2],
            dim,
            dim**-0.5,
            BLOCK=_BLOCK,
            BLOCK_D=max(16, next_power_of_2(dim)),
        )
    return _product(weights, v, v.shape[3], 1.0, (v.shape[3], 1))
