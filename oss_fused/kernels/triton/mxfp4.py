# SPDX-License-Identifier: MIT
"""Repacking of MXFP4 experts on a GPU: the reference's tensor operations, run once at load."""

from oss_fused.kernels.reference.mxfp4 import moe_repack_mxfp4

__all__ = ["moe_repack_mxfp4"]
