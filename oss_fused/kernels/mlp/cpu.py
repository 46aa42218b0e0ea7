# SPDX-License-Identifier: MIT
"""``act_mul_quant`` with the quantisation of bf16 rows compiled for a CPU."""

from __future__ import annotations

import torch

from oss_fused.kernels.mlp import reference


def act_mul_quant(
    x: torch.Tensor, activation: str, scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale of ``activation(x[..., :I]) * x[..., I:]``; see kernels/mlp."""
    if scale is not None or x.dtype != torch.bfloat16:
        return reference.act_mul_quant(x, activation, scale)
    from oss_fused.kernels.cpu_rows import quantize_rows

    if activation != "silu":
        return quantize_rows(reference.gated(x, activation))
    gate, up = x.chunk(2, dim=-1)
    # one operator where the twin takes four; the same number for every bf16
    return quantize_rows(torch.nn.functional.silu(gate).mul_(up))
