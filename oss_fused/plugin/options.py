# SPDX-License-Identifier: MIT
"""The options of this package in vLLM's ``--additional-config '{"oss_fused": {...}}'``."""

from __future__ import annotations

from typing import Any

from oss_fused.errors import SchemeError
from oss_fused.quant.settings import ServingOptions, parse_options

KEY = "oss_fused"


def is_draft(vllm_config: Any) -> bool:
    """Whether ``vllm_config`` is of a draft model, which has default options."""
    return vllm_config.model_config.runner_type == "draft"


def raw_options(vllm_config: Any) -> Any:
    """The options as the user wrote them, None without.

    Raises:
        SchemeError: additional_config is not a dict.
    """
    config = vllm_config.additional_config
    if not isinstance(config, dict):
        raise SchemeError(
            f"additional_config={type(config).__name__}: quantization oss_fp8 expects a dict, to "
            f"read its options and to add its fingerprint to vLLM's compile-cache key"
        )
    return config.get(KEY)


def serving_options(vllm_config: Any) -> ServingOptions:
    """How the served model runs.

    Raises:
        SchemeError: names an unknown option, or an option with a bad value.
    """
    return parse_options(raw_options(vllm_config))[1]
