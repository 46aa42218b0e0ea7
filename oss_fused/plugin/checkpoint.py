# SPDX-License-Identifier: MIT
"""Refuses a hostile or damaged checkpoint by its config and headers, before a model is built."""

from __future__ import annotations

import json
from pathlib import Path

from oss_fused.plugin.patterns import matches
from oss_fused.plugin.settings import MXFP4_METHODS, QUANT_METHOD, Settings, from_checkpoint
from oss_fused.quant.checkpoint.audit import audit, check_config, quant_method
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
    # other methods' settings are vLLM's to judge
    if quant_method(reader) in (QUANT_METHOD, *MXFP4_METHODS):
        _check_patterns(from_checkpoint(reader.config["quantization_config"]), reader)
    return reader


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
