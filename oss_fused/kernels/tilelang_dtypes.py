# SPDX-License-Identifier: MIT
"""Names that TileLang gives the dtypes of torch."""

from __future__ import annotations

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """For example "bfloat16" or "float8_e4m3fn"."""
    return str(dtype).removeprefix("torch.")
