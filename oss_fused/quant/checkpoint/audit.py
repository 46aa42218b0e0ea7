# SPDX-License-Identifier: MIT
"""Judges a checkpoint of unknown origin from its config and headers, before memory is allocated.

``CheckpointReader`` refuses damaged folders: files outside the folder, pickles, broken headers,
tensors that are missing or stored twice. Here sizes in config.json are bounded and compared with
the headers, and every scale is checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from oss_fused.errors import CheckpointError
from oss_fused.quant.checkpoint.reader import SOURCE_DTYPES, CheckpointReader


@dataclass(frozen=True)
class GatedExperts:
    """Where a family's checkpoints keep experts gated by SiLU: each with three linears."""

    block: str
    gate: str
    up: str
    down: str


GATED = {
    "mixtral": GatedExperts("block_sparse_moe", "w1", "w3", "w2"),
    "qwen3_moe": GatedExperts("mlp", "gate_proj", "up_proj", "down_proj"),
}
FAMILIES = ("gpt_oss", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
# beyond any published model; vLLM allocates by these numbers before it reads a tensor
_LIMITS = {
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": 1024,
    "num_attention_heads": 4096,
    "num_key_value_heads": 4096,
    "head_dim": 4096,
    "vocab_size": 1 << 22,
    "max_position_embeddings": 1 << 25,
    "num_local_experts": 4096,
    "num_experts": 4096,
    "moe_intermediate_size": 1 << 20,
    "num_experts_per_tok": 4096,
    "decoder_sparse_step": 1024,
}
_OPTIONAL_SIZES = (
    "head_dim",
    "num_key_value_heads",
    "num_local_experts",
    "num_experts",
    "moe_intermediate_size",
    "num_experts_per_tok",
    "decoder_sparse_step",
)
_LISTS = {"architectures": (str, "names"), "mlp_only_layers": (int, "integers")}
_KNOWN_METHODS = (None, "oss_fp8", "mxfp4", "gpt_oss_mxfp4")
# architectures that end otherwise have layers of their own: draft heads, for example
_HEADS = ("ForCausalLM", "Model", "ForSequenceClassification", "ForTokenClassification")
_IN_LAYER = re.compile(r"^(?:model\.)?layers\.(\d+)\.")
_MXFP4_BLOCK = 32

Shape = tuple[int, ...]


def audit(
    folder: str | Path,
    remote_code: bool = False,
    values: bool = True,
    config: dict[str, Any] | None = None,
) -> CheckpointReader:
    """Check everything about a checkpoint that needs no model.

    Args:
        folder: the checkpoint.
        remote_code: Python code that config.json names is welcome.
        values: read every scale too, not only config and headers.
        config: the model's, where it is not what config.json says: a draft head's, or Mistral's.

    Returns:
        The opened checkpoint.

    Raises:
        CheckpointError: names file, tensor or key, its value and what was expected.
    """
    reader = CheckpointReader(folder, quantised=True, config=config)
    check_config(reader.config, remote_code)
    # other quantisation methods store weights in their own layouts
    if quant_method(reader) in _KNOWN_METHODS:
        if _is_known(reader):
            for name in reader.names():
                reader.dtype(name)
            _check_shapes(reader)
            check_layers(reader)
        _check_scale_layout(reader)
    if values:
        for name in reader.names():
            check_scale_values(reader, name)
    return reader


def _is_known(reader: CheckpointReader) -> bool:
    """Whether ``expected_shapes`` knows the model, under whatever head it has."""
    architectures = reader.config.get("architectures") or ["ForCausalLM"]
    return (
        reader.config["model_type"] in FAMILIES
        # in Mistral's own format tensors have other names
        and not any(name.startswith("layers.0.attention.") for name in reader.names())
        and all(name.endswith(_HEADS) for name in architectures)
    )


def quant_method(reader: CheckpointReader) -> str | None:
    """``quant_method`` of the checkpoint, None if it is not quantised.

    Raises:
        CheckpointError: ``quantization_config`` is no object.
    """
    config = reader.config.get("quantization_config")
    if config is not None and not isinstance(config, dict):
        raise CheckpointError(f"config.json: quantization_config={config!r}: expected an object")
    return (config or {}).get("quant_method")


def check_config(config: dict[str, Any], remote_code: bool = False) -> None:
    """Bound the sizes in config.json, and refuse code that it names.

    Raises:
        CheckpointError: names the key and its value.
    """
    check_remote_code(config, remote_code)
    if not isinstance(config.get("model_type"), str):
        raise CheckpointError(
            f"config.json: model_type={config.get('model_type')!r}: expected a name"
        )
    known = config["model_type"] in FAMILIES
    for key, limit in _LIMITS.items():
        value = config.get(key)
        if value is None and (key in _OPTIONAL_SIZES or not known):
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
            raise CheckpointError(
                f"config.json: {key}={str(value)[:80]}: expected an integer from 1 to {limit}"
            )
    for key, (kind, what) in _LISTS.items():
        values = config.get(key)
        listed = isinstance(values, list) and all(type(value) is kind for value in values)
        if values is not None and not listed:
            raise CheckpointError(
                f"config.json: {key}={repr(values)[:80]}: expected a list of {what}"
            )


def check_layers(reader: CheckpointReader) -> None:
    """Refuse tensors of layers beyond those of config.json, which vLLM fails to load.

    Raises:
        CheckpointError: names the first such tensor.
    """
    layers = reader.config["num_hidden_layers"]
    for name in reader.names():
        match = _IN_LAYER.match(name)
        if match and int(match[1]) >= layers:
            raise CheckpointError(
                f"{reader.file(name)}: tensor {name!r} is of layer {match[1]}; config.json has "
                f"num_hidden_layers={layers}, so layers 0 to {layers - 1} were expected"
            )


def check_remote_code(config: Mapping[str, Any], welcome: bool) -> None:
    """Refuse a config that names Python code to run, unless that is ``welcome``.

    Raises:
        CheckpointError: shows the code's names.
    """
    if config.get("auto_map") and not welcome:
        raise CheckpointError(
            f"config.json: auto_map={config['auto_map']!r}: names remote code; expected a model "
            f"that runs without (or --trust-remote-code, if you have read that code)"
        )


def check_scale_values(reader: CheckpointReader, name: str) -> None:
    """Refuse a scale that is zero, negative or not finite; other tensors pass.

    Raises:
        CheckpointError: names the tensor and a bad value.
    """
    # the reader itself refuses NaN and Inf, also those of e8m0
    if name.endswith("_proj_scales"):
        reader.read(name)
    elif name.endswith("_scale"):
        scale = reader.read(name).float()
        if not bool((scale > 0).all()):
            raise CheckpointError(
                f"{reader.folder}: tensor {name!r} holds {scale.min().item()}; expected finite "
                f"scales above 0"
            )


def expected_shapes(config: dict[str, Any]) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of the bf16 checkpoint that ``config`` describes; FAMILIES only.

    Experts of gpt-oss appear as transformers keeps them (3-D, input dimension first).
    """
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    queries, keys = heads * head_dim, (config.get("num_key_value_heads") or heads) * head_dim
    layer: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
    }
    sparse: dict[str, Shape] = {}
    if config["model_type"] == "gpt_oss":
        experts = config.get("num_local_experts") or 0
        layer |= {
            "self_attn.sinks": (heads,),
            "mlp.router.weight": (experts, hidden),
            "mlp.router.bias": (experts,),
            "mlp.experts.gate_up_proj": (experts, hidden, 2 * inner),
            "mlp.experts.gate_up_proj_bias": (experts, 2 * inner),
            "mlp.experts.down_proj": (experts, inner, hidden),
            "mlp.experts.down_proj_bias": (experts, hidden),
        }
    else:
        sparse = _gated_experts(config)
        layer |= {
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        leaves = layer
        if _is_sparse(config, index):
            leaves = {n: s for n, s in layer.items() if ".mlp." not in f".{n}"} | sparse
        for leaf, shape in leaves.items():
            yield f"model.layers.{index}.{leaf}", shape
    yield "model.norm.weight", (hidden,)
    if not config.get("tie_word_embeddings"):
        yield "lm_head.weight", (config["vocab_size"], hidden)


def _is_sparse(config: Mapping[str, Any], layer: int) -> bool:
    """Whether that layer of a family in GATED has experts."""
    dense = layer in (config.get("mlp_only_layers") or ())
    return (
        config["model_type"] in GATED
        and not dense
        and (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0
    )


def _gated_experts(config: Mapping[str, Any]) -> dict[str, Shape]:
    names = GATED.get(config["model_type"])
    if names is None:
        return {}
    hidden = config["hidden_size"]
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    count = config.get("num_local_experts") or config.get("num_experts") or 0
    shapes: dict[str, Shape] = {f"{names.block}.gate.weight": (count, hidden)}
    for expert in range(count):
        prefix = f"{names.block}.experts.{expert}"
        shapes[f"{prefix}.{names.gate}.weight"] = (inner, hidden)
        shapes[f"{prefix}.{names.up}.weight"] = (inner, hidden)
        shapes[f"{prefix}.{names.down}.weight"] = (hidden, inner)
    return shapes


def _check_shapes(reader: CheckpointReader) -> None:
    """Compare every tensor that the model needs with the header that holds it."""
    architectures = reader.config.get("architectures") or ["ForCausalLM"]
    # a model that was saved without its head has no prefix "model." either
    bare = "embed_tokens.weight" in reader and "model.embed_tokens.weight" not in reader
    generates = not bare and architectures[0].endswith("ForCausalLM")
    for name, shape in expected_shapes(reader.config):
        if name == "lm_head.weight" and not generates:
            continue
        stored = name.removeprefix("model.") if bare else name
        for part, size in _stored_as(reader, stored, shape):
            if part not in reader:
                head = f", architectures={architectures!r}" if part == "lm_head.weight" else ""
                raise CheckpointError(
                    f"{reader.folder}: tensor {part!r} is missing; config.json{head} asks for "
                    f"{list(size)}"
                )
            if reader.shape(part) != size:
                raise CheckpointError(
                    f"{reader.folder}: tensor {part!r} has shape {list(reader.shape(part))}; "
                    f"config.json asks for {list(size)}"
                )
            _check_dtype(reader, part)


def _check_dtype(reader: CheckpointReader, name: str) -> None:
    """Refuse FP8 codes without a scale, and other dtypes under a scale."""
    if name.endswith(("_blocks", "_scales")):
        return
    if name.endswith(("w13_weight", "w2_weight")):
        expected: tuple[torch.dtype, ...] = (torch.float8_e4m3fn,)
    else:
        expected = tuple(SOURCE_DTYPES.values())
        if name.endswith(("_proj.weight", "lm_head.weight")) or ".experts." in name:
            expected += (torch.float8_e4m3fn,)
    _expect_dtype(reader, name, *expected)


def _stored_as(reader: CheckpointReader, name: str, shape: Shape) -> Iterator[tuple[str, Shape]]:
    """The tensors that hold ``name``: itself, MXFP4 blocks and scales, or one FP8 per expert."""
    config = reader.config.get("quantization_config") or {}
    layout = config.get("experts") or ("mxfp4" if "mxfp4" in str(quant_method(reader)) else None)
    one_by_one = reader.config["model_type"] in GATED
    if ".mlp.experts." not in name or layout in (None, "bf16") or one_by_one:
        yield name, shape
        return
    parent, _, leaf = name.rpartition(".")
    is_bias = leaf.endswith("_bias")
    if layout == "mxfp4":
        if is_bias:
            yield name, shape
            return
        experts, columns, rows = shape
        blocks = (experts, rows, columns // _MXFP4_BLOCK)
        yield f"{name}_blocks", (*blocks, _MXFP4_BLOCK // 2)
        yield f"{name}_scales", blocks
        return
    short = "w13" if leaf.startswith("gate_up") else "w2"
    for expert in range(shape[0]):
        stem = f"{parent}.{expert}.{short}"
        if is_bias:
            yield f"{stem}_bias", shape[1:]
        else:
            yield f"{stem}_weight", (shape[2], shape[1])


def _check_scale_layout(reader: CheckpointReader) -> None:
    """FP8 codes have a scale per row, nothing else has one, and scales are as the format says."""
    for name in reader.names():
        if name.endswith("_blocks") or name.endswith("_proj_scales"):
            _expect_dtype(reader, name, torch.uint8)
        elif name.endswith("weight_scale"):
            codes = name.removesuffix("_scale")
            if codes not in reader:
                raise CheckpointError(
                    f"{reader.file(name)}: tensor {name!r} is the scale of {codes!r}, which is "
                    f"missing"
                )
            _expect_dtype(reader, codes, torch.float8_e4m3fn, reason=f": {name!r} is its scale")
        elif name.endswith((".input_scale", ".q_scale", ".k_scale", ".v_scale")):
            _expect(reader, name, ((1,), ()))
        elif reader.is_fp8(name):
            scale = f"{name}_scale"
            if scale not in reader or not name.endswith("weight"):
                raise CheckpointError(
                    f"{reader.file(name)}: tensor {scale!r} is missing; {name!r} is FP8"
                )
            _expect(reader, scale, ((reader.shape(name)[0], 1),))


def _expect_dtype(
    reader: CheckpointReader, name: str, *expected: torch.dtype, reason: str = ""
) -> None:
    if reader.dtype(name) not in expected:
        raise CheckpointError(
            f"{reader.file(name)}: tensor {name!r} is {reader.dtype(name)}; expected "
            f"{' or '.join(map(str, expected))}{reason}"
        )


def _expect(reader: CheckpointReader, name: str, shapes: tuple[Shape, ...]) -> None:
    if reader.shape(name) not in shapes:
        raise CheckpointError(
            f"{reader.folder}: tensor {name!r} has shape {list(reader.shape(name))}; expected "
            f"{list(shapes[0])}"
        )
    _expect_dtype(reader, name, torch.float32)
