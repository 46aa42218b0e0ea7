# SPDX-License-Identifier: MIT
"""Tiny random models with a byte-level tokenizer, and a dataset."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from oss_fused.quant.mxfp4 import pack_mxfp4

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
OSS: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama-tied": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=8, tie_word_embeddings=False),
    "qwen2": lambda: Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen3": lambda: Qwen3Config(**SIZES, tie_word_embeddings=False),
    "mixtral": lambda: MixtralConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False
    ),
    # the first layer without experts, as mlp_only_layers says
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **SIZES,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        mlp_only_layers=[0],
        norm_topk_prob=True,
        tie_word_embeddings=False,
    ),
    "gpt-oss": lambda: GptOssConfig(**SIZES, **OSS),
    "gpt-oss-mxfp4": lambda: GptOssConfig(**SIZES, **OSS),
}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def make_model(kind: str, folder: Path) -> Path:
    """A random model of that kind, its outputs far from uniform."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]())
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
        elif "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.02)
    model.to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder)
    if kind == "gpt-oss-mxfp4":
        pack_experts(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def pack_experts(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales = pack_mxfp4(tensors.pop(name).transpose(1, 2).contiguous())
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a model by kind, made once a session; not to be changed."""
    root = tmp_path_factory.mktemp("models")

    def get(kind: str) -> Path:
        folder = root / kind
        return folder if folder.exists() else make_model(kind, folder)

    return get


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("The quay is long enough for three colliers moored end to end. " * 12)
    return path
