# SPDX-License-Identifier: MIT
"""Models on meta tensors, by name or from a config.json: shapes and FLOPs without weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harness.model_factory import SHAPES, Shape, config_of
from oss_fused.analysis.graph import ComputationGraphAnalyzer, Graph
from oss_fused.errors import UnsupportedModelError

_SMOLLM2 = Shape("llama", 30, 576, 1536, 9, 3, 64, 49152, 8192, 100000.0, tied=True)
NAMED = {"smollm2-135m": _SMOLLM2} | {f"{a}:{s}": shape for (a, s), shape in SHAPES.items()}


@dataclass(frozen=True)
class Phase:
    """A kind of step: ``tokens`` new ones of each of ``batch`` sequences, behind ``context``."""

    name: str
    batch: int
    tokens: int
    context: int


def load_config(model: str) -> Any:
    """The transformers config of a name in ``NAMED``, or of a folder with a config.json.

    Raises:
        UnsupportedModelError: neither.
    """
    from transformers import AutoConfig

    if model in NAMED:
        content = config_of(NAMED[model], "bf16", {"bos": 0, "eos": 1, "pad": 2})
        return AutoConfig.for_model(content.pop("model_type"), **content)
    if (Path(model) / "config.json").is_file():
        return AutoConfig.from_pretrained(model)
    raise UnsupportedModelError(
        f"MODEL={model!r}: expected a folder with config.json, or one of {', '.join(NAMED)}"
    )


def meta_model(config: Any) -> Any:
    """The model in bfloat16 without storage.

    Experts run as batched products, which need no routing decision; a meta tensor has none.
    """
    from transformers import AutoModelForCausalLM

    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if any(type(module).__name__.endswith("Experts") for module in model.modules()):
        model.set_experts_implementation("batched_mm")
    return model.eval()


def phase_graph(analyzer: ComputationGraphAnalyzer, model: Any, phase: Phase) -> Graph:
    """The graph of one step."""
    ids = torch.zeros(phase.batch, phase.tokens, dtype=torch.int64, device="meta")
    # with a cache, even an empty one, transformers does not look at positions, which have no values
    sample = {"input_ids": ids, "past_key_values": _cache(model.config, phase)}
    return analyzer.build_graph_from_model(model, sample)


def _cache(config: Any, phase: Phase) -> Any:
    from transformers import DynamicCache

    heads = config.num_key_value_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = DynamicCache()
    shape = (phase.batch, heads, phase.context, size)
    for layer in range(config.num_hidden_layers if phase.context else 0):
        keys, values = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for _ in "kv")
        cache.update(keys, values, layer)
    return cache
