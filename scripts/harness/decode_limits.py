# SPDX-License-Identifier: MIT
"""Bytes that a decode step must read, from a model's config.json, by group of kernels.

The limit counts each weight once, in the format that oss_fp8 serves it in (FP8 projections, MXFP4
or FP8 experts, the head as docs/serving.md says), and the keys and values that a layer sees. Two
arms are held against the same limit, so that their fractions compare like their times.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# of one weight: e2m1 with an e8m0 scale every 32
_MXFP4_BYTES = 17 / 32
_KV_BYTES = 2


def load_config(model: str) -> dict[str, Any]:
    """config.json of a checkpoint folder."""
    config: dict[str, Any] = json.loads((Path(model) / "config.json").read_text())
    return config


def kv_bytes(config: dict[str, Any]) -> int:
    """Bytes of one position in a bf16 KV cache, all layers keeping all of it."""
    return 2 * _KV_BYTES * config["num_hidden_layers"] * _kv_width(config)


def step_bytes(config: dict[str, Any], batch: int, context: int) -> dict[str, float]:
    """Bytes that a step of ``batch`` sequences at ``context`` positions reads, by group.

    A token's experts count as drawn evenly: of E experts with k a token, a batch of B touches
    ``E * (1 - (1 - k / E) ** B)``.
    """
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    inner, heads = config["intermediate_size"], config["num_attention_heads"]
    queries, keys = heads * _head_dim(config), _kv_width(config)
    experts = config.get("num_local_experts", 0)
    if experts:
        spared = (1 - config["num_experts_per_tok"] / experts) ** batch
        quantised = config.get("quantization_config", {}).get("quant_method") == "mxfp4"
        weight = _MXFP4_BYTES if quantised else 1.0
        mlp = experts * (1 - spared) * 3 * hidden * inner * weight
    else:
        mlp = 3.0 * hidden * inner
    seen = sum(min(context, window or context) for window in _windows(config))
    return {
        "projections": float(layers * (2 * queries + 2 * keys) * hidden),
        "experts" if experts else "mlp": layers * mlp,
        "attention": float(batch * seen * 2 * keys * _KV_BYTES),
        "head": float(config["vocab_size"] * hidden * (1 if experts else 2)),
    }


def _head_dim(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _kv_width(config: dict[str, Any]) -> int:
    return int(config.get("num_key_value_heads") or config["num_attention_heads"]) * _head_dim(
        config
    )


def _windows(config: dict[str, Any]) -> list[int]:
    """The window of each layer, 0 for none."""
    window = config.get("sliding_window") or 0
    kinds = config.get("layer_types") or []
    if not kinds:
        return [window] * config["num_hidden_layers"]
    return [window if kind == "sliding_attention" else 0 for kind in kinds]
