# SPDX-License-Identifier: MIT
"""Linear layer of FP8 weights and unquantised activations, in float32; on bf16 weights, bf16's."""

from __future__ import annotations

import torch

from oss_fused.kernels.checks import flat_rows
from oss_fused.kernels.gemm.reference import BF16, CPU_WEIGHTS, bf16_product


def weight_only_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    prefetch_weights: bool = False,
) -> torch.Tensor:
    """``(x @ weight.T) * weight_scale.T + bias``; see kernels/weight_only for the contract."""
    n = weight.shape[0]
    rows = flat_rows(x)
    if x.dtype == BF16 and weight.dtype in CPU_WEIGHTS:
        product = bf16_product(rows, weight).float()
    else:
        # float16 activations do not fit into bf16
        product = torch.mm(rows.float(), weight.float().t())
    out = product * weight_scale.view(1, -1)
    if bias is not None:
        out += bias
    return out.to(x.dtype).view(*x.shape[:-1], n)
