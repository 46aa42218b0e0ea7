# SPDX-License-Identifier: MIT
"""Environment variables: name, type, default and meaning, in one table.

Read a value with ``envs.get("OSS_FUSED_BACKEND")``. Variables that change numerics or
code paths take part in vLLM's compile-cache key (see plugin/fingerprint.py).
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    """One environment variable: default, the values it takes (any, if empty), meaning."""

    default: str
    choices: tuple[str, ...]
    meaning: str


VARIABLES: dict[str, Variable] = {
    "OSS_FUSED_BACKEND": Variable(
        "auto",
        ("auto", "torch", "triton"),
        "kernel backend: auto takes triton on a GPU and torch elsewhere",
    ),
    "OSS_FUSED_EXPERTS": Variable(
        "auto",
        ("auto", "oss", "vllm"),
        "MoE experts: our kernels where they measure faster, always ours, or vLLM's own",
    ),
    "OSS_FUSED_EXPERT_ACTIVATIONS": Variable(
        "auto",
        ("auto", "exact", "fp8"),
        "activations of our MXFP4 experts: exact keeps bf16's precision, fp8 is faster from 256 "
        "tokens a step on; auto takes what measured better",
    ),
    "OSS_FUSED_ATTENTION": Variable(
        "auto",
        ("auto", "vllm"),
        "decode attention: our kernel where it applies, or vLLM's backend throughout",
    ),
    "OSS_FUSED_MODELS": Variable(
        "1",
        ("0", "1"),
        "1 lets oss_fp8 models use the fused decoder layers; 0 keeps vLLM's model classes",
    ),
}


def get(name: str) -> str:
    """Return the value of ``name``.

    Raises:
        KeyError: ``name`` is not in VARIABLES.
        ValueError: the value is not one of the variable's choices.
    """
    variable = VARIABLES[name]
    value = os.environ.get(name, variable.default).strip().lower()
    if variable.choices and value not in variable.choices:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(variable.choices)}")
    return value


def snapshot() -> dict[str, str]:
    """Every variable with its current value, for reports and cache keys."""
    return {name: get(name) for name in VARIABLES}
