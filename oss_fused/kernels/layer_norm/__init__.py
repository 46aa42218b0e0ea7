# SPDX-License-Identifier: MIT
"""``layer_norm``, ``layer_norm_stats`` and ``layer_norm_dropout``.

layer_norm: x [..., H], weight and bias [H] or None; ``(x - mean) * rsqrt(var + eps) * weight +
bias`` with the mean and the population variance of each row, in float32, rounded once (Ba, Kiros
and Hinton, https://arxiv.org/abs/1607.06450).

layer_norm_stats: x [..., H] -> mean and variance [...], float32.

layer_norm_dropout: layer_norm, then each element is zeroed with probability ``p`` and the others
are multiplied by 1 / (1 - p). The mask is a function of ``seed`` and position
(kernels/random_mask.py): row i of x seen as [rows, H], column j.

``method`` "two_pass" takes the mean, then the squares of what is left: a row of up to 32768 values
stays in registers. "welford" takes both in one pass over tiles, merged by the formula of Chan,
Golub and LeVeque (1979), the parallel form of Welford's. Neither subtracts squares of sums.
"""

from __future__ import annotations

import torch

from oss_fused.errors import SchemeError, ShapeMismatchError
from oss_fused.kernels.checks import FLOAT_DTYPES
from oss_fused.kernels.contract import Epsilon, OneOf, Operand, Rule
from oss_fused.kernels.layer_norm import reference
from oss_fused.kernels.op import declare


def _check_width(x: torch.Tensor) -> None:
    if not x.shape[-1]:
        raise ShapeMismatchError(f"x.shape={tuple(x.shape)}: expected hidden at least 1")


def _check_dropout(x: torch.Tensor, p: float) -> None:
    _check_width(x)
    if not 0 <= p < 1:
        raise SchemeError(f"p={p!r}: expected a probability in [0, 1)")


_ROW: dict[str, Rule] = {
    "x": Operand("... H", *FLOAT_DTYPES),
    "weight": Operand("H", *FLOAT_DTYPES),
    "bias": Operand("H", *FLOAT_DTYPES),
    "eps": Epsilon(),
}
_METHOD = OneOf("two_pass", "welford")

declare(
    reference.layer_norm,
    {**_ROW, "method": _METHOD},
    {"triton": "triton"},
    check=_check_width,
    example={"...": (7,), "H": 130, "eps": 1e-5},
)
declare(
    reference.layer_norm_stats,
    {"x": _ROW["x"], "method": _METHOD},
    {"triton": "triton"},
    check=_check_width,
    example={"...": (7,), "H": 130},
)
declare(
    reference.layer_norm_dropout,
    _ROW,
    {"triton": "triton"},
    check=_check_dropout,
    fake=lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    example={"...": (7,), "H": 130, "eps": 1e-5, "p": 0.25, "seed": 3},
)
