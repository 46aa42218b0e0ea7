# SPDX-License-Identifier: MIT
"""Operations: one folder a subject. Importing this package declares them all."""

from oss_fused.kernels import attention, gemm, mlp, moe, norm, qkv, quantize, rope

__all__ = ["attention", "gemm", "mlp", "moe", "norm", "qkv", "quantize", "rope"]
