# SPDX-License-Identifier: MIT
"""``flash_attention`` and ``flash_attention_backward``.

flash_attention: q [B, H, N, D], k [B, Hkv, M, D], v [B, Hkv, M, Dv] with Hkv a divisor of H: query
head h reads KV head h // (H / Hkv). Logits ``S = scale * q k' - slopes[h] * |m - n|``, of query m
and key n; hidden where a window, causality or ``mask`` hides them, in that order; ``P = e^(S - max)
/ sum``; ``out = dropout(P) v``, float32 sums. Returns out [B, H, N, Dv] and, float32 [B, H, N], the
maximum and the sum of each row. A row that sees nothing is 0, its maximum and sum 0.

    window_left, window_right: m - window_left <= n <= m + window_right; -1 for no limit.
    causal: n <= m.
    mask: bool [B, 1 or H, N, M]; True keeps.
    sinks [H]: a logit of each head that takes weight and adds no value; part of maximum and sum.
    slopes [H]: ALiBi.
    dropout_p, seed: an element of P is zeroed where kernels/random_mask.py drops (row (b H + h) N +
        m, column n), the others are divided by 1 - p; the sum is taken before.
    q_scale, k_scale [D], v_scale [Dv]: float32 dequantisation multipliers of FP8 operands, e4m3 or
        e5m2. Those of q and k go into q, which is rounded to the dtype of the product; v's multiply
        the result.
    out_scale [Dv]: quantises the result to e4m3, ``out ~= codes * out_scale``.

The product of floating operands runs in their dtype, that of FP8 ones in bfloat16, which holds
their codes exactly; the result has that dtype. The kernel itself dequantises FP8 values.

flash_attention_backward: gradients of q, k and v from that of the result, in float32 from S, the
rows' maxima and sums: ``dV = P' dO; dP = dO V'; dS = P (dP - rowsum(dO O)); dQ = scale dS K;
dK = scale dS' Q``.

Formulas: online softmax, https://arxiv.org/abs/2205.14135; order of loops and backward,
https://arxiv.org/abs/2307.08691; sinks, https://arxiv.org/abs/2309.17453; ALiBi,
https://arxiv.org/abs/2108.12409.
"""

from __future__ import annotations

from typing import Any

import torch

from oss_fused.errors import SchemeError, ShapeMismatchError
from oss_fused.kernels.checks import FLOAT_DTYPES, FP8
from oss_fused.kernels.contract import Between, Operand
from oss_fused.kernels.flash_attention import reference
from oss_fused.kernels.op import declare

CODES = (FP8, torch.float8_e5m2)
_WIDE = (torch.float64,)


def _check_options(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    dropout_p: float,
) -> None:
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ShapeMismatchError(
            f"k.shape={tuple(k.shape)}: expected Hkv a divisor of H={q.shape[1]}"
        )
    if not q.shape[3] or not v.shape[3]:
        raise ShapeMismatchError(
            f"q.shape={tuple(q.shape)}, v.shape={tuple(v.shape)}: expected head sizes above 0"
        )
    if mask is not None and mask.shape[1] not in (1, q.shape[1]):
        raise ShapeMismatchError(
            f"mask.shape={tuple(mask.shape)}: expected [B, 1 or {q.shape[1]}, N, M]"
        )
    if not 0 < scale < float("inf"):
        raise SchemeError(f"scale={scale!r}: expected a finite number above 0")
    if not 0 <= dropout_p < 1:
        raise SchemeError(f"dropout_p={dropout_p!r}: expected a probability in [0, 1)")


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    q_scale: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    scale: float,
    dropout_p: float,
) -> None:
    _check_options(q, k, v, mask, scale, dropout_p)
    for name, operand, multiplier in (("q", q, q_scale), ("k", k, k_scale), ("v", v, v_scale)):
        if (operand.dtype in CODES) != (multiplier is not None):
            raise SchemeError(
                f"{name}_scale={'None' if multiplier is None else 'given'}: expected a scale where "
                f"{name} is FP8 and none elsewhere, {name}.dtype={operand.dtype}"
            )


def _fake(
    q: torch.Tensor, v: torch.Tensor, out_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    row_max, row_sum = (q.new_empty(q.shape[:3], dtype=wide) for _ in "ml")
    dtype = reference.product_dtype(q) if out_scale is None else FP8
    return q.new_empty((*q.shape[:3], v.shape[3]), dtype=dtype), row_max, row_sum


def _fake_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


class _Sums(Operand):
    """Sums of exponentials."""

    def example(self, dims: dict[str, Any], generator: torch.Generator) -> torch.Tensor:
        """Values above 1: the largest exponential of a row is 1."""
        return super().example(dims, generator).abs() + 1


_WINDOWS = {"window_left": Between(-1), "window_right": Between(-1)}
_SHARED = {
    "mask": Operand("B heads N M", torch.bool),
    "sinks": Operand("H", *FLOAT_DTYPES, cpu=_WIDE),
    "slopes": Operand("H", torch.float32, cpu=_WIDE),
}
_EXAMPLE = {
    "B": 2,
    "H": 6,
    "Hkv": 3,
    "N": 7,
    "M": 9,
    "D": 16,
    "Dv": 8,
    "heads": 1,
    "scale": 0.25,
    "causal": False,
    "window_left": 5,
    "window_right": -1,
    "dropout_p": 0.25,
    "seed": 3,
}

declare(
    reference.flash_attention,
    {
        "q": Operand("B H N D", *FLOAT_DTYPES, *CODES, cpu=_WIDE),
        "k": Operand("B Hkv M D", *FLOAT_DTYPES, *CODES, cpu=_WIDE),
        "v": Operand("B Hkv M Dv", *FLOAT_DTYPES, *CODES, cpu=_WIDE),
        **_SHARED,
        "q_scale": Operand("D", torch.float32),
        "k_scale": Operand("D", torch.float32),
        "v_scale": Operand("Dv", torch.float32),
        "out_scale": Operand("Dv", torch.float32),
        **_WINDOWS,
    },
    {"triton": "forward"},
    check=_check,
    fake=_fake,
    example={**_EXAMPLE, **dict.fromkeys(("q_scale", "k_scale", "v_scale", "out_scale"))},
)
declare(
    reference.flash_attention_backward,
    {
        "grad": Operand("B H N Dv", like="q"),
        "q": Operand("B H N D", *FLOAT_DTYPES, cpu=_WIDE),
        "k": Operand("B Hkv M D", like="q"),
        "v": Operand("B Hkv M Dv", like="q"),
        "out": Operand("B H N Dv", like="q"),
        "row_max": Operand("B H N", torch.float32, cpu=_WIDE),
        "row_sum": _Sums("B H N", torch.float32, cpu=_WIDE),
        **_SHARED,
        **_WINDOWS,
    },
    {"triton": "backward"},
    check=_check_options,
    fake=_fake_backward,
    example=_EXAMPLE,
)
