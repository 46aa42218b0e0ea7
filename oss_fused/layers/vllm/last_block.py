# SPDX-License-Identifier: MIT
"""The last decoder layer, which some steps need for the tokens that are sampled from only.

Of a prompt vLLM samples from the last token. The others' hidden states behind the last layer are
not read; what later steps read of that layer are its keys and values. In a step whose model runner
names the rows that are read (plugin/read_rows.py), the last layer therefore writes keys and values
of all tokens, and runs attention, output projection and MLP for those rows only. Their number, not
the step's, decides the precision of the experts' activations. A step that replays CUDA graphs
computes all rows.
"""
# no postponed annotations: the operator's schema is read from them

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.layers.fusion.quant_activation import get_input_quant_key
from vllm.utils.torch_utils import (
    LayerNameType,
    _encode_layer_name,
    _resolve_layer_name,
    direct_register_custom_op,
)

from oss_fused.kernels.op import LIBRARY
from oss_fused.quant.settings import ServingOptions


class LastBlock:
    """The last decoder layer and, during a step, the rows that are read behind it.

    Attributes:
        rows: int64 [R], one for each sequence in their order; None: all.
    """

    def __init__(self, block: Any, attention: Any) -> None:
        """``block`` has ``finish``; ``attention`` is its attention module."""
        self.block, self.attention = block, attention
        self.rows: torch.Tensor | None = None

    def __call__(
        self, output: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What follows attention: hidden states and residual [T, H]; output [T, heads, D]."""
        name = _encode_layer_name(self.attention.attn.layer_name)
        return torch.ops.oss_fused.finish_block(output, residual, name)


def read_rows(impl: Any) -> torch.Tensor | None:
    """Rows that the layer of an attention implementation finishes in this step; None: all."""
    last = getattr(impl, "last", None)
    return None if last is None else last.rows


def take_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``x[rows]``, also of FP8, for which PyTorch has no index_select on every device."""
    if x.itemsize == 1:
        return x.view(torch.uint8).index_select(0, rows).view(x.dtype)
    return x.index_select(0, rows)


def finish_block(
    output: torch.Tensor, residual: torch.Tensor, layer_name: LayerNameType
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output projection, norm and MLP of the last decoder layer.

    Args:
        output: [T, heads, head_dim] of attention; where rows are named, theirs come first.
        residual: [T, H].
        layer_name: of vLLM's attention layer.

    Returns:
        Hidden states and residual [T, H]; where rows are named, the others hold anything.
    """
    _, layer, _, _ = get_attention_context(_resolve_layer_name(layer_name))
    last = layer.impl.last
    rows = last.rows
    if rows is None:
        return last.block.finish(output.view(output.shape[0], -1), residual)
    few = output[: len(rows)].view(len(rows), -1)
    finished = last.block.finish(few, take_rows(residual, rows))
    hidden, added = torch.empty_like(residual), torch.empty_like(residual)
    for full, part in zip((hidden, added), finished):
        full.index_copy_(0, rows, part)
    return hidden, added


def _finish_block_fake(
    output: torch.Tensor, residual: torch.Tensor, layer_name: LayerNameType
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(residual), torch.empty_like(residual)


direct_register_custom_op(
    "finish_block", finish_block, fake_impl=_finish_block_fake, target_lib=LIBRARY
)


def mark_last(block: Any, vllm_config: VllmConfig, options: ServingOptions) -> LastBlock | None:
    """Let the last decoder layer of a model finish the rows that are read; None if it cannot.

    Call ``fuse_rope`` first. Other ranks, LoRA and the monitor expect all rows.
    """
    parallel = vllm_config.parallel_config
    attention: Any = getattr(block, "attn", None) or getattr(block, "self_attn", None)
    if (
        not hasattr(block, "finish")
        or getattr(attention.attn.impl, "rope", None) is None
        or parallel.world_size > 1
        or parallel.data_parallel_size > 1
        or vllm_config.lora_config is not None
        or options.monitor_every
        or getattr(vllm_config.model_config, "enable_return_routed_experts", False)
    ):
        return None
    block.last = attention.attn.impl.last = LastBlock(block, attention)
    return block.last


def takes_codes(linear: nn.Module) -> bool:
    """Whether a norm quantises for ``linear``: then it leaves its residual alone."""
    return get_input_quant_key(linear) is not None
