# SPDX-License-Identifier: MIT
"""Attention and its gradients in float32, with the matrix of logits in memory.

float64 inputs are computed in float64: torch.autograd.gradcheck proves these formulas.
"""

from __future__ import annotations

import torch

from oss_fused.kernels.checks import FP8
from oss_fused.kernels.quantize.reference import quantize_rows
from oss_fused.kernels.random_mask import keep_mask


def product_dtype(operand: torch.Tensor) -> torch.dtype:
    """The dtype in which a product of ``operand`` runs: bfloat16 holds FP8 codes exactly."""
    return torch.bfloat16 if operand.dtype.itemsize == 1 else operand.dtype


def _wide(t: torch.Tensor) -> torch.Tensor:
    return t if t.dtype == torch.float64 else t.float()


def _visible(
    q: torch.Tensor,
    k: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    window_left: int,
    window_right: int,
) -> torch.Tensor:
    """Whether query m sees key n; broadcasts to [B, H, N, M]."""
    m = torch.arange(q.shape[2], device=q.device)[:, None]
    n = torch.arange(k.shape[2], device=q.device)
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    if window_left >= 0:
        seen = seen & (n >= m - window_left)
    if window_right >= 0:
        seen = seen & (n <= m + window_right)
    if causal:
        seen = seen & (n <= m)
    return seen if mask is None else seen & mask


def _logits(
    q: torch.Tensor, k: torch.Tensor, slopes: torch.Tensor | None, scale: float
) -> torch.Tensor:
    logits = (q @ k.transpose(2, 3)) * scale
    if slopes is not None:
        m = torch.arange(q.shape[2], device=q.device)[:, None]
        n = torch.arange(k.shape[2], device=q.device)
        logits = logits - slopes.to(logits.dtype)[:, None, None] * (m - n).abs()
    return logits


def _kept(q: torch.Tensor, k: torch.Tensor, p: float, seed: int) -> torch.Tensor:
    """Where dropout keeps, [B, H, N, M]."""
    batch, heads, queries = q.shape[:3]
    rows = torch.arange(batch * heads * queries, device=q.device).view(batch, heads, queries, 1)
    return keep_mask(seed, rows, torch.arange(k.shape[2], device=q.device), p)


def _scaled_queries(
    q: torch.Tensor, q_scale: torch.Tensor | None, k_scale: torch.Tensor | None
) -> torch.Tensor:
    wide = _wide(q)
    if q_scale is not None:
        wide = wide * q_scale
    if k_scale is not None:
        wide = wide * k_scale
    return _wide(wide.to(product_dtype(q)))


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
    q_scale: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    out_scale: torch.Tensor | None,
    scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    dropout_p: float,
    seed: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Result, row maxima and row sums; see kernels/flash_attention for the contract."""
    group = q.shape[1] // k.shape[1]
    keys = _wide(k).repeat_interleave(group, 1)
    values = _wide(v).repeat_interleave(group, 1)
    logits = _logits(_scaled_queries(q, q_scale, k_scale), keys, slopes, scale)
    seen = _visible(q, k, mask, causal, window_left, window_right)
    logits = logits.masked_fill(~seen, float("-inf"))
    # a column of its own for the sink, or for nothing
    sink = logits.new_full((*logits.shape[:3], 1), float("-inf"))
    if sinks is not None:
        sink = sinks.to(logits.dtype)[:, None, None].expand_as(sink)
    with_sink = torch.cat([sink, logits], -1)
    row_max = with_sink.amax(-1)
    row_max = row_max.masked_fill(row_max == float("-inf"), 0.0)
    weights = torch.exp(with_sink - row_max[..., None])
    row_sum = weights.sum(-1)
    weights = weights[..., 1:]
    if dropout_p:
        weights = weights.where(_kept(q, k, dropout_p, seed), 0.0)
    weights = _wide(weights.to(product_dtype(v)))
    inverse = (row_sum * (1 - dropout_p)).reciprocal().masked_fill(row_sum == 0, 0.0)
    out = (weights @ values) * inverse[..., None]
    if v_scale is not None:
        out = out * v_scale
    if out_scale is not None:
        # one scale a column: quantised as rows of the transpose
        columns = out.flatten(0, 2).t()
        codes, _ = quantize_rows(columns, out_scale[:, None])
        out = codes.t().reshape(out.shape).contiguous()
        assert out.dtype == FP8
    else:
        out = out.to(product_dtype(q))
    return out.contiguous(), row_max, row_sum


def flash_attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    row_max: torch.Tensor,
    row_sum: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
    scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    dropout_p: float,
    seed: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v; see kernels/flash_attention for the contract."""
    heads = (k.shape[1], q.shape[1] // k.shape[1])
    keys = _wide(k).repeat_interleave(heads[1], 1)
    values = _wide(v).repeat_interleave(heads[1], 1)
    d_out, queries = _wide(grad), _wide(q)
    logits = _logits(queries, keys, slopes, scale)
    seen = _visible(q, k, mask, causal, window_left, window_right)
    inverse = row_sum.reciprocal().masked_fill(row_sum == 0, 0.0)
    weights = torch.exp((logits - row_max[..., None]).masked_fill(~seen, float("-inf")))
    weights = weights * inverse[..., None]
    d_weights = d_out @ values.transpose(2, 3)
    dropped = weights
    if dropout_p:
        factor = _kept(q, k, dropout_p, seed) / (1 - dropout_p)
        dropped, d_weights = weights * factor, d_weights * factor
    delta = (d_out * _wide(out)).sum(-1, keepdim=True)
    d_logits = weights * (d_weights - delta)
    # the products of the kernel take operands of q's dtype
    dropped, d_logits = (_wide(t.to(q.dtype)) for t in (dropped, d_logits))
    dq = (d_logits @ keys) * scale
    dk = (d_logits.transpose(2, 3) @ queries) * scale
    dv = dropped.transpose(2, 3) @ d_out
    dk, dv = (t.unflatten(1, heads).sum(2) for t in (dk, dv))
    return tuple(t.to(q.dtype).contiguous() for t in (dq, dk, dv))  # type: ignore[return-value]
