# SPDX-License-Identifier: MIT
"""fp8_gemm and fp8_linear: checks, output allocation and the choice of kernel by shape."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from oss_fused.kernels import tiles
from oss_fused.kernels.checks import FP8, as_rows, check_dtype, has_aligned_rows
from oss_fused.kernels.gemm.cublaslt import fits_cublaslt, gemm_cublaslt, runs_cublaslt
from oss_fused.kernels.gemm.gemv import gemm_gemv
from oss_fused.kernels.gemm.portable import gemm_large, gemm_swap, gemm_tile
from oss_fused.kernels.launch import runs_gluon
from oss_fused.kernels.levels import has_two_levels, levels_of, sum_of_levels
from oss_fused.kernels.quantize.triton import quantize_fp8, quantize_levels

KERNELS: dict[str, Callable[..., None]] = {
    "gemv": gemm_gemv,
    "swap": gemm_swap,
    "large": gemm_large,
    "tile": gemm_tile,
}

# those that can ask for weights before they wait for the kernels ahead
PREFETCHING = frozenset({"gemv", "stream", "swap", "cooperative"})

# rows up to which a product quantises them itself, and outputs up to which gemv.py does. Measured
# in a chain of decoder layers: launched alone, again and again, it looks better than it is
FUSED_ROWS = 1
FUSED_OUTPUTS = 3072
# bytes of weights that the shared memory of a CTA holds, about
_RING = 192 * 1024


@functools.cache
def kernels(device: torch.device) -> dict[str, Callable[..., None]]:
    """The kernels that can run on ``device`` by their names in the tile tables."""
    found = dict(KERNELS)
    if runs_gluon(device):
        from oss_fused.kernels.gemm.persistent import gemm_cooperative, gemm_pingpong
        from oss_fused.kernels.gemm.stream import gemm_stream

        found["stream"] = gemm_stream
        found["cooperative"] = gemm_cooperative
        found["pingpong"] = gemm_pingpong
    if runs_cublaslt(device):
        found[tiles.CUBLASLT] = gemm_cublaslt
    return found


def _tile(device: torch.device, m: int, n: int, k: int, cublaslt: bool = False) -> dict[str, Any]:
    return dict(tiles.choose_gemm_config(device, m, n, k, runs_gluon(device), cublaslt))


def _one_launch(rows: torch.Tensor, weight: torch.Tensor, levels: int) -> dict[str, Any] | None:
    """Kernel and tile of a product that quantises ``rows`` itself; None where two launches win.

    The prologue repeats in every CTA. Those of the stream kernel hide it where they have more
    weights than their shared memory holds and one wave of them has all outputs.
    """
    (m, k), n, device = rows.shape, weight.shape[0], rows.device
    # first: prompts have many rows, and what follows takes host time in each of their launches
    if not 0 < m <= FUSED_ROWS or n == 0 or k == 0 or rows.dtype == torch.float32:
        return None
    if not (has_aligned_rows(rows) and has_aligned_rows(weight)):
        return None
    choose = tiles.choose_gemm_config if levels == 1 else tiles.choose_two_levels
    config = dict(choose(device, m, n, k, runs_gluon(device)))
    if config["kernel"] == "stream":
        of_cta = config.get("block_n", 64) // config.get("slices", 1) * k
        fits = m == 1 and k <= tiles.MOST_QUANTISED and n <= tiles.ONE_WAVE and of_cta > _RING
    else:
        fits = config["kernel"] == "gemv" and levels == 1
        fits = fits and n <= FUSED_OUTPUTS and rows.stride(0) % 16 == 0
        fits = fits and k % config["block_k"] == 0
    return config if fits else None


def linear_in_one_launch(
    rows: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    prefetch_weights: bool,
    levels: int,
) -> torch.Tensor | None:
    """fp8_linear of few rows whose product quantises them; None where two launches are faster."""
    config = _one_launch(rows, weight, levels)
    if config is None:
        return None
    config |= {"prefetch_weights": prefetch_weights, "levels": levels}
    out = torch.empty(rows.shape[0], weight.shape[0], dtype=rows.dtype, device=rows.device)
    kernels(rows.device)[config.pop("kernel")](
        rows, weight, None, weight_scale, bias, out, **config
    )
    return out


def fp8_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    prefetch_weights: bool = False,
    levels: torch.Tensor | None = None,
) -> torch.Tensor:
    """``(a @ b.T) * a_scale * b_scale.T + bias``; see kernels/gemm for the contract."""
    check_dtype("b", b, (FP8,))
    out = torch.empty(a.shape[0], b.shape[0], dtype=out_dtype, device=a.device)
    if out.numel() == 0:
        return out
    a, b = as_rows(a), as_rows(b)
    both = levels_of(a, levels)
    if both is not None:
        return _two_level_gemm(as_rows(both), b, a_scale, b_scale, bias, out, prefetch_weights)
    (m, k), n = a.shape, b.shape[0]
    config = _tile(a.device, m, n, k, runs_cublaslt(a.device))
    if config["kernel"] == tiles.CUBLASLT and not fits_cublaslt(a, b, a_scale, b_scale, bias, out):
        config = _tile(a.device, m, n, k)
    name = config.pop("kernel")
    if name != "tile" and not (has_aligned_rows(a) and has_aligned_rows(b)):
        name, config = "tile", {}
    if name in PREFETCHING:
        config["prefetch_weights"] = prefetch_weights
    kernels(a.device)[name](a, b, a_scale, b_scale, bias, out, **config)
    return out


def gemm_sums(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    prefetch_weights: bool,
) -> torch.Tensor:
    """``fp8_gemm``'s result [M, N], or float32 parts of it [2, M, N].

    Parts where adding them takes the kernel behind less than they save (tiles.has_two_parts).
    """
    (m, k), n = a.shape, b.shape[0]
    config = _tile(a.device, m, n, k)
    aligned = has_aligned_rows(a) and has_aligned_rows(b)
    if not (config.pop("kernel") == "stream" and tiles.has_two_parts(m, n, k) and aligned):
        return fp8_gemm(a, b, a_scale, b_scale, bias, out_dtype, prefetch_weights)
    sums = torch.empty(2, m, n, dtype=torch.float32, device=a.device)
    config["prefetch_weights"] = prefetch_weights
    kernels(a.device)["stream"](a, b, a_scale, b_scale, bias, sums, **config)
    return sums


def _two_level_gemm(
    levels: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    prefetch_weights: bool,
) -> torch.Tensor:
    """The product of ``levels`` [2 M, K] in one launch where a kernel takes them, else in two."""
    m, k, n = out.shape[0], levels.shape[1], b.shape[0]
    if k % 16 == 0 and k > 0 and has_aligned_rows(levels) and has_aligned_rows(b):
        config = dict(tiles.choose_two_levels(b.device, m, n, k, runs_gluon(b.device)))
        name = config.pop("kernel")
        if name in ("gemv", "stream"):
            config |= {"prefetch_weights": prefetch_weights, "levels": 2}
            kernels(b.device)[name](levels, b, a_scale, b_scale, bias, out, **config)
            return out
    operands = (levels, b, a_scale, b_scale, bias, out.dtype)
    return sum_of_levels(fp8_gemm, *operands, prefetch_weights)


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    prefetch_weights: bool = False,
    bf16_rows: int = 0,
) -> torch.Tensor:
    """Quantise ``x``, multiply by ``weight``; see kernels/gemm for the contract."""
    check_dtype("weight", weight, (FP8,))
    n, k = weight.shape
    rows, levels = as_rows(x), None
    few = k > 0 and has_two_levels(rows.shape[0], bf16_rows)
    if input_scale is None:
        operands = (rows, weight, weight_scale, bias, prefetch_weights)
        out = linear_in_one_launch(*operands, 2 if few else 1)
        if out is not None:
            return out.view(*x.shape[:-1], n)
    if few:
        levels, scale = quantize_levels(rows)
        q = levels[::2]
    else:
        column = None if input_scale is None else input_scale.reshape(-1, 1)
        q, scale = quantize_fp8(rows, column, "token")
    out = fp8_gemm(q, weight, scale, weight_scale, bias, x.dtype, prefetch_weights, levels)
    return out.view(*x.shape[:-1], n)
