# SPDX-License-Identifier: MIT
"""Environment variables: name, type, default and meaning, in one table.

Read a value with ``envs.get("OSS_FUSED_BACKEND")``. Variables that change numerics or
code paths take part in vLLM's compile-cache key (see plugin/fingerprint.py).
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from oss_fused.errors import SchemeError


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
        "MoE experts: native kernels where they measure faster, always native kernels, or vLLM's",
    ),
    "OSS_FUSED_EXPERT_ACTIVATIONS": Variable(
        "auto",
        ("auto", "exact", "fp8"),
        "activations of native MXFP4 experts: exact keeps bf16; fp8 quantises them in steps of 256 "
        "tokens and more, auto in steps of 512 and more",
    ),
    "OSS_FUSED_ATTENTION": Variable(
        "auto",
        ("auto", "vllm"),
        "decode attention: the native kernel where it applies, or always vLLM's backend",
    ),
    "OSS_FUSED_MODELS": Variable(
        "1",
        ("0", "1"),
        "1 lets oss_fp8 models use the fused decoder layers; 0 keeps vLLM's model classes",
    ),
    "OSS_FUSED_STEP": Variable(
        "short",
        ("short", "vllm"),
        "short: fewer host operations per step (model_state.py, scheduler.py, larger graphs); "
        "vllm: as vLLM",
    ),
    "OSS_FUSED_MONITOR": Variable(
        "0",
        (),
        "N: sample the inputs of FP8 layers in one step in N while serving; 0 disables",
    ),
    "OSS_FUSED_MONITOR_POLICY": Variable(
        "",
        (),
        "file that lists layers to serve with 16-bit activations; the monitor adds to it",
    ),
    "OSS_FUSED_MONITOR_DIR": Variable(
        "",
        (),
        "folder where workers write the monitor's figures for /metrics; default: a temporary one",
    ),
}
# these change no graph, except through the content of the policy file
_WATCHING = "OSS_FUSED_MONITOR"


def get(name: str) -> str:
    """Return the value of ``name``.

    Raises:
        KeyError: ``name`` is not in VARIABLES.
        SchemeError: the value is not one of the variable's choices.
    """
    variable = VARIABLES[name]
    value = os.environ.get(name, variable.default).strip()
    if not variable.choices:
        return value
    value = value.lower()
    if value not in variable.choices:
        raise SchemeError(f"{name}={value!r}: expected one of {', '.join(variable.choices)}")
    return value


def shown(name: str) -> str:
    """The value of ``name`` for reports, also where it is not one of the variable's choices."""
    try:
        return get(name)
    except ValueError:
        return f"{os.environ[name]} (unknown)"


def graph_settings() -> dict[str, str]:
    """The variables that can change a compiled graph, with their values."""
    return {name: get(name) for name in VARIABLES if not name.startswith(_WATCHING)}


def snapshot() -> dict[str, str]:
    """Every variable with its current value, for reports."""
    return {name: get(name) for name in VARIABLES}
