# SPDX-License-Identifier: MIT
"""Tiny checkpoints with random weights: bf16, FP8 and MXFP4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

FP8 = torch.float8_e4m3fn


def make_config(family: str, **changes: Any) -> Any:
    from transformers import AutoConfig

    config: dict[str, Any] = {
        "vocab_size": 200,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        # wide enough that logits differ by far more than rounding does
        "initializer_range": 0.06,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if family == "gpt_oss":
        config |= {
            "head_dim": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 32,
            "intermediate_size": 128,
            "layer_types": ["sliding_attention", "full_attention"],
        }
    if family == "qwen3":
        config["head_dim"] = 32
    if family == "mistral":
        config["sliding_window"] = None
    return AutoConfig.for_model(family, **(config | changes))


def build(folder: Path, family: str, **changes: Any) -> Path:
    """Save a random bf16 model of that family; returns its folder."""
    from transformers import AutoModelForCausalLM

    config = make_config(family, **changes)
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "sinks")) or parameter.dim() == 3:
            nn.init.normal_(parameter, std=0.1)
        if name.endswith("router.weight"):
            # sharp routing: a near tie of two experts would turn rounding into another function
            nn.init.normal_(parameter, std=1.0)
    model.save_pretrained(folder)
    return folder


def edit(folder: Path, tensors: dict[str, torch.Tensor], drop: tuple[str, ...] = ()) -> None:
    """Add, replace and drop tensors of a saved model."""
    path = folder / "model.safetensors"
    state = load_file(path) | {name: t.contiguous() for name, t in tensors.items()}
    save_file({k: v for k, v in state.items() if k not in drop}, path, {"format": "pt"})


def few_tokens(folder: Path, number: int = 16) -> None:
    """Leave answers of a saved model ``number`` tokens: they repeat, and some drafts are right."""
    for path in folder.glob("*.safetensors"):
        state = load_file(path)
        if "lm_head.weight" in state:
            state["lm_head.weight"][number:] = 0
            save_file(state, path, {"format": "pt"})


def set_quantization(folder: Path, config: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def scheme(inputs: str | None = "token") -> dict[str, Any]:
    def args(strategy: str, dynamic: bool) -> dict[str, Any]:
        return {
            "num_bits": 8,
            "type": "float",
            "strategy": strategy,
            "dynamic": dynamic,
            "symmetric": True,
        }

    return {
        "targets": ["Linear"],
        "weights": args("channel", False),
        "input_activations": None if inputs is None else args(inputs, inputs == "token"),
    }


KV_SCHEME = scheme("tensor")["input_activations"]


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    amax = weight.float().abs().amax(-1, keepdim=True)
    scale = torch.where(amax == 0, torch.ones_like(amax), amax / 448)
    return (weight.float() / scale).clamp(-448, 448).to(FP8), scale


def calibrate(
    folder: Path,
    inputs: str | None = "token",
    ignore: tuple[str, ...] = ("lm_head",),
    kv: bool = False,
    experts: str | None = None,
    input_scale: float = 0.02,
) -> Path:
    """Turn a saved model into an oss_fp8 checkpoint, in place."""
    new, drop = {}, []
    for name, weight in tensors_of(folder).items():
        linear = name.removesuffix(".weight")
        leaf = linear.rpartition(".")[2]
        if not (leaf.endswith("_proj") or leaf == "lm_head") or weight.dim() != 2:
            continue
        if linear == name or linear in ignore:
            continue
        new[name], new[f"{linear}.weight_scale"] = quantize_rows(weight)
        if inputs == "tensor":
            new[f"{linear}.input_scale"] = torch.tensor([input_scale])
    if kv:
        for layer in range(2):
            new[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor([0.0123456])
            new[f"model.layers.{layer}.self_attn.v_scale"] = torch.tensor([0.0234567])
    if experts == "fp8":
        more, drop = fp8_experts(tensors_of(folder))
        new |= more
    elif experts == "mxfp4":
        more, drop = mxfp4_experts(tensors_of(folder))
        new |= more
    edit(folder, new, tuple(drop))
    set_quantization(
        folder,
        {
            "quant_method": "oss_fp8",
            "version": 1,
            "config_groups": {"group_0": scheme(inputs)},
            "ignore": list(ignore),
            "kv_cache_scheme": KV_SCHEME if kv else None,
            "experts": experts,
        },
    )
    return folder


def fp8_experts(state: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[str]]:
    new, drop = {}, []
    for name, tensor in state.items():
        if ".mlp.experts." not in name:
            continue
        parent, _, leaf = name.rpartition(".")
        short = "w13" if leaf.startswith("gate_up") else "w2"
        drop.append(name)
        for expert, value in enumerate(tensor):
            if leaf.endswith("_bias"):
                new[f"{parent}.{expert}.{short}_bias"] = value.clone()
            else:
                key = f"{parent}.{expert}.{short}_weight"
                new[key], new[f"{key}_scale"] = quantize_rows(value.t())
    return new, drop


def mxfp4_experts(state: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[str]]:
    from oss_fused.quant.mxfp4 import pack_mxfp4

    new, drop = {}, []
    for name, tensor in state.items():
        if ".mlp.experts." in name and not name.endswith("_bias"):
            drop.append(name)
            packed = pack_mxfp4(tensor.transpose(1, 2).contiguous())
            new[f"{name}_blocks"], new[f"{name}_scales"] = packed
    return new, drop


def to_mxfp4(folder: Path) -> Path:
    """Turn a saved gpt-oss into an MXFP4 checkpoint as OpenAI ships it, in place."""
    new, drop = mxfp4_experts(tensors_of(folder))
    edit(folder, new, tuple(drop))
    skip = [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ]
    set_quantization(folder, {"quant_method": "mxfp4", "modules_to_not_convert": skip})
    return folder


def changed(tensors: dict[str, Any], name: str, change: Any) -> dict[str, Any]:
    """``tensors`` with a copy of that name that ``change`` has written to."""
    new = tensors[name].clone()
    change(new)
    return tensors | {name: new}


def without(tensors: dict[str, Any], *names: str) -> dict[str, Any]:
    """``tensors`` but those ``names``, all of which are there."""
    assert set(names) <= set(tensors)
    return {name: tensor for name, tensor in tensors.items() if name not in names}
