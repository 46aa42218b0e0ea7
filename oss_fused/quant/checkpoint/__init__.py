# SPDX-License-Identifier: MIT
"""HF checkpoints, read one tensor at a time and written whole or not at all."""

from oss_fused.quant.checkpoint.reader import CheckpointReader
from oss_fused.quant.checkpoint.writer import CheckpointWriter, TensorSpec

__all__ = ["CheckpointReader", "CheckpointWriter", "TensorSpec"]
