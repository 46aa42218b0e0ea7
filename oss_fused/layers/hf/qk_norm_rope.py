# SPDX-License-Identifier: MIT
"""Attention of transformers models that normalise q and k per head: norm and RoPE in one launch."""

from __future__ import annotations

import sys
from typing import Any

import torch

from oss_fused.functional import fused_rmsnorm_rope

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")


def can_fuse(module: Any) -> bool:
    """Whether ``module`` is an attention whose norms act on single heads (Qwen3)."""
    return (
        type(module).__name__ == "Qwen3Attention"
        and all(hasattr(module, name) for name in _PROJECTIONS)
        and tuple(module.q_norm.weight.shape) == (module.head_dim,)
    )


def _norm_and_rotate(
    x: torch.Tensor, norm: Any, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """x [B, S, heads, D], cos and sin [B or 1, S, D] -> [B, heads, S, D]."""
    batch, sequence, heads, head_dim = x.shape
    eps = norm.variance_epsilon
    if cos.shape[0] == 1:
        # [B * heads, S, D] is a view for a batch of one: the kernel takes its strides
        rows = x.transpose(1, 2).reshape(-1, sequence, head_dim)
        out = fused_rmsnorm_rope(rows, norm.weight, cos[0], sin[0], eps=eps)
        return out.view(batch, heads, sequence, head_dim)
    # positions differ between the sequences of the batch
    return torch.stack(
        [
            fused_rmsnorm_rope(one.transpose(0, 1), norm.weight, c, s, eps=eps)
            for one, c, s in zip(x, cos, sin, strict=True)
        ]
    )


def fused_attention_forward(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``Qwen3Attention.forward`` of transformers 5 with q and k normalised and rotated fused.

    Source: transformers/models/qwen3/modeling_qwen3.py.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    shape = hidden_states.shape[:-1]
    heads = (*shape, -1, self.head_dim)
    cos, sin = position_embeddings
    query = _norm_and_rotate(self.q_proj(hidden_states).view(heads), self.q_norm, cos, sin)
    key = _norm_and_rotate(self.k_proj(hidden_states).view(heads), self.k_norm, cos, sin)
    value = self.v_proj(hidden_states).view(heads).transpose(1, 2)
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, self.layer_idx)
    eager = sys.modules[type(self).__module__].eager_attention_forward
    attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
    output, weights = attention(
        self,
        query,
        key,
        value,
        attention_mask,
        dropout=self.attention_dropout if self.training else 0.0,
        scaling=self.scaling,
        sliding_window=self.sliding_window,
        **kwargs,
    )
    return self.o_proj(output.reshape(*shape, -1).contiguous()), weights
