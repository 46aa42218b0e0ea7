# SPDX-License-Identifier: MIT
"""Environment variables: name, default, values and meaning, in one table.

These are what a process needs before vLLM has a configuration, and what the library reads without
vLLM. How a model is served is said in ``quant.settings.ServingOptions``. Read a value with
``envs.get("OSS_FUSED_BACKEND")``.
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
        "kernel backend: auto takes triton on a GPU, cpu or torch elsewhere",
    ),
    "OSS_FUSED_MONITOR_DIR": Variable(
        "",
        (),
        "folder where workers write the monitor's figures for /metrics; default: a temporary one",
    ),
    "OSS_FUSED_COMMIT": Variable(
        "",
        (),
        "commit of the sources, for result files; default: the git checkout's",
    ),
}
# variables that nothing reads any more -> option of --additional-config '{"oss_fused": {...}}'
MOVED = {
    "OSS_FUSED_EXPERTS": "expert_kernels",
    "OSS_FUSED_EXPERT_ACTIVATIONS": "expert_activations",
    "OSS_FUSED_ATTENTION": "attention_kernels",
    "OSS_FUSED_MODELS": "fused_layers",
    "OSS_FUSED_STEP": "short_step",
    "OSS_FUSED_MONITOR": "monitor_every",
    "OSS_FUSED_MONITOR_POLICY": "monitor_policy",
}
# the variables that can change a compiled graph
_GRAPH = ("OSS_FUSED_BACKEND",)


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
    return {name: get(name) for name in _GRAPH}


def snapshot() -> dict[str, str]:
    """Every variable with its current value, for reports."""
    return {name: get(name) for name in VARIABLES}


def moved() -> str:
    """What to say of variables that are set although an option has replaced them; or nothing."""
    found = [f"{old} (option {new})" for old, new in MOVED.items() if old in os.environ]
    if not found:
        return ""
    return (
        f"these variables have no effect: {', '.join(found)}; expected the options in "
        f"--additional-config '{{\"oss_fused\": {{...}}}}'"
    )
