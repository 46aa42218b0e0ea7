# SPDX-License-Identifier: MIT
"""Make this package part of vLLM's compile-cache key.

vLLM hashes its own configuration, not the sources or settings of a plugin. Without this module it
would reuse a graph that was compiled with other kernels or settings. ``additional_config`` is part
of the hash, which vLLM computes at the first forward pass, after the model is built.
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import oss_fused
from oss_fused import envs
from oss_fused.errors import SchemeError
from oss_fused.plugin.monitor.policy import bits16_layers

KEY = "oss_fused_fingerprint"


@functools.cache
def source_hash() -> str:
    """Digest of every file of the package that can change a compiled graph."""
    root = Path(oss_fused.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(p for suffix in ("*.py", "*.json") for p in root.rglob(suffix)):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def fingerprint() -> str:
    """Version, sources and settings of the package, as one string."""
    settings = [envs.graph_settings(), sorted(bits16_layers())]
    return json.dumps([oss_fused.__version__, source_hash(), *settings], sort_keys=True)


def record(vllm_config: Any) -> None:
    """Write the fingerprint into ``vllm_config.additional_config``.

    Raises:
        SchemeError: additional_config is not a dict, so that the key cannot be extended.
    """
    config = vllm_config.additional_config
    if not isinstance(config, dict):
        raise SchemeError(
            f"additional_config={type(config).__name__}: quantization oss_fp8 expects a dict, to "
            f"add its fingerprint to vLLM's compile-cache key"
        )
    config[KEY] = fingerprint()
