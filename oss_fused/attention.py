# SPDX-License-Identifier: MIT
"""Attention as a function: masks, windows, dropout, KV heads, sinks, ALiBi, FP8, gradients."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

import oss_fused.kernels  # noqa: F401  (registers the operators)
from oss_fused.autograd import needs_grad, once_differentiable
from oss_fused.errors import SchemeError
from oss_fused.kernels.op import check_arguments
from oss_fused.quant.attention_fp8 import MODES, AttentionFP8, Operands

_ops = torch.ops.oss_fused


@dataclasses.dataclass(frozen=True)
class _Options:
    """What is no tensor, in the order of the operator."""

    scale: float
    causal: bool
    window_left: int
    window_right: int
    dropout_p: float
    seed: int

    def values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    window_left: int | None = None,
    window_right: int | None = None,
    mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    fp8: AttentionFP8 | str | None = None,
    fp8_group_size: int | None = None,
    fp8_state_path: str | Path | None = None,
    *,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``softmax(scale * q k' + bias) v`` in one kernel (Dao et al. 2022); differentiable.

    Args:
        q: [B, H, N, D] bfloat16, float16 or float32; float64 on a CPU. Any strides.
        k: [B, Hkv, M, D]; Hkv divides H: query head h reads KV head h // (H / Hkv).
        v: [B, Hkv, M, Dv].
        causal: query m sees keys n <= m.
        window_left: m sees n >= m - window_left; None for no limit.
        window_right: m sees n <= m + window_right; None for no limit.
        mask: [B, 1, N, M] or [B, H, N, M]; 1 (or True) keeps. All limits combine. A row that sees
            nothing is 0.
        dropout_p: probability that a weight becomes 0; the others are divided by 1 - dropout_p.
        seed: of dropout; seed and position determine the mask, and backward repeats it.
        fp8: "tensor", "channel" or "group" quantises V to E4M3, with a scale of so many values
            (of the last dimension); an AttentionFP8 says more, and keeps its averages from call to
            call.
        fp8_group_size: of "group"; default 16 where it divides Dv, else 8.
        fp8_state_path: JSON file in which averages are kept: loaded before, written after.
        sinks: [H], a logit of each head that takes weight and adds no value.
        alibi_slopes: float32 [H]; ``-slope * |m - n|`` is added to the logits.
        scale: of the logits; default 1 / sqrt(D).

    Returns:
        [B, H, N, Dv] in q.dtype; of an AttentionFP8 with ``quantize_output`` FP8 codes and their
        float32 scale [Dv].

    Raises:
        ShapeMismatchError: the shapes do not fit.
        UnsupportedDtypeError: a dtype.
        UnsupportedDeviceError: tensors on different devices.
        SchemeError: an option is out of range, options contradict each other, or a gradient is
            wanted of FP8 codes.
        NumericalOverflowError: ``fp8``, and a tensor to quantise holds NaN or Inf.

    NaN and Inf propagate. Gradients reach q, k, v and sinks; FP8 counts as the identity there. They
    are once differentiable: a second derivative raises RuntimeError.
    """
    options = _Options(
        q.shape[-1] ** -0.5 if scale is None else scale,
        causal,
        _limit("window_left", window_left),
        _limit("window_right", window_right),
        dropout_p,
        seed,
    )
    extras = (None if mask is None else mask != 0, sinks, alibi_slopes)
    check_arguments("flash_attention", q, k, v, *extras, None, None, None, None, *options.values())
    quantiser = _quantiser(fp8, fp8_group_size, fp8_state_path)
    codes = None if quantiser is None else quantiser.quantize(q, k, v, dropout_p)
    if quantiser is not None and fp8_state_path is not None:
        quantiser.save(fp8_state_path)
    if codes is not None and codes.out_scale is not None:
        if needs_grad(q, k, v, sinks):
            raise SchemeError("fp8.quantize_output=True: FP8 codes have no gradient")
        out = _run(codes, extras, options)[0]
        return out, codes.out_scale
    if needs_grad(q, k, v, sinks):
        return FlashAttentionFunction.apply(q, k, v, *extras, codes, options)
    return _run(codes or Operands(q, k, v), extras, options)[0].to(q.dtype)


def _limit(name: str, value: int | None) -> int:
    if value is None:
        return -1
    if value < 0:
        raise SchemeError(f"{name}={value}: expected at least 0, or None for no limit")
    return value


def _quantiser(
    fp8: AttentionFP8 | str | None, group_size: int | None, path: str | Path | None
) -> AttentionFP8 | None:
    if not fp8:
        if group_size is not None or path is not None:
            raise SchemeError("fp8=None: expected a mode with fp8_group_size or fp8_state_path")
        return None
    if isinstance(fp8, str):
        if group_size is not None and fp8 != "group":
            raise SchemeError(f"fp8={fp8!r}: expected 'group' with fp8_group_size={group_size}")
        fp8 = AttentionFP8(fp8, group_size=group_size)
        if path is not None and Path(path).exists():
            fp8.load(path)
    elif not isinstance(fp8, AttentionFP8):
        raise SchemeError(f"fp8={fp8!r}: expected one of {', '.join(MODES)} or an AttentionFP8")
    elif group_size is not None:
        raise SchemeError(f"fp8_group_size={group_size}: expected None beside an AttentionFP8")
    return fp8


def _run(
    operands: Operands, extras: tuple[torch.Tensor | None, ...], options: _Options
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    o = operands
    scales = (o.q_scale, o.k_scale, o.v_scale, o.out_scale)
    return _ops.flash_attention(o.q, o.k, o.v, *extras, *scales, *options.values())


class FlashAttentionFunction(torch.autograd.Function):
    """``oss_fused::flash_attention`` with gradients; memory grows with N, not with N * M.

    Kept for backward: q, k, v, the result, and per row the maximum m and the sum l. Backward
    computes ``P = e^(S - m) / l`` again from the same logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        sinks: torch.Tensor | None,
        slopes: torch.Tensor | None,
        codes: Operands | None,
        options: _Options,
    ) -> torch.Tensor:
        """Run the kernel, on FP8 ``codes`` where they are given."""
        out, row_max, row_sum = _run(codes or Operands(q, k, v), (mask, sinks, slopes), options)
        if codes is not None:
            q, k, v = codes.wide(q.dtype)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, row_max, row_sum, mask, sinks, slopes)
        ctx.options = options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of q, k, v and sinks; mask and slopes are constants."""
        q, k, v, out, row_max, row_sum, mask, sinks, slopes = ctx.saved_tensors
        found = _ops.flash_attention_backward(
            grad, q, k, v, out, row_max, row_sum, mask, sinks, slopes, *ctx.options.values()
        )
        d_sinks = None
        if sinks is not None and ctx.needs_input_grad[4]:
            # a sink's weight times (its value, which is 0, less rowsum(dO O))
            wide = row_max.dtype
            weight = torch.exp(sinks.to(wide)[:, None] - row_max) / row_sum
            d_sinks = -(weight * (grad.to(wide) * out.to(wide)).sum(-1)).sum((0, 2)).to(sinks.dtype)
        return (*found, None, d_sinks, None, None, None)
