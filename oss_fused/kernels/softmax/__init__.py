# SPDX-License-Identifier: MIT
"""``softmax``: e^(x - max) / sum over the last dimension, in float32, rounded once.

x [..., N] of any N. ``method`` "two_pass" takes the maximum, then exponentials and their sum: a row
of up to 32768 values stays in registers. "online" keeps a running maximum and a running sum
(Milakov and Gimelshein, https://arxiv.org/abs/1805.02867) over tiles, and reads a row twice.
A row that holds NaN or +Inf, or nothing but -Inf, gives NaN.
"""

from __future__ import annotations

from oss_fused.kernels.checks import FLOAT_DTYPES
from oss_fused.kernels.contract import OneOf, Operand
from oss_fused.kernels.op import declare
from oss_fused.kernels.softmax import reference

declare(
    reference.softmax,
    {"x": Operand("... N", *FLOAT_DTYPES), "method": OneOf("two_pass", "online")},
    {"triton": "triton"},
    example={"...": (7,), "N": 130},
)
