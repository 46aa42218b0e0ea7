# SPDX-License-Identifier: MIT
"""Random checkpoints of real shapes: gpt-oss (bf16 or MXFP4), Llama, Qwen2, Qwen3, Mistral.

Timing needs weights of realistic spread. With vLLM's dummy weights (+-1e-3) every token is routed
to the same few experts and expert timings come out wrong; here linears keep the variance of their
input, embeddings tell tokens apart and the router's logits have a standard deviation near 1.5, so
that load spreads over the experts as a trained model's does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from harness.folder import ShardWriter, atomic_folder
from harness.tokenizer import save_tokenizer
from oss_fused.errors import UnsupportedModelError
from oss_fused.files import write_json
from oss_fused.kernels.checks import check_device

ROUTER_LOGIT_STD = 1.5
# residual branches are damped as in trained models, so that tokens stay distinguishable
BRANCH_GAIN = 0.5
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# standard deviation, in units of the block's scale, of Gaussian weights after MXFP4 rounding
MXFP4_SPREAD = 2.2


@dataclass(frozen=True)
class Shape:
    """Dimensions of a decoder; ``experts`` is 0 for a dense model."""

    arch: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    rope_theta: float
    experts: int = 0
    top_k: int = 0
    sliding_window: int = 0
    tied: bool = False


_GPT_OSS_20B = Shape(
    "gpt-oss", 24, 2880, 2880, 64, 8, 64, 201088, 131072, 150000.0, 32, 4, sliding_window=128
)
_TINY = Shape("llama", 2, 256, 512, 4, 2, 64, 1024, 4096, 10000.0)
SHAPES: dict[tuple[str, str], Shape] = {
    ("gpt-oss", "20b"): _GPT_OSS_20B,
    ("gpt-oss", "120b"): replace(_GPT_OSS_20B, layers=36, experts=128),
    ("gpt-oss", "tiny"): Shape(
        "gpt-oss", 2, 256, 256, 4, 2, 64, 1024, 4096, 150000.0, 8, 4, sliding_window=128
    ),
    ("llama", "8b"): Shape("llama", 32, 4096, 14336, 32, 8, 128, 128256, 8192, 500000.0),
    ("llama", "tiny"): _TINY,
    ("qwen2", "tiny"): replace(_TINY, arch="qwen2", tied=True),
    ("qwen3", "tiny"): replace(_TINY, arch="qwen3", tied=True),
    ("mistral", "tiny"): replace(_TINY, arch="mistral"),
}
ARCHITECTURES = tuple(dict.fromkeys(arch for arch, _ in SHAPES))
SIZES = tuple(dict.fromkeys(size for _, size in SHAPES))
CLASSES = {
    "gpt-oss": "GptOssForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}


def get_shape(arch: str, size: str) -> Shape:
    """The shape of ``arch`` at ``size``.

    Raises:
        UnsupportedModelError: there is none; the message lists those that exist.
    """
    if (arch, size) not in SHAPES:
        known = ", ".join(f"{a}:{s}" for a, s in SHAPES)
        raise UnsupportedModelError(f"model {arch}:{size}: expected one of {known}")
    return SHAPES[arch, size]


def make_model(
    output: Path,
    shape: Shape,
    weight_format: str = "bf16",
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> int:
    """Write a random checkpoint with tokenizer, complete or not at all; return its weight bytes.

    Args:
        output: the folder to create.
        shape: dimensions, see SHAPES.
        weight_format: "bf16", or "mxfp4" (experts of gpt-oss only; the rest stays bf16).
        seed: the same seed, shape and device kind give the same weights.
        device: where the weights are made, one layer at a time.

    Raises:
        UnsupportedModelError: MXFP4 asked for a dense model or a size that is no multiple of 32.
        UnsupportedDeviceError, BackendUnavailableError: ``device`` is not here.
        CheckpointError: ``output`` exists, or writing failed.
    """
    check_device(device)
    if weight_format == "mxfp4":
        if not shape.experts:
            raise UnsupportedModelError(f"format mxfp4: {shape.arch} has no experts; use bf16")
        if shape.hidden % 32 or shape.intermediate % 32:
            raise UnsupportedModelError(
                f"format mxfp4: hidden {shape.hidden} and intermediate {shape.intermediate} "
                "must be multiples of 32"
            )
    elif weight_format != "bf16":
        raise UnsupportedModelError(f"format {weight_format!r}: expected bf16 or mxfp4")
    family = {"gpt-oss": "gpt-oss", "qwen2": "qwen", "qwen3": "qwen"}.get(shape.arch, "llama")
    with atomic_folder(output) as folder:
        ids = save_tokenizer(folder, family, shape.vocab, shape.context)
        with ShardWriter(folder) as writer:
            for group in tensor_groups(shape, weight_format, seed, torch.device(device)):
                writer.add(group)
        generation = {"bos_token_id": ids["bos"], "eos_token_id": ids["eos"]}
        write_json(folder / "generation_config.json", {**generation, "pad_token_id": ids["pad"]})
        write_json(folder / "config.json", config_of(shape, weight_format, ids))
    return writer.total_bytes


def config_of(shape: Shape, weight_format: str, ids: dict[str, int]) -> dict[str, Any]:
    """The contents of config.json, with the keys that the published checkpoints have."""
    config: dict[str, Any] = {
        "architectures": [CLASSES[shape.arch]],
        "model_type": shape.arch.replace("-", "_"),
        "attention_bias": shape.arch == "gpt-oss",
        "attention_dropout": 0.0,
        "bos_token_id": ids["bos"],
        "eos_token_id": ids["eos"],
        "pad_token_id": ids["pad"],
        "dtype": "bfloat16",
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.context,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": 1e-5,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": shape.tied,
        "use_cache": True,
        "vocab_size": shape.vocab,
    }
    if shape.arch == "mistral":
        config["sliding_window"] = None
    if shape.arch == "gpt-oss":
        config |= {
            "experts_per_token": shape.top_k,
            "initial_context_length": 4096,
            "layer_types": [
                "full_attention" if i % 2 else "sliding_attention" for i in range(shape.layers)
            ],
            "num_experts_per_tok": shape.top_k,
            "num_local_experts": shape.experts,
            "output_router_logits": False,
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": shape.context / 4096 if shape.context > 4096 else 32.0,
                "original_max_position_embeddings": 4096 if shape.context > 4096 else 128,
                "rope_type": "yarn",
                "truncate": False,
            },
            "router_aux_loss_coef": 0.9,
            "sliding_window": shape.sliding_window,
            "swiglu_limit": 7.0,
        }
    if weight_format == "mxfp4":
        kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router"]
        config["quantization_config"] = {
            "modules_to_not_convert": [*kept, "model.embed_tokens", "lm_head"],
            "quant_method": "mxfp4",
        }
    return config


def tensor_groups(
    shape: Shape, weight_format: str, seed: int, device: torch.device
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors in groups of one layer's size, each made on ``device`` when asked for."""
    make = Maker(torch.Generator(device).manual_seed(seed), device)
    # a tied embedding is the output head as well
    spread = 1 / math.sqrt(shape.hidden) if shape.tied else 1.0
    yield {
        "model.embed_tokens.weight": make.normal(shape.vocab, shape.hidden, std=spread),
        "model.norm.weight": make.norm(shape.hidden),
    }
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        group = _attention(shape, prefix + "self_attn.", make)
        group[prefix + "input_layernorm.weight"] = make.norm(shape.hidden)
        group[prefix + "post_attention_layernorm.weight"] = make.norm(shape.hidden)
        if shape.experts:
            group |= _experts(shape, prefix + "mlp.", weight_format, make)
        else:
            group |= draw_mlp(make, prefix + "mlp.", shape.hidden, shape.intermediate)
        yield group
    if not shape.tied:
        yield {"lm_head.weight": make.linear(shape.vocab, shape.hidden)}


class Maker:
    """Draws tensors of a given spread from one generator."""

    def __init__(self, generator: torch.Generator, device: torch.device) -> None:
        """Draw from ``generator``, which is of ``device``'s kind."""
        self.generator = generator
        self.device = device
        # 256 equally likely values of a Gaussian, each as the nearest e2m1 code
        quantiles = torch.special.ndtri((torch.arange(256, dtype=torch.float64) + 0.5) / 256)
        grid = torch.tensor(E2M1_VALUES, dtype=torch.float64)
        values = quantiles * MXFP4_SPREAD
        codes = (values.abs()[:, None] - grid).abs().argmin(dim=1) + 8 * (values < 0)
        self._codes = codes.to(torch.uint8).to(device)

    def normal(self, *size: int, std: float) -> torch.Tensor:
        """Bfloat16 of mean 0."""
        value = torch.empty(size, dtype=torch.bfloat16, device=self.device)
        return value.normal_(0.0, std, generator=self.generator)

    def norm(self, size: int) -> torch.Tensor:
        """Weights of a norm, around 1."""
        return (1.0 + self.normal(size, std=0.1).float()).to(torch.bfloat16)

    def linear(self, out: int, inner: int, gain: float = 1.0) -> torch.Tensor:
        """Weights [out, inner] that keep the variance of their input, times gain."""
        return self.normal(out, inner, std=gain / math.sqrt(inner))

    def mxfp4(
        self, experts: int, rows: int, inner: int, gain: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks [E, rows, inner / 32, 16] and e8m0 scales [E, rows, inner / 32], both uint8."""
        size = (experts, rows, inner // 32, 16)
        blocks = self._draw_codes(size)
        blocks |= self._draw_codes(size) << 4
        exponent = round(math.log2(gain / math.sqrt(inner) / MXFP4_SPREAD))
        lower = torch.randint(0, 4, size[:3], generator=self.generator, device=self.device) == 0
        scales = torch.full(size[:3], 127 + exponent, dtype=torch.uint8, device=self.device)
        return blocks, scales - lower.to(torch.uint8)

    def _draw_codes(self, size: tuple[int, ...]) -> torch.Tensor:
        out = torch.empty(size, dtype=torch.uint8, device=self.device)
        for expert in out:  # the index is eight times as large as the codes
            index = torch.empty(expert.shape, dtype=torch.int32, device=self.device)
            expert.copy_(self._codes[index.random_(0, 256, generator=self.generator)])
        return out


def _attention(shape: Shape, prefix: str, make: Maker) -> dict[str, torch.Tensor]:
    sizes = shape.heads, shape.kv_heads, shape.head_dim
    group = draw_attention(
        make, prefix, *sizes, shape.hidden, shape.hidden, shape.arch in ("gpt-oss", "qwen2")
    )
    if shape.arch == "gpt-oss":
        group[prefix + "o_proj.bias"] = make.normal(shape.hidden, std=0.02)
        group[prefix + "sinks"] = make.normal(shape.heads, std=1.0)
    if shape.arch == "qwen3":
        group[prefix + "q_norm.weight"] = make.norm(shape.head_dim)
        group[prefix + "k_norm.weight"] = make.norm(shape.head_dim)
    return group


def draw_attention(
    make: Maker,
    prefix: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    inner: int,
    hidden: int,
    bias: bool = False,
) -> dict[str, torch.Tensor]:
    """The projections of an attention layer that reads [T, inner] and writes [T, hidden]."""
    group = {}
    for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        group[f"{prefix}{name}_proj.weight"] = make.linear(rows * head_dim, inner)
        if bias:
            group[f"{prefix}{name}_proj.bias"] = make.normal(rows * head_dim, std=0.1)
    group[prefix + "o_proj.weight"] = make.linear(hidden, heads * head_dim, BRANCH_GAIN)
    return group


def draw_mlp(make: Maker, prefix: str, hidden: int, inner: int) -> dict[str, torch.Tensor]:
    """The projections of a gated MLP."""
    return {
        prefix + "gate_proj.weight": make.linear(inner, hidden),
        prefix + "up_proj.weight": make.linear(inner, hidden),
        prefix + "down_proj.weight": make.linear(hidden, inner, BRANCH_GAIN),
    }


def _experts(shape: Shape, prefix: str, weight_format: str, make: Maker) -> dict[str, torch.Tensor]:
    count, hidden, inner = shape.experts, shape.hidden, shape.intermediate
    group = {
        prefix + "router.weight": make.linear(count, hidden, ROUTER_LOGIT_STD),
        prefix + "router.bias": make.normal(count, std=0.1),
        prefix + "experts.gate_up_proj_bias": make.normal(count, 2 * inner, std=0.02),
        prefix + "experts.down_proj_bias": make.normal(count, hidden, std=0.02),
    }
    for name, rows, columns, gain in (
        ("gate_up_proj", 2 * inner, hidden, 1.0),
        ("down_proj", hidden, inner, BRANCH_GAIN),
    ):
        key = f"{prefix}experts.{name}"
        if weight_format == "mxfp4":
            group[key + "_blocks"], group[key + "_scales"] = make.mxfp4(count, rows, columns, gain)
        else:  # transposed, as transformers keeps them: [E, columns, rows]
            std = gain / math.sqrt(columns)
            group[key] = make.normal(count, columns, rows, std=std)
    return group
