# SPDX-License-Identifier: MIT
"""What an EAGLE head gets of this package: decode attention, and drafts of its own vocabulary.

For a greedy draft vLLM spreads the head's logits over the served model's vocabulary, three times
as large, and takes the largest there: a fill, a scatter and a reduction in every pass of the head.
The largest of the head's own logits is the same draft. vLLM has an option for that, which also
gathers no logits between tensor-parallel ranks. On one rank this package takes one launch,
``greedy_tokens``.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.interfaces import LocalArgmaxMixin
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import (
    TargetDependentARSpeculator,
)

import oss_fused.kernels  # noqa: F401  registers torch.ops.oss_fused
from oss_fused.layers.vllm.attention import OssAttentionImpl, adopt_attention
from oss_fused.plugin.options import serving_options

logger = init_logger(f"vllm.{__name__}")


def adopt_head_attention(runner: Any) -> None:
    """Give the attention of an EAGLE head the kernel of the served model, before caches are set up.

    ``runner``: a GPUModelRunner whose models are loaded. The head's weights stay as they are.
    """
    config, speculator = runner.vllm_config, runner.speculator
    if (
        not isinstance(speculator, EagleSpeculator)
        or serving_options(config).attention_kernels != "auto"
    ):
        return
    adopt_attention(speculator.model, config)
    for layer in speculator.model.modules():
        if isinstance(layer, Attention) and type(layer.impl) is OssAttentionImpl:
            # loading has done this for the served model's
            layer.impl.process_weights_after_loading(config.model_config.dtype)


def pick_from_own_vocabulary(speculator: Any) -> None:
    """Have ``speculator`` reduce the logits of its head's own vocabulary, where that is smaller.

    Call it before graphs are recorded. Drafts that are sampled, or whose acceptance is predicted,
    need the logits of all tokens.
    """
    model = getattr(speculator, "model", None)
    if (
        isinstance(speculator, TargetDependentARSpeculator)
        and isinstance(model, LocalArgmaxMixin)
        and getattr(model, "draft_id_to_target_id", None) is not None
        and model.logits_processor.scale > 0
        and speculator.draft_logits is None
        and speculator.acceptance_estimator is None
    ):
        speculator.use_local_argmax_reduction = True
        if model.lm_head.tp_size == 1:
            model.get_top_tokens = TopTokens(model, speculator.max_num_reqs)
        logger.info_once("oss_fused: drafts are picked from the draft model's own vocabulary")


class TopTokens:
    """The served model's ids of greedy drafts, in place of ``get_top_tokens`` of a draft model."""

    def __init__(self, model: Any, most: int) -> None:
        """Bind to the draft model, whose weights every call reads; ``most``: rows of a call."""
        self._model, self._most = model, most
        # scratch of greedy_tokens: made with the first drafts, since a sleeping engine may give
        # memory of this moment back
        self._arrivals: torch.Tensor | None = None

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Ids [T] of hidden states [T, H]; neither scale nor soft cap moves the largest logit."""
        model, arrivals = self._model, self._arrivals
        if arrivals is None:
            arrivals = torch.zeros(self._most, dtype=torch.int32, device=hidden_states.device)
            # memory of a graph is set by this graph alone
            if not (arrivals.is_cuda and torch.cuda.is_current_stream_capturing()):
                self._arrivals = arrivals
        offsets = model.draft_id_to_target_id
        logits = model.logits_processor._apply_head(model.lm_head, hidden_states, None)
        # padding follows
        known = logits[:, : offsets.shape[0]]
        return cast(torch.Tensor, torch.ops.oss_fused.greedy_tokens(known, arrivals, offsets))
