# SPDX-License-Identifier: MIT
"""In what arithmetic an arm computes, told from its flags and environment variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# of MXFP4 experts under oss_fp8
_EXPERTS = {
    "auto": "bf16 precision in steps of fewer than 512 tokens, FP8 from 512 on",
    "exact": "bf16 precision in all steps",
    "fp8": "FP8 in steps of 256 tokens and more, bf16 precision below",
}


def describe_arithmetic(flags: Sequence[str], environment: Mapping[str, str], mxfp4: bool) -> str:
    """One phrase.

    Args:
        flags: of `vllm serve`.
        environment: variables that the arm sets.
        mxfp4: whether the checkpoint has MXFP4 experts.
    """
    words = [word for flag in flags for word in flag.split("=", 1)]
    method = words[words.index("--quantization") + 1] if "--quantization" in words else ""
    if method == "oss_fp8":
        text = "linear layers: FP8 weights and activations"
        if mxfp4:
            choice = environment.get("OSS_FUSED_EXPERT_ACTIVATIONS", "auto")
            text += f"; MXFP4 experts: activations in {_EXPERTS[choice]}"
    elif method:
        text = f"vLLM's {method}"
    elif mxfp4:
        text = "linear layers: bf16; MXFP4 experts: activations in bf16"
    else:
        text = "bf16, or as the checkpoint says"
    cache = words[words.index("--kv-cache-dtype") + 1] if "--kv-cache-dtype" in words else ""
    return f"{text}; KV cache {cache}" if cache else text
