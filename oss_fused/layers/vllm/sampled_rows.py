# SPDX-License-Identifier: MIT
"""The rows of a step that are sampled from, which the last decoder layer computes alone.

Behind the last layer vLLM reads the hidden state of one token of each request. Of a prompt's other
tokens, later steps read keys and values only. A step's attention metadata may therefore name the
sampled rows (plugin/last_layer.py decides). Attention and MXFP4 experts of the last layer then run
for these, and the hidden states of the other rows hold anything.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import get_forward_context, is_forward_context_available

_NOTED = "oss_sampled_rows"


def note_rows(metadata: Any, rows: torch.Tensor) -> None:
    """Name the sampled rows of a step.

    Args:
        metadata: of the attention layers of the step.
        rows: int64 [requests], the last token of each request, in their order.
    """
    setattr(metadata, _NOTED, rows)


def noted_rows(metadata: Any) -> torch.Tensor | None:
    """What ``note_rows`` named; None: all rows are computed."""
    return getattr(metadata, _NOTED, None)


def rows_of_step(layer_name: str) -> torch.Tensor | None:
    """As ``noted_rows``, of the step that runs and the attention layer of that name."""
    if not is_forward_context_available():
        # kernels are warmed up while the model loads
        return None
    metadata = get_forward_context().attn_metadata
    return noted_rows(metadata.get(layer_name)) if isinstance(metadata, dict) else None


def leave_graphs() -> None:
    """Run the rest of the step's model without CUDA graphs, whose experts compute all rows."""
    if is_forward_context_available():
        get_forward_context().cudagraph_runtime_mode = CUDAGraphMode.NONE


def take_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``x[rows]``, also of FP8, which PyTorch does not index on every device."""
    if x.itemsize == 1:
        return x.view(torch.uint8).index_select(0, rows).view(x.dtype)
    return x.index_select(0, rows)
