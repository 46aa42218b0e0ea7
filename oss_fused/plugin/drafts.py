# SPDX-License-Identifier: MIT
"""Greedy drafts of an EAGLE head that knows a part of the vocabulary.

vLLM spreads the head's logits over the served model's vocabulary, three times as large, and looks
for the largest there: a fill, a scatter and a reduction in every pass of the head. The largest of
the head's own logits is the same draft. vLLM has that as an option, which saves the gathering of
logits between tensor-parallel ranks.
"""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.model_executor.models.interfaces import LocalArgmaxMixin
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import (
    TargetDependentARSpeculator,
)

logger = init_logger(f"vllm.{__name__}")


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
        logger.info_once("oss_fused: drafts are picked from the draft model's own vocabulary")
