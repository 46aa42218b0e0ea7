# SPDX-License-Identifier: MIT
"""Make this package part of vLLM's compile-cache key.

vLLM hashes its own configuration, not the sources or settings of a plugin. Without this module it
would reuse a graph that was compiled with other kernels or settings. ``additional_config`` is part
of the hash, which vLLM computes at the first forward pass, after the model is built. It holds the
options of this package and, by this module, the fingerprint.
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import oss_fused
from oss_fused import envs
from oss_fused.plugin.monitor.policy import bits16_layers
from oss_fused.plugin.options import serving_options
from oss_fused.quant.settings import ServingOptions

KEY = "oss_fused_fingerprint"


# what runs in a server or decides what does; tests/plugin/test_fingerprint.py follows the imports.
# Measuring, tuning, calibrating and checking a machine change no graph
SERVED = (
    "envs.py",
    "kernels",
    "layers/vllm",
    "plugin",
    "quant/formats.py",
    "quant/mxfp4.py",
    "quant/patterns.py",
    "quant/scheme.py",
    "quant/settings.py",
)
_BESIDE = (
    "api_key.py",
    "build_info.py",
    "checkpoint.py",
    "doctor.py",
    "preflight.py",
    "self_check.py",
    "monitor",
)


@functools.cache
def source_hash() -> str:
    """Digest of the files of the package that can change a compiled graph."""
    return hash_sources(Path(oss_fused.__file__).parent)


def hash_sources(root: Path) -> str:
    """Digest of the served files of the package in the folder ``root``."""
    digest = hashlib.sha256()
    for path in served_files(root):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def served_files(root: Path) -> list[Path]:
    """Sources and tables of the package in ``root`` that can change a compiled graph."""
    beside = [root / "plugin" / name for name in _BESIDE]
    found = []
    for name in SERVED:
        path = root / name
        files = path.rglob("*") if path.is_dir() else [path]
        found += [f for f in files if f.suffix in (".py", ".json")]
    return sorted(f for f in found if not any(f.is_relative_to(path) for path in beside))


def fingerprint(options: ServingOptions) -> str:
    """Version, sources, variables and the layers in the monitor's policy, as one string.

    The options themselves are in ``additional_config`` already.
    """
    settings = [envs.graph_settings(), sorted(bits16_layers(options.monitor_policy))]
    return json.dumps([oss_fused.__version__, source_hash(), *settings], sort_keys=True)


def record(vllm_config: Any) -> None:
    """Write the fingerprint into ``vllm_config.additional_config``.

    A draft model shares that with the served one, and writes the same.

    Raises:
        SchemeError: additional_config is not a dict, or holds an unknown option or value.
    """
    text = fingerprint(serving_options(vllm_config))
    vllm_config.additional_config[KEY] = text
