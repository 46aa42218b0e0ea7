# SPDX-License-Identifier: MIT
"""``oss_fused::rmsnorm_rope_backward`` and ``oss_fused::gated_mlp_backward``.

rmsnorm_rope_backward: grad and x [B, S, H], weight [H], cos and sin [S, head_dim]; gradients of x
and weight. First the rotation's transpose, ``g = grad cos - rotate_half(grad sin)``, then with
``r = rsqrt(mean(x^2) + eps)`` and ``n = x r``: ``dx = r (g w - n mean(g w n))``, ``dw = sum(g n)``.

gated_mlp_backward: grad [..., I], x [..., H], weights [I, H]; the gradients of both projections'
results, [rows, I] in x.dtype. The projections are recomputed rather than kept: two products
instead of 2 I values a token.

Both compute in float32 and round once.
"""

from __future__ import annotations

import torch

from oss_fused.ops.registration import register_op


def _rmsnorm_rope_backward_fake(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _gated_mlp_backward_fake(
    grad: torch.Tensor,
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    activation: str,
    activation_on: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (x.shape[:-1].numel(), gate_weight.shape[0])
    return x.new_empty(shape), x.new_empty(shape)


register_op(
    "rmsnorm_rope_backward(Tensor grad, Tensor x, Tensor weight, Tensor cos, Tensor sin, "
    "float eps) -> (Tensor dx, Tensor dw)",
    _rmsnorm_rope_backward_fake,
)
register_op(
    "gated_mlp_backward(Tensor grad, Tensor x, Tensor gate_weight, Tensor up_weight, "
    "str activation, str activation_on) -> (Tensor d_gate, Tensor d_up)",
    _gated_mlp_backward_fake,
)
