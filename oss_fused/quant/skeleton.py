# SPDX-License-Identifier: MIT
"""What calibration knows of a model: its skeleton on the meta device, its linears and experts."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from oss_fused.errors import CheckpointError, UnsupportedModelError
from oss_fused.quant.checkpoint.audit import (
    FAMILIES,
    GATED,
    check_config,
    check_layers,
    expected_shapes,
    quant_method,
)
from oss_fused.quant.checkpoint.reader import SOURCE_DTYPES, CheckpointReader

# what other quantisations store beside a weight; served, it would change what the weight means
_LEFTOVER = re.compile(r".*(?:_scale|_scale_inv|_scale_2|_zero_point|_shape|_packed)$")
_MXFP4_PARTS = re.compile(r"^(.*\.experts\.(?:gate_up|down)_proj)_(?:blocks|scales)$")
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
# written by old exports; the model computes them
_DERIVED = re.compile(r".*rotary_emb\.inv_freq$")


class ModelSkeleton:
    """A causal language model without weights, that fits a checkpoint.

    Attributes:
        config: the transformers config.
        model: the transformers model on the meta device.
        linears: name -> class of every linear layer, in model order.
        layers: number of decoder layers.
        experts: "mxfp4" or "bf16" as the reader gives them, None without experts.
        stored_experts: as the files store them; an adapter makes the reader's of MXFP4 bf16.
        gated: names of experts that the checkpoint stores one by one, None for other families.
        tied: lm_head shares the embedding's weight.
    """

    def __init__(self, reader: CheckpointReader) -> None:
        """Build the skeleton and check the checkpoint's tensors against it.

        Raises:
            UnsupportedModelError: the architecture is not one of FAMILIES.
            CheckpointError: a tensor is missing or has the wrong shape, or the checkpoint is
                quantised in a way that calibration cannot start from.
        """
        self.reader = reader
        self.config = _load_config(reader)
        self.model = _build(reader, self.config)
        self.layers: int = self.config.num_hidden_layers
        self.tied = bool(self.config.tie_word_embeddings) and "lm_head.weight" not in reader
        self.linears = {
            name: type(module).__name__
            for name, module in self.model.named_modules()
            if isinstance(module, nn.Linear)
        }
        self.gated = GATED.get(self.config.model_type)
        model: Any = self.model
        self._sparse = [hasattr(layer.mlp, "experts") for layer in model.model.layers]
        self.experts: str | None = None if self.gated is None else "bf16"
        self.stored_experts = self.experts
        if self.config.model_type == "gpt_oss":
            self.experts, self.stored_experts = (
                "mxfp4" if any(map(_MXFP4_PARTS.match, names)) else "bf16"
                for names in (reader.names(), reader.stored_names())
            )
        self._check_tensors()

    @property
    def family(self) -> str:
        """The model_type, one of FAMILIES."""
        return self.config.model_type

    def expert_modules(self) -> list[str]:
        """Names of the checkpoint's modules of experts."""
        modules = (self.experts_of(layer) for layer in range(self.layers))
        return [module for module in modules if module is not None]

    def experts_of(self, layer: int) -> str | None:
        """Name of a decoder layer's module of experts, None without."""
        if not self._sparse[layer]:
            return None
        block = "mlp" if self.gated is None else self.gated.block
        return f"model.layers.{layer}.{block}.experts"

    @property
    def expert_count(self) -> int:
        """Experts a layer."""
        return self.config.num_local_experts

    def stored_name(self, name: str) -> str:
        """The checkpoint's name of a tensor of the model, experts' weights left out."""
        if self.gated is not None and name.endswith(".mlp.gate.weight"):
            return name.replace(".mlp.", f".{self.gated.block}.")
        return name

    def tensor_names(self) -> list[str]:
        """Names of the checkpoint's tensors in the order of the model: embedding, layers, head."""
        names = [name for name in self.reader.names() if not _DERIVED.match(name)]
        if self.tied:
            names = [name for name in names if name != "lm_head.weight"]
        position = {name: i for i, name in enumerate(self._expected())}
        return sorted(names, key=lambda name: (position.get(_plain(name), len(position)), name))

    def _expected(self) -> dict[str, torch.Size]:
        return {
            stored: shape
            for name, tensor in self.model.state_dict().items()
            if not (self.tied and name == "lm_head.weight")
            for stored, shape in self._stored(name, tensor.shape)
        }

    def _stored(self, name: str, shape: torch.Size) -> Iterator[tuple[str, torch.Size]]:
        """Names and shapes under which the checkpoint has a tensor of the model."""
        module, _, part = name.rpartition(".mlp.experts.")
        if self.gated is None or not module:
            yield self.stored_name(name), shape
            return
        inner, outer = shape[1] // 2, shape[2]
        names: tuple[str, ...] = (self.gated.down,)
        size = shape[1:]
        if part == "gate_up_proj":
            names, size = (self.gated.gate, self.gated.up), torch.Size((inner, outer))
        for expert in range(shape[0]):
            for leaf in names:
                yield f"{module}.{self.gated.block}.experts.{expert}.{leaf}.weight", size

    def _check_tensors(self) -> None:
        _check_leftovers(self.reader)
        check_layers(self.reader)
        present = {_plain(name) for name in self.reader.names()}
        for name, shape in self._expected().items():
            if name not in present:
                raise CheckpointError(f"{self.reader.folder}: tensor {name!r} is missing")
            if name in self.reader and self.reader.shape(name) != tuple(shape):
                raise CheckpointError(
                    f"{self.reader.folder}: tensor {name!r} has shape {self.reader.shape(name)}; "
                    f"config.json asks for {tuple(shape)}"
                )
            if name in self.reader and self.reader.dtype(name) not in SOURCE_DTYPES.values():
                raise CheckpointError(
                    f"{self.reader.folder}: tensor {name!r} is {self.reader.dtype(name)}; expected "
                    f"{', '.join(map(str, SOURCE_DTYPES.values()))}"
                )


def layer_of(name: str) -> int | None:
    """Decoder layer that a tensor or module belongs to."""
    match = _LAYER.match(name)
    return int(match.group(1)) if match else None


def layer_step(layer: int) -> str:
    """Name under which a decoder layer's metrics are stored, beside those of a run's steps."""
    return f"model.layers.{layer}"


def _plain(name: str) -> str:
    """The model's own name of a checkpoint tensor: MXFP4 blocks and scales are one weight."""
    match = _MXFP4_PARTS.match(name)
    return match.group(1) if match else name


def _check_leftovers(reader: CheckpointReader) -> None:
    """Refuse tensors that give a weight a second meaning, and halves of an MXFP4 weight."""
    for name in reader.names():
        if _LEFTOVER.match(name):
            raise CheckpointError(
                f"{reader.folder}: tensor {name!r} is left over from a quantisation; expected a "
                f"checkpoint without scales"
            )
        plain = _plain(name)
        if plain == name:
            continue
        for part in (f"{plain}_blocks", f"{plain}_scales"):
            if part not in reader:
                raise CheckpointError(
                    f"{reader.folder}: tensor {part!r} is missing beside {name!r}"
                )
            if reader.dtype(part) != torch.uint8:
                raise CheckpointError(
                    f"{reader.folder}: tensor {part!r} is {reader.dtype(part)}; expected "
                    f"{torch.uint8}"
                )
        if plain in reader:
            raise CheckpointError(
                f"{reader.folder}: tensor {plain!r} is stored twice, plain and as {name!r}; "
                f"expected one of them"
            )


def _load_config(reader: CheckpointReader) -> Any:
    from transformers import AutoConfig

    family, path = reader.config.get("model_type"), f"{reader.folder}/config.json"
    if family not in FAMILIES:
        raise UnsupportedModelError(
            f"{path}: model_type={family!r}: expected one of {', '.join(FAMILIES)}"
        )
    method = quant_method(reader)
    if method is not None and method != "mxfp4":
        raise CheckpointError(
            f"{path}: quantised already (quant_method={method!r}); expected a bf16, fp16, fp32 or "
            f"MXFP4 checkpoint"
        )
    # no code of the checkpoint is run here, whatever it names
    check_config(reader.config, remote_code=True)
    try:
        config = AutoConfig.from_pretrained(reader.folder)
        _check_choices(path, config)
        present = {_plain(name) for name in reader.names()}
        missing = next((n for n, _ in expected_shapes(reader.config) if n not in present), None)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path}: {error}") from error
    if missing is not None:
        # said before a model of that size is built
        raise CheckpointError(f"{reader.folder}: tensor {missing!r} is missing")
    return config


def _check_choices(path: str, config: Any) -> None:
    """Refuse settings that transformers would stumble over while it builds or runs the model."""
    from transformers.activations import ACT2FN
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    heads, groups = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if groups and heads % groups:
        raise CheckpointError(
            f"{path}: num_key_value_heads={groups}: expected a divisor of "
            f"num_attention_heads={heads}"
        )
    if getattr(config, "hidden_act", "silu") not in ACT2FN:
        raise CheckpointError(
            f"{path}: hidden_act={config.hidden_act!r}: expected one of {', '.join(ACT2FN)}"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind not in (known := {"default", *ROPE_INIT_FUNCTIONS}):
        raise CheckpointError(
            f"{path}: rope_type={kind!r}: expected one of {', '.join(sorted(known))}"
        )
    for name, value in {**rope, "rms_norm_eps": config.rms_norm_eps}.items():
        if name not in ("rope_theta", "factor", "rms_norm_eps"):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise CheckpointError(f"{path}: {name}={value!r}: expected a number above 0")


def _build(reader: CheckpointReader, config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # one expert after the other: the forward that any device and dtype runs
    config._experts_implementation = "eager"
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    except Exception as error:
        raise CheckpointError(
            f"{reader.folder}/config.json: no model can be built from it: "
            f"{type(error).__name__}: {error}"
        ) from error
