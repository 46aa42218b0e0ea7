# SPDX-License-Identifier: MIT
"""FP8 GEMM for many rows by cuBLASLt, through ``torch._scaled_mm``; see kernels/gemm.

At the power limit it takes less time than the kernels in Gluon. As there, the tensor cores' own
sums are scaled and rounded once, without promotion of partial sums to float32.
"""

from __future__ import annotations

import functools

import torch

_ALIGNMENT = 16
# whose cuBLASLt multiplies by a scale of each row
_CUDA = (12, 9)


@functools.cache
def runs_cublaslt(device: torch.device) -> bool:
    """Whether ``device`` is a Hopper GPU, and PyTorch's cuBLASLt has scales of rows.

    On other GPUs the product is not measured. PyTorch for an older CUDA runs a CUTLASS kernel.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    version = (torch.version.cuda or "0").split(".")
    return tuple(int(part) for part in version[:2]) >= _CUDA


def fits_cublaslt(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> bool:
    """Whether cuBLASLt takes these operands; arguments as in fp8_gemm, already checked.

    It takes contiguous tensors at a boundary of 16 bytes, N and K that are multiples of 16, a scale
    for each row of both, and a result and a bias in bf16.
    """
    (m, k), n = a.shape, b.shape[0]
    tensors = (a, b, a_scale, b_scale, out) if bias is None else (a, b, a_scale, b_scale, out, bias)
    return (
        n % _ALIGNMENT == 0
        and k % _ALIGNMENT == 0
        and (a_scale.numel(), b_scale.numel()) == (m, n)
        and out.dtype is torch.bfloat16
        and (bias is None or bias.dtype is torch.bfloat16)
        and all(tensor.is_contiguous() for tensor in tensors)
        and all(tensor.data_ptr() % _ALIGNMENT == 0 for tensor in tensors)
    )


def gemm_cublaslt(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Launch into ``out`` [M, N] what ``fits_cublaslt``."""
    torch._scaled_mm(
        a,
        b.t(),
        a_scale.view(-1, 1),
        b_scale.view(1, -1),
        bias=bias,
        out_dtype=out.dtype,
        use_fast_accum=True,
        out=out,
    )
