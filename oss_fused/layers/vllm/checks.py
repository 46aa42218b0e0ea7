# SPDX-License-Identifier: MIT
"""Checks of loaded tensors: a missing or non-finite tensor raises an error with its name."""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts

from oss_fused.errors import CheckpointError
from oss_fused.quant.patterns import spellings

# fills scales before loading; no scale has this value, so a scale that keeps it was not loaded
MISSING = torch.finfo(torch.float32).min

# dtypes of unquantised tensors; FP8 codes and packed bytes need scales
FLOATS = (torch.bfloat16, torch.float16, torch.float32)

_E8M0_NAN = 255

# vLLM's layer -> the checkpoint's linears that are fused into it
PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def tensor_name(name: str, part: int, parts: int) -> str:
    """Name in the checkpoint of part ``part`` of vLLM's fused tensor ``name``."""
    name = spellings(name)[-1]
    match = re.match(r"^(.*\.)(\w+)(\.\w+)$", name)
    if match and parts > 1 and len(PACKED.get(match[2], ())) == parts:
        return f"{match[1]}{PACKED[match[2]][part]}{match[3]}"
    return name


def check_dtype(name: str, found: torch.dtype, expected: Sequence[torch.dtype]) -> None:
    """Refuse a tensor of another dtype, which the copy into the layer would cast silently.

    Args:
        name: of the tensor in the checkpoint.
        found: its dtype there.
        expected: what the layer can take.

    Raises:
        CheckpointError: names tensor, dtype and what was expected.
    """
    if found not in expected:
        raise CheckpointError(
            f"{name!r} is {found}; expected {' or '.join(map(str, expected))}, by the checkpoint's "
            f"quantization_config and the layer's ignore patterns"
        )


def checked_loader(
    loader: Callable[..., Any], name: str, expected: Sequence[torch.dtype]
) -> Callable[..., Any]:
    """A parameter's ``weight_loader`` that checks the dtype of the loaded tensor.

    Args:
        loader: vLLM's; a method stays a method of its layer, which reloading looks for.
        name: of the parameter in vLLM.
        expected: dtypes that the tensor may have in the checkpoint.

    Returns:
        A loader with the same signature, which raises CheckpointError for other dtypes.
    """
    owner = getattr(loader, "__self__", None)
    inner = loader.__func__ if isinstance(loader, types.MethodType) else loader
    signature = inspect.signature(inner)

    @functools.wraps(inner)
    def load(*arguments: Any, **options: Any) -> Any:
        given = signature.bind(*arguments, **options).arguments
        weight = given.get("loaded_weight")
        if isinstance(weight, torch.Tensor):
            check_dtype(_part_name(name, owner, given), weight.dtype, expected)
        return inner(*arguments, **options)

    return load if owner is None else types.MethodType(load, owner)


def _part_name(name: str, layer: Any, given: Mapping[str, Any]) -> str:
    """Name in the checkpoint of the part of ``name`` that a loader's arguments say."""
    if given.get("expert_id") is not None:
        parent = name.rpartition(".")[0]
        linear = {
            "w1": layer.ckpt_gate_proj_name,
            "w3": layer.ckpt_up_proj_name,
            "w2": layer.ckpt_down_proj_name,
        }[given["shard_id"]]
        leaf = given["weight_name"].rpartition(".")[2].partition("_")[2]
        return f"{spellings(parent)[-1]}.{given['expert_id']}.{linear}.{leaf}"
    parts = PACKED.get(name.rpartition(".")[0].rpartition(".")[2], ())
    shard = given.get("loaded_shard_id")
    if isinstance(shard, str) and f"{shard}_proj" in parts:
        shard = parts.index(f"{shard}_proj")
    return tensor_name(name, shard, len(parts)) if isinstance(shard, int) else spellings(name)[-1]


def check_scale(name: str, scale: torch.Tensor, widths: Sequence[int]) -> None:
    """Refuse a scale that is missing, zero, negative or not finite.

    Args:
        name: of the parameter in vLLM.
        scale: float32, one value per row.
        widths: rows of each tensor of the checkpoint that is fused into it.

    Raises:
        CheckpointError: names the tensor of the checkpoint, and one bad value.
    """
    if bool((scale.isfinite() & (scale > 0)).all()):
        return
    for part, rows in enumerate(scale.view(-1).split(list(widths))):
        bad = rows[~(rows.isfinite() & (rows > 0))]
        if not bad.numel():
            continue
        tensor = tensor_name(name, part, len(widths))
        if bool((bad == MISSING).any()):
            raise CheckpointError(
                f"{tensor!r} is missing from the checkpoint; expected a finite scale above 0"
            )
        raise CheckpointError(
            f"{tensor!r} holds {bad[0].item()} ({bad.numel()} of {rows.numel()} values are bad); "
            f"expected finite scales above 0: write the checkpoint again with scripts/calibrate.py"
        )


def check_weight(name: str, codes: torch.Tensor, widths: Sequence[int]) -> None:
    """Refuse FP8 codes that are NaN, the value that missing weights keep.

    Raises:
        CheckpointError: names the tensor of the checkpoint.
    """
    bad = (codes.view(torch.uint8) & 0x7F) == 0x7F
    if not bool(bad.any()):
        return
    for part, rows in enumerate(bad.split(list(widths))):
        if bool(rows.any()):
            tensor = tensor_name(name, part, len(widths))
            raise CheckpointError(
                f"{tensor!r} is missing from the checkpoint, or holds NaN; expected FP8 codes of "
                f"finite numbers"
            )


def check_finite(name: str, weight: torch.Tensor, widths: Sequence[int] = ()) -> None:
    """Refuse a tensor with NaN or Inf, the value that a missing tensor keeps.

    Args:
        name: of the parameter in vLLM.
        weight: [N, ...], of a float dtype.
        widths: rows of each tensor of the checkpoint that is fused into it; none: it is one.

    Raises:
        CheckpointError: names the tensor of the checkpoint.
    """
    if _is_finite(weight):
        return
    # rows beyond the checkpoint's pad a vocabulary
    parts = weight.split(list(widths)) if sum(widths) == len(weight) else (weight,)
    for part, rows in enumerate(parts):
        if not _is_finite(rows):
            raise CheckpointError(
                f"{tensor_name(name, part, len(parts))!r} is missing from the checkpoint, or holds "
                f"NaN or Inf; expected finite numbers"
            )


def _is_finite(weight: torch.Tensor) -> bool:
    if not weight.numel():
        return True
    # one pass without a copy; NaN and Inf are the smallest or the largest
    low, high = weight.aminmax()
    return bool(low.isfinite() & high.isfinite())


def check_experts(layer: Any, prefix: str) -> None:
    """Refuse weights and biases of experts with NaN or Inf.

    Args:
        layer: vLLM's RoutedExperts, with parameters [experts of this rank, ...].
        prefix: its name.

    Raises:
        CheckpointError: names the expert's tensor.
    """
    for name, parameter in layer._parameters.items():
        if not name.endswith(("_weight", "_bias")) or parameter.dtype not in FLOATS:
            continue
        if not _is_finite(parameter.data):
            bad = next(e for e, expert in enumerate(parameter.data) if not _is_finite(expert))
            row = int((~parameter.data[bad].isfinite()).nonzero()[0, 0])
            raise CheckpointError(
                f"{expert_tensor(layer, prefix, name, bad, row)} is missing from the checkpoint, "
                f"or holds NaN or Inf; expected finite numbers"
            )


def expert_tensor(layer: Any, prefix: str, name: str, local: int, row: int) -> str:
    """Name in the checkpoint, in quotes, of the tensor that a row of experts comes from.

    Args:
        layer: vLLM's RoutedExperts.
        prefix: its name.
        name: of its parameter.
        local: the expert, in this rank's count.
        row: of the expert.
    """
    expert = next(
        e
        for e in range(layer.global_num_experts)
        if layer._map_global_expert_id_to_local_expert_id(e) == local
    )
    if not isinstance(layer, GptOssRoutedExperts):
        gate, up = layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name
        part = gate if row < getattr(layer, name).shape[1] // 2 else up
        part = part if name.startswith("w13") else layer.ckpt_down_proj_name
        name = f"{part}.{name.partition('_')[2]}"
    return f"'{spellings(prefix)[-1]}.{expert}.{name}'"


def check_mxfp4_scale(name: str, scale: torch.Tensor) -> None:
    """Refuse e8m0 block scales that are NaN.

    Args:
        name: of vLLM's parameter, ``...experts.w13_weight_scale`` or ``...w2_weight_scale``.
        scale: uint8.

    Raises:
        CheckpointError: names the tensor of the checkpoint.
    """
    if bool((scale == _E8M0_NAN).any()):
        parent, _, leaf = spellings(name)[-1].rpartition(".")
        part = "gate_up_proj" if leaf.startswith("w13") else "down_proj"
        raise CheckpointError(
            f"'{parent}.{part}_scales' holds {_E8M0_NAN}, the NaN of e8m0; expected finite block "
            f"scales"
        )


def check_unquantised(layer: Any, prefix: str) -> None:
    """Refuse a linear layer's 16-bit weight with NaN or Inf, or without one of its parts.

    Raises:
        CheckpointError: names the tensor of the checkpoint.
    """
    check_finite(f"{prefix}.weight", layer.weight.data, layer.logical_widths)


def check_bias(layer: Any, prefix: str) -> None:
    """Refuse a linear layer's bias, if it has one, with NaN or Inf, or without one of its parts.

    Raises:
        CheckpointError: names the tensor of the checkpoint.
    """
    bias = layer._parameters.get("bias")
    if bias is not None:
        check_finite(f"{prefix}.bias", bias.data, layer.logical_widths)
