# SPDX-License-Identifier: MIT
"""torch.nn modules on the library's functions, and patching of transformers models."""

from oss_fused.layers.hf.modules import FP8Linear, FusedGatedMLP, FusedRMSNorm, FusedRMSNormRoPE
from oss_fused.layers.hf.patch import PatchPolicy, PatchReport, patch_model

__all__ = [
    "FP8Linear",
    "FusedGatedMLP",
    "FusedRMSNorm",
    "FusedRMSNormRoPE",
    "PatchPolicy",
    "PatchReport",
    "patch_model",
]
