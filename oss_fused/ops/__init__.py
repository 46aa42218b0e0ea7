# SPDX-License-Identifier: MIT
"""The operators ``torch.ops.oss_fused.*``: the one place of registration, one module per subject.

Importing this package registers them all, once.
"""

from oss_fused.ops import attention, backward, gemm, mlp, moe, norm, qkv, quantize, rope

__all__ = ["attention", "backward", "gemm", "mlp", "moe", "norm", "qkv", "quantize", "rope"]
