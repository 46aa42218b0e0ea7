# SPDX-License-Identifier: MIT
"""Checks of a machine before it serves: versions, device, operators, tile tables, memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from oss_fused import environment, envs
from oss_fused.kernels import op as registry
from oss_fused.kernels import tiles
from oss_fused.kernels.levels import BF16_ROWS

GIB = 2**30
# FP8 tensor cores: Ada (8.9) and later
_MIN_CAPABILITY = (8, 9)
# estimates: CUDA context, activations of one step, captured graphs; on a CPU torch and vLLM
_GPU_OVERHEAD_GIB = 4.0
_CPU_OVERHEAD_GIB = 1.5
OK, WARN, FAIL, SKIP = "ok", "warn", "fail", "skip"


@dataclass(frozen=True)
class Check:
    """Outcome of one check: status is ok, warn, fail or skip; remedy says what to do."""

    name: str
    status: str
    detail: str
    remedy: str = ""


def guarded(name: str, check: Callable[[], Check], remedy: str = "") -> Check:
    """Run ``check``; an exception of any kind becomes a failed check with its text."""
    try:
        return check()
    except Exception as error:
        text = str(error) or type(error).__name__
        return Check(name, FAIL, text, remedy)


def check_versions() -> Check:
    """Python and the packages that serving needs."""
    found = {name: environment.version(name) for name in environment.PACKAGES}
    text = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    python = f"python {sys.version.split()[0]}"
    missing = [name for name, version in found.items() if version is None and name != "triton"]
    if missing:
        return Check("versions", FAIL, f"missing: {', '.join(missing)}", "run `make setup`")
    return Check("versions", OK, f"{python}, {text}")


def check_settings() -> Check:
    """The OSS_FUSED_ variables exist and have values that exist."""
    values, moved = envs.snapshot(), envs.moved()
    if moved:
        return Check("settings", WARN, moved, "docs/serving.md lists options and their values")
    unknown = sorted(
        name for name in os.environ if name.startswith("OSS_FUSED_") and name not in values
    )
    if unknown:
        return Check(
            "settings", WARN, f"unknown: {', '.join(unknown)}", f"known: {', '.join(values)}"
        )
    changed = {k: v for k, v in values.items() if v != envs.VARIABLES[k].default}
    text = ", ".join(f"{k}={v}" for k, v in changed.items())
    return Check("settings", OK, text or "defaults")


def check_device(expect: str) -> Check:
    """The device that will serve: "cuda", "cpu", or "auto" for what is here."""
    if not torch.cuda.is_available():
        if expect == "cuda" or environment.has_gpu():
            gpus = environment.gpus()
            here = f"driver {gpus[0]['driver_version']} is installed, but " if gpus else ""
            return Check(
                "device",
                FAIL,
                f"{here}torch {torch.__version__} finds no GPU",
                "install vLLM's CUDA build and a driver for its CUDA version; in a container "
                "pass --gpus all",
            )
        return Check("device", OK, f"CPU: {environment.cpu_model()}, {os.cpu_count()} cores")
    names = []
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        names.append(f"{torch.cuda.get_device_name(index)} (sm_{capability[0]}{capability[1]})")
        if capability < _MIN_CAPABILITY:
            return Check("device", FAIL, names[-1], "oss_fp8 needs compute capability 8.9 or later")
    driver = environment.gpus()[0]["driver_version"] if environment.gpus() else "unknown"
    cuda = torch.version.cuda
    return Check("device", OK, f"{', '.join(names)}; driver {driver}, CUDA {cuda}")


def check_operators() -> Check:
    """Every kernel of the default backend imports, and FP8 arithmetic agrees with float32."""
    import oss_fused.kernels  # noqa: F401  registers torch.ops.oss_fused

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backend = registry.default_backend(device)
    names = registry.operations(backend)
    for name in names:
        registry.get_kernel(backend, name)
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(size, generator=generator).to(device, torch.bfloat16)
        for size in ((4, 256), (64, 256))
    )
    codes, scale = torch.ops.oss_fused.quantize_fp8(weight, None, "channel")
    exact = x.float() @ weight.float().t()
    errors = []
    # one level of codes, and both as few rows are served
    for rows in (0, BF16_ROWS):
        out = torch.ops.oss_fused.fp8_linear(x, codes, scale, None, None, False, rows)
        errors.append(((out.float() - exact).norm() / exact.norm()).item())
        if not errors[-1] < 0.06:
            problem = f"fp8_linear with bf16_rows={rows} is off by {errors[-1]:.3f}"
            return Check("operators", FAIL, f"{problem} (expected < 0.06)")
    shown = " and ".join(f"{error:.3f}" for error in errors)
    return Check("operators", OK, f"{len(names)} on {backend}; fp8_linear error {shown}")


def check_tiles() -> Check:
    """Whether this device has tuned tiles, or chooses them by rule."""
    if not torch.cuda.is_available():
        return Check("tiles", SKIP, "a CPU has none")
    name = torch.cuda.get_device_name()
    table = tiles.load_table(name)
    if not table:
        return Check(
            "tiles",
            WARN,
            f"no table for {name}: tiles follow a rule measured on an H200",
            "scripts/tune.py measures this device",
        )
    return Check("tiles", OK, f"{name}: {sum(map(len, table.values()))} measured shapes")


def free_gib(utilization: float) -> float:
    """Memory that a server may take: of the first GPU, or of the machine."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info(0)
        return min(free, total * utilization) / GIB
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024 / GIB
    return environment.memory_gib()


def needed_gib(
    weights: float, config: dict[str, Any], max_model_len: int, ranks: int, stages: int = 1
) -> dict[str, float]:
    """Memory of one rank in GiB, by part.

    Args:
        weights: GiB of the whole model as served.
        config: of the model.
        max_model_len: tokens of the longest request; the KV cache must hold one of them.
        ranks: tensor parallel size.
        stages: pipeline parallel size; embedding and head are shared out like layers.
    """
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = max(1, -(-(config.get("num_key_value_heads") or heads) // ranks))
    layers = -(-config["num_hidden_layers"] // stages)
    # key and value, two bytes each
    kv = layers * kv_heads * head_dim * 2 * 2 * max_model_len
    gpu = torch.cuda.is_available()
    return {
        "weights": weights * layers / config["num_hidden_layers"] / ranks,
        "kv_cache": kv / GIB,
        "overhead": _GPU_OVERHEAD_GIB if gpu else _CPU_OVERHEAD_GIB,
    }


def check_memory(needed: dict[str, float], utilization: float) -> Check:
    """Compare ``needed_gib`` with what is free."""
    total, free = sum(needed.values()), free_gib(utilization)
    parts = " + ".join(f"{name} {value:.2f}" for name, value in needed.items())
    text = f"{total:.2f} GiB a GPU ({parts}), {free:.2f} GiB free"
    if not torch.cuda.is_available():
        text = text.replace(" a GPU", "")
    if total > free:
        return Check(
            "memory", FAIL, text, "a shorter --max-model-len, more GPUs, or a quantised checkpoint"
        )
    return Check("memory", OK, text)
