# SPDX-License-Identifier: MIT
"""Refuses a hostile or damaged checkpoint by its config and headers, before a model is built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from oss_fused.errors import CheckpointError
from oss_fused.layers.vllm.checks import PACKED
from oss_fused.quant.checkpoint.audit import audit, check_config, quant_method
from oss_fused.quant.checkpoint.reader import INDEX, SINGLE, CheckpointReader
from oss_fused.quant.patterns import find_target, matches
from oss_fused.quant.settings import MXFP4_METHODS, QUANT_METHOD, Settings, from_checkpoint

_WEIGHTS = (".safetensors", ".index.json", ".bin", ".pt", ".pth")
# linear of a checkpoint -> vLLM's layer, which patterns may name as well
_FUSED = {part: name for name, parts in PACKED.items() for part in parts}


def check_checkpoint(
    folder: Path,
    remote_code: bool = False,
    values: bool = True,
    config: dict[str, Any] | None = None,
) -> CheckpointReader:
    """Check a checkpoint folder: files, headers, sizes, quantisation and its patterns.

    Args:
        folder: a local checkpoint.
        remote_code: Python code that config.json names is welcome.
        values: read every scale too, not only config and headers.
        config: the model's as vLLM reads it; config.json's, if None.

    Returns:
        The opened checkpoint.

    Raises:
        CheckpointError: names file, tensor or key.
        SchemeError: the quantisation is not understood.
    """
    reader = audit(folder, remote_code, values, config or _mistral_config(folder))
    # vLLM checks the settings of other methods
    if quant_method(reader) in (QUANT_METHOD, *MXFP4_METHODS):
        settings = from_checkpoint(reader.config["quantization_config"])
        _check_patterns(settings, reader)
        if settings.calibrated:
            _check_layers(settings, reader)
    return reader


def check_before_load(model: str, hf_config: Any = None, revision: str | None = None) -> None:
    """What vLLM's processes check of a checkpoint before memory is allocated for its model.

    Scales are checked once they are loaded (checks.py), remote code where vLLM knows whether it
    is welcome (config.py). A folder without weights passes: ``--load-format dummy`` serves those.
    Of a name on the hub, that is checked which lies in the cache; the loaders check the rest.

    Args:
        model: folder, or a name on the hub.
        hf_config: what vLLM made of the model's config, if it has.
        revision: of the name on the hub.

    Raises:
        CheckpointError: names file, tensor or key.
        SchemeError: the quantisation is not understood.
    """
    folder = _local_folder(model, revision)
    if folder is None:
        return
    config = None if hf_config is None else hf_config.to_dict()
    if config is not None:
        # vLLM's own class names of draft heads and overrides stand here, not in config.json
        config["architectures"] = getattr(hf_config, "architectures", None)
    if folder.is_dir() and _has_weights(folder):
        check_checkpoint(folder, remote_code=True, values=False, config=config)
    elif config is not None or (folder / "config.json").is_file():
        check_config(config or json.loads((folder / "config.json").read_text()), remote_code=True)


def _local_folder(model: str, revision: str | None) -> Path | None:
    """The folder of ``model``: itself, or its snapshot in the hub's cache; None without."""
    if Path(model).is_dir():
        return Path(model)
    try:
        config = try_to_load_from_cache(model, "config.json", revision=revision)
    except HFValidationError:
        # an address of object storage, for example
        return None
    return Path(config).parent if isinstance(config, str) else None


def _has_weights(folder: Path) -> bool:
    """Whether weights are there; a snapshot that vLLM has yet to complete has none."""
    if not any(path.name.endswith(_WEIGHTS) for path in folder.iterdir()):
        return False
    if folder.parent.name != "snapshots":
        return True
    try:
        named = json.loads((folder / INDEX).read_text())["weight_map"].values()
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        named = [SINGLE]
    return all((folder / str(file)).exists() for file in named)


def _mistral_config(folder: Path) -> dict[str, Any] | None:
    """The config of a folder in Mistral's own format, as vLLM reads it; None for all others."""
    if (folder / "config.json").exists() or not (folder / "params.json").exists():
        return None
    from vllm.transformers_utils.config import get_config

    # vLLM looks into the file for its dtype, and says nothing where it is damaged
    CheckpointReader(folder, quantised=True, config={})
    try:
        return get_config(folder, trust_remote_code=False, config_format="mistral").to_dict()
    except Exception as error:
        raise CheckpointError(f"{folder / 'params.json'}: vLLM cannot read it: {error!r}") from None


def _check_patterns(settings: Settings, reader: CheckpointReader) -> None:
    """Try every regular expression on every layer: a bad one is refused before the model is built.

    Globs and names take linear time.
    """
    layers = {name.rpartition(".")[0] for name in reader.names()}
    targets = (pattern for patterns in settings.targets.values() for pattern in patterns)
    for pattern in (*settings.ignore, *targets):
        for layer in layers if pattern.startswith("re:") else ():
            matches(pattern, layer)


def _check_layers(settings: Settings, reader: CheckpointReader) -> None:
    """Refuse linears that are FP8 although ignored, and targets that are not FP8."""
    for name in reader.names():
        layer = name.removesuffix(".weight")
        if layer == name or len(reader.shape(name)) != 2:
            continue
        parent, _, leaf = layer.rpartition(".")
        names = (layer, f"{parent}.{_FUSED[leaf]}") if leaf in _FUSED else (layer,)
        ignored = any(matches(pattern, n) for pattern in settings.ignore for n in names)
        quantised = not ignored and find_target(layer, settings.targets, {}) is not None
        found = reader.is_fp8(name)
        # experts, embeddings and routers have rules of their own
        if found and not quantised:
            expected = "bf16, float16 or float32, because ignore and targets say so"
        elif quantised and not found and leaf.endswith("_proj") and ".experts." not in name:
            expected = "torch.float8_e4m3fn, because ignore and targets say so"
        else:
            continue
        raise CheckpointError(
            f"{reader.file(name)}: tensor {name!r} is {reader.dtype(name)}; expected {expected}"
        )
