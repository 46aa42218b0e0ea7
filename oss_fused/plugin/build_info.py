# SPDX-License-Identifier: MIT
"""``oss_fused:build_info`` on vLLM's /metrics: which versions and settings a server runs."""

from __future__ import annotations

from oss_fused import __version__, envs
from oss_fused.bench.environment import version

# settings that choose code paths; the others are numbers and folders
_LABELS = {
    "backend": "OSS_FUSED_BACKEND",
    "experts": "OSS_FUSED_EXPERTS",
    "attention": "OSS_FUSED_ATTENTION",
    "models": "OSS_FUSED_MODELS",
}


def labels() -> dict[str, str]:
    """Label -> value of the metric, which itself is always 1."""
    versions = {
        "version": __version__,
        "vllm": version("vllm") or "",
        "torch": version("torch") or "",
    }
    return versions | {label: envs.get(name) for label, name in _LABELS.items()}


def register_build_info() -> None:
    """Add the metric to the registry that vLLM serves; once a process."""
    from prometheus_client import Info

    Info("oss_fused:build", "Versions and settings of this server").info(labels())
