# SPDX-License-Identifier: MIT
"""Tensor descriptors (TMA) of the operands of a product."""

from __future__ import annotations

import torch
from triton.tools.tensor_descriptor import TensorDescriptor


def row_descriptor(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Descriptor of boxes [rows, columns] of ``tensor`` [M, K], whose rows are contiguous.

    The hardware wants rows that start on 16 bytes; what lies outside the tensor reads as zero.
    """
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, columns])
