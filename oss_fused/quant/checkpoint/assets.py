# SPDX-License-Identifier: MIT
"""The files beside the weights: config.json, tokenizer, generation config, recipe, model card."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from oss_fused.errors import CheckpointError
from oss_fused.quant.checkpoint.reader import INDEX, check_link

_COPIED_SUFFIXES = {".json", ".jinja", ".model", ".txt", ".tiktoken"}
_COPIED_NAMES = ("LICENSE", "NOTICE", "USAGE_POLICY")
# rewritten here, or about another set of weights
_REPLACED = {"config.json", "README.md", "recipe.yaml", INDEX, "hf_quant_config.json"}
# of a training run that saved into the same folder; of other weights
_REPLACED |= {"trainer_state.json", "adapter_config.json", "self_check.json"}
# where transformers saves the templates of a tokenizer that has several
TEMPLATES = "additional_chat_templates"


def find_assets(source: Path) -> dict[str, Path]:
    """Name -> file of the tokenizer, its chat templates, generation_config.json and licences.

    Raises:
        CheckpointError: one is a link out of the checkpoint or to nothing, or cannot be read.
    """
    found = {}
    for path in sorted([*source.iterdir(), *(source / TEMPLATES).glob("*.jinja")]):
        wanted = path.suffix in _COPIED_SUFFIXES or path.name.startswith(_COPIED_NAMES)
        index = path.name.endswith(".index.json")
        if not wanted or index or path.name in _REPLACED:
            continue
        target = check_link(source, path)
        if target.is_file():
            try:
                target.open("rb").close()
            except OSError as error:
                raise CheckpointError(
                    f"{path}: cannot be read: {error.strerror}; expected a file to copy"
                ) from None
            found[str(path.relative_to(source))] = target
    return found


def copy_assets(assets: Mapping[str, Path], target: Path) -> None:
    """Copy what ``find_assets`` found into ``target``."""
    for name, path in assets.items():
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target / name)


def write_config(
    target: Path,
    config: dict[str, Any],
    quantization_config: dict[str, Any],
    untie: bool,
    dtype: str | None = None,
) -> None:
    """Write config.json: the source's, with ``quantization_config``.

    ``auto_map`` goes: it names Python files of the source, which are not copied and were not run.

    Args:
        target: folder.
        config: the source's config.json.
        quantization_config: what is written under that name.
        untie: lm_head has a tensor of its own from now on.
        dtype: of what is not quantised, None for the source's.
    """
    written = {**config, "quantization_config": quantization_config}
    written.pop("auto_map", None)
    if dtype is not None:
        written.pop("torch_dtype", None)  # its older name
        written["dtype"] = dtype
    if untie:
        written["tie_word_embeddings"] = False
    (target / "config.json").write_text(json.dumps(written, indent=2) + "\n")


def write_model_card(
    target: Path, base_model: str, optimisations: dict[str, Any], recipe: str, kind: str = "FP8"
) -> None:
    """Write README.md: what this is, how to serve it, how it was made, what it measures.

    Args:
        target: folder.
        base_model: name of the source.
        optimisations: lines of the table "Optimisations": name -> value.
        recipe: recipe.yaml's text.
        kind: "FP8" or "MXFP4".
    """
    front = {
        "base_model": base_model,
        "base_model_relation": "quantized",
        "library_name": "vllm",
        "pipeline_tag": "text-generation",
        "tags": [kind.lower(), "oss_fused", "vllm"],
    }
    rows = "\n".join(f"| {name} | {value} |" for name, value in optimisations.items())
    text = f"""---
{yaml.safe_dump(front, sort_keys=False).strip()}
---

# {base_model}, {kind}

Made from {base_model} by oss_fused's `scripts/calibrate.py`.

## Optimisations

| | |
|---|---|
{rows}

## Deployment

```
vllm serve {optimisations["Output"]}
```

## Creation

```yaml
{recipe.strip()}
```
"""
    (target / "README.md").write_text(text)
