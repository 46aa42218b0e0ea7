# SPDX-License-Identifier: MIT
"""LayerNorm step by step in float32."""

from __future__ import annotations

import torch

from oss_fused.kernels.random_mask import keep_mask


def layer_norm_stats(x: torch.Tensor, method: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and population variance of each row; both methods up to the order of the sums."""
    wide = x.float()
    mean = wide.mean(-1)
    return mean, (wide - mean[..., None]).pow(2).mean(-1)


def _normalised(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    mean, var = layer_norm_stats(x, "two_pass")
    y = (x.float() - mean[..., None]) * torch.rsqrt(var + eps)[..., None]
    if weight is not None:
        y = y * weight.float()
    return y if bias is None else y + bias.float()


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    method: str,
) -> torch.Tensor:
    """Normalised rows; see kernels/layer_norm for the contract."""
    return _normalised(x, weight, bias, eps).to(x.dtype).contiguous()


def layer_norm_dropout(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    p: float,
    seed: int,
) -> torch.Tensor:
    """Normalised rows with dropout; see kernels/layer_norm for the contract."""
    y = _normalised(x, weight, bias, eps) * (1.0 / (1.0 - p))
    rows = torch.arange(x.shape[:-1].numel(), device=x.device).view(*x.shape[:-1], 1)
    columns = torch.arange(x.shape[-1], device=x.device)
    return torch.where(keep_mask(seed, rows, columns, p), y, 0.0).to(x.dtype).contiguous()
