# SPDX-License-Identifier: MIT
"""In what arithmetic an arm computes, derived from its flags."""

from __future__ import annotations

import json
from collections.abc import Sequence

_OPTION = "--additional-config"
# of linear layers under oss_fp8, by the option linear_activations
_LINEAR = {
    "fp8": "",
    "bf16": ", these in bf16 precision in steps of at most 8 tokens on Hopper "
    "(not in a fused dense MLP)",
}
# of MXFP4 experts under oss_fp8, by the option expert_activations
_EXPERTS = {
    "auto": "bf16 precision in steps of fewer than 512 tokens, FP8 from 512 on",
    "bf16": "bf16 precision in all steps",
    "fp8": "FP8 in steps of 256 tokens and more, bf16 precision below",
}


def describe_arithmetic(flags: Sequence[str], mxfp4: bool) -> str:
    """One phrase, such as "linear layers: FP8 weights and activations".

    Args:
        flags: of `vllm serve`.
        mxfp4: whether the checkpoint has MXFP4 experts.
    """
    method = _value(flags, "--quantization") or _value(flags, "-q")
    if method == "oss_fp8":
        if _option(flags, "scheme") == "W8A16":
            text = "linear layers: FP8 weights, activations in 16 bits"
        else:
            text = "linear layers: FP8 weights and activations"
            text += _LINEAR[_option(flags, "linear_activations") or "bf16"]
        if mxfp4:
            choice = _option(flags, "expert_activations")
            text += f"; MXFP4 experts: activations in {_EXPERTS[choice or 'auto']}"
    elif method:
        text = f"vLLM's {method}"
    elif mxfp4:
        text = "linear layers: bf16; MXFP4 experts: activations in bf16"
    else:
        text = "as the checkpoint says"
    cache = _value(flags, "--kv-cache-dtype")
    return f"{text}; KV cache: {cache}" if cache else text


def _value(flags: Sequence[str], name: str) -> str:
    """Value of ``--name value`` or ``--name=value``; empty where the flag is not given."""
    for flag, following in zip(flags, [*flags[1:], ""]):
        key, equals, value = flag.partition("=")
        if key.replace("_", "-") == name.replace("_", "-"):
            return value if equals else following
    return ""


def _option(flags: Sequence[str], name: str) -> str:
    """Value of an option of serving; empty where it is not given."""
    choice = _value(flags, f"{_OPTION}.oss_fused.{name}")
    config = _value(flags, _OPTION)
    if not choice and config:
        choice = json.loads(config).get("oss_fused", {}).get(name, "")
    return choice
