# SPDX-License-Identifier: MIT
"""weight_only_linear: the choice of kernel by shape, and the product of a dequantised weight."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from oss_fused.kernels import tiles
from oss_fused.kernels.checks import FP8, as_rows, check_dtype, has_aligned_rows
from oss_fused.kernels.launch import runs_gluon
from oss_fused.kernels.quantize.triton import dequantize_fp8
from oss_fused.kernels.weight_only.gemv import product_gemv
from oss_fused.kernels.weight_only.tile import product_tile


def product_dense(
    x: torch.Tensor,
    w: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Dequantise the weight to x.dtype and multiply by cuBLAS into ``out`` [M, N]."""
    dense = dequantize_fp8(w, scale, x.dtype).t()
    if bias is None:
        torch.mm(x, dense, out=out)
    else:
        torch.addmm(bias.to(x.dtype), x, dense, out=out)


# by their names in the tile tables
KERNELS: dict[str, Callable[..., None]] = {
    "gemv": product_gemv,
    "tile": product_tile,
    "dense": product_dense,
}
# those that can ask for weights before they wait for the kernels ahead
PREFETCHING = frozenset({"gemv", "pipeline"})


@functools.cache
def kernels(device: torch.device) -> dict[str, Callable[..., None]]:
    """The kernels that can run on ``device`` by their names in the tile tables."""
    if not runs_gluon(device):
        return KERNELS
    from oss_fused.kernels.weight_only.pipeline import product_pipeline

    return {**KERNELS, "pipeline": product_pipeline}


def weight_only_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    prefetch_weights: bool = False,
) -> torch.Tensor:
    """``(x @ weight.T) * weight_scale.T + bias``; see kernels/weight_only for the contract."""
    check_dtype("weight", weight, (FP8,))
    n = weight.shape[0]
    rows, weight = as_rows(x), as_rows(weight)
    out = torch.empty(rows.shape[0], n, dtype=x.dtype, device=x.device)
    if out.numel():
        name, config = _choose(rows, weight)
        if name in PREFETCHING:
            config["prefetch_weights"] = prefetch_weights
        kernels(x.device)[name](rows, weight, weight_scale, bias, out, **config)
    return out.view(*x.shape[:-1], n)


def _choose(x: torch.Tensor, w: torch.Tensor) -> tuple[str, dict[str, Any]]:
    """Name and options of the kernel for rows of x [M, K] and w [N, K]."""
    (m, k), n = x.shape, w.shape[0]
    if x.dtype == torch.float32 or k == 0:
        return "dense", {}
    # the pipeline writes rows of whole 16-byte words
    config = dict(tiles.choose_weight_only(x.device, m, n, k, runs_gluon(x.device) and n % 8 == 0))
    name = config.pop("kernel")
    if name != "dense" and not (k % 16 == 0 and has_aligned_rows(x) and has_aligned_rows(w)):
        return "dense", {}
    return name, config
