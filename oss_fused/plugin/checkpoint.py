# SPDX-License-Identifier: MIT
"""Refuses a hostile or damaged checkpoint by its config and headers, before a model is built."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oss_fused.errors import CheckpointError
from oss_fused.plugin.patterns import matches
from oss_fused.plugin.settings import Settings, from_checkpoint
from oss_fused.quant.checkpoint.audit import audit, check_config
from oss_fused.quant.checkpoint.reader import CheckpointReader

_WEIGHTS = (".safetensors", ".index.json", ".bin", ".pt", ".pth")


def check_checkpoint(
    folder: Path, remote_code: bool = False, values: bool = True
) -> CheckpointReader:
    """Check a checkpoint folder: files, headers, sizes, quantisation and its patterns.

    Args:
        folder: a local checkpoint.
        remote_code: Python code that config.json names is welcome.
        values: read every scale too, not only config and headers.

    Returns:
        The opened checkpoint.

    Raises:
        CheckpointError: names file, tensor or key.
        SchemeError: the quantisation is not understood.
    """
    reader = audit(folder, remote_code, values)
    config = reader.config.get("quantization_config")
    if config is not None:
        _check_patterns(parse(config), reader)
    return reader


def parse(config: Any) -> Settings:
    """Settings of a ``quantization_config`` from an unknown hand.

    Raises:
        SchemeError: it is of another method, or has a value that is not understood.
    """
    if not isinstance(config, Mapping):
        raise CheckpointError(f"config.json: quantization_config={config!r}: expected an object")
    return from_checkpoint(config)


def check_before_load(model: str) -> None:
    """What vLLM's processes check of a local folder before memory is allocated for its model.

    Scales are checked once they are loaded (checks.py), remote code where vLLM knows whether it
    is welcome (config.py). A folder without weights passes: ``--load-format dummy`` serves those.

    Args:
        model: folder, or a name on the hub, which passes.

    Raises:
        CheckpointError: names file, tensor or key.
        SchemeError: the quantisation is not understood.
    """
    folder = Path(model)
    if not folder.is_dir():
        return
    if any(path.name.endswith(_WEIGHTS) for path in folder.iterdir()):
        check_checkpoint(folder, remote_code=True, values=False)
    else:
        check_config(json.loads((folder / "config.json").read_text()), remote_code=True)


def _check_patterns(settings: Settings, reader: CheckpointReader) -> None:
    """Try every regular expression on every layer: a bad one is refused before the model is built.

    Globs and names take linear time.
    """
    layers = {name.rpartition(".")[0] for name in reader.names()}
    targets = (pattern for patterns in settings.targets.values() for pattern in patterns)
    for pattern in (*settings.ignore, *targets):
        for layer in layers if pattern.startswith("re:") else ():
            matches(pattern, layer)
