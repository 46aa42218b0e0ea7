# SPDX-License-Identifier: MIT
"""``oss_fused::act_mul_quant`` and ``oss_fused::gated_mlp``.

act_mul_quant: x [..., 2 I] = gate | up; ``q, scale = quantize_fp8(activation(gate) * up)``, per
token, or static where ``scale`` [1] is given; both steps rounded to x.dtype as vLLM rounds.

gated_mlp: x [..., H], gate_weight and up_weight [I, H] in x.dtype, or float8_e4m3fn with
gate_scale and up_scale [I, 1] or [1] (x is then quantised per token). activation_on="up" gives
``gate * activation(up)``, "gate" gives ``activation(gate) * up``; float32, rounded once.
Activations: "silu", "gelu" (erf form), "gelu_tanh".
"""

from __future__ import annotations

import torch

from oss_fused.kernels.validation import FP8
from oss_fused.ops.registration import register_op


def _act_mul_quant_fake(
    x: torch.Tensor, activation: str, scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*x.shape[:-1], x.shape[-1] // 2)
    scale_shape = (*x.shape[:-1], 1) if scale is None else scale.shape
    return (
        torch.empty(shape, dtype=FP8, device=x.device),
        torch.empty(scale_shape, dtype=torch.float32, device=x.device),
    )


def _gated_mlp_fake(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    gate_scale: torch.Tensor | None,
    up_scale: torch.Tensor | None,
    activation: str,
    activation_on: str,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], gate_weight.shape[0]))


register_op(
    "act_mul_quant(Tensor x, str activation, Tensor? scale) -> (Tensor q, Tensor scale)",
    _act_mul_quant_fake,
)
register_op(
    "gated_mlp(Tensor x, Tensor gate_weight, Tensor up_weight, Tensor? gate_scale, "
    "Tensor? up_scale, str activation, str activation_on) -> Tensor",
    _gated_mlp_fake,
)
