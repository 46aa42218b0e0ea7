# SPDX-License-Identifier: MIT
"""The options of this package in vLLM's ``--additional-config '{"oss_fused": {...}}'``."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger

from oss_fused.errors import SchemeError
from oss_fused.quant.settings import OnlineOptions, ServingOptions, parse_options

logger = init_logger(__name__)

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
    _warn_of_misplaced(config)
    return config.get(KEY)


def _warn_of_misplaced(config: dict[str, Any]) -> None:
    """Name keys that are likely meant for us: vLLM shares additional_config with other plugins."""
    options = {*OnlineOptions.model_fields, *ServingOptions.model_fields}
    for key in config:
        written = str(key).lower().replace("-", "_")
        if key != KEY and (written == KEY or written in options):
            expected = KEY if written == KEY else f"{KEY}.{written}"
            logger.warning_once(
                "oss_fused: additional_config: %r is not read; expected %r", key, expected
            )


def serving_options(vllm_config: Any) -> ServingOptions:
    """How the served model runs.

    Raises:
        SchemeError: names an unknown option, or an option with a bad value.
    """
    return parse_options(raw_options(vllm_config))[1]
