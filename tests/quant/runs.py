# SPDX-License-Identifier: MIT
"""Runs of calibration on the tiny models, and what they leave."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from oss_fused.quant.calibrator import Run, RunOptions, Summary
from oss_fused.quant.mxfp4 import unpack_mxfp4
from oss_fused.quant.recipe import make_recipe

SETTINGS = {"scheme": "FP8_STATIC", "kv_cache": "fp8", "num_samples": 2, "max_seq_length": 16}
Models = Callable[[str], Path]


def calibrate(
    model: Path, output: Path, progress=lambda items, _: items, *, resume=False, **settings
) -> Summary:
    options = RunOptions(model, output, resume=resume, max_shard_bytes=60_000)
    return Run(make_recipe(settings), options).execute(progress)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def whole_model(source: Path) -> torch.nn.Module:
    if not config_of(source).get("quantization_config"):
        return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config).float()
    state = tensors(source)
    for name in [n for n in state if n.endswith("_blocks")]:
        plain = name.removesuffix("_blocks")
        state[plain] = unpack_mxfp4(state.pop(name), state.pop(f"{plain}_scales")).transpose(1, 2)
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return model.eval()


def changed(models: Models, tmp_path: Path, kind: str, **changes) -> Path:
    """A copy of a model with some tensors replaced or, if None, dropped."""
    folder = tmp_path / "changed"
    folder.mkdir()
    for path in models(kind).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    state = load_file(folder / "model.safetensors")
    for name, value in changes.items():
        full = name.replace("__", ".")
        state.pop(full)
        if value is not None:
            state[full] = value
    save_file(state, folder / "model.safetensors")
    return folder
