# SPDX-License-Identifier: MIT
"""Roofline analysis: measured ceilings, a kernel's place under them, its bottleneck and remedies.

Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", 2009.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

import torch

from oss_fused.bench.statistics import summarize
from oss_fused.bench.timing import copy_bandwidth, time_calls, warm_up
from oss_fused.errors import SchemeError

# a kernel this short is ruled by its launch, whatever it does
LAUNCH_BOUND_MS = 0.005
# below this share of its roof a kernel is held up by neither memory nor arithmetic
LATENCY_BOUND_SHARE = 0.3


class Bottleneck(Enum):
    """What limits a kernel."""

    MEMORY = "memory bandwidth"
    COMPUTE = "arithmetic"
    LATENCY = "latency"
    LAUNCH = "launch overhead"


# two remedies each, and the measurement that shows whether one worked
REMEDIES: dict[Bottleneck, tuple[str, str]] = {
    Bottleneck.MEMORY: (
        (
            "move fewer bytes: fuse the neighbouring element-wise kernel, or store in FP8; "
            "verify by bytes per call and by time"
        ),
        "reuse what was read: larger tiles, grouped tile order; verify by the L2 hit rate",
    ),
    Bottleneck.COMPUTE: (
        "use a faster instruction: FP8 instead of bf16 tensor cores; verify by FLOP/s and error",
        "keep tensor cores fed: larger tiles, more stages; verify by the tuner's trial table",
    ),
    Bottleneck.LATENCY: (
        "more work in flight: split K, smaller tiles, more warps; verify by programs per SM",
        "prefetch: more pipeline stages; verify by the time at num_stages + 1",
    ),
    Bottleneck.LAUNCH: (
        "launch less: fuse with the neighbouring kernel; verify by the kernel count of a step",
        "launch cheaper: CUDA graph; verify by host overhead per call",
    ),
}


@dataclass(frozen=True)
class Ceilings:
    """Measured roofs of a device: copy bandwidth and matrix FLOP/s by dtype name."""

    device: str
    bandwidth_gbps: float
    tflops: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The fields as a JSON-ready dict."""
        return asdict(self)


@dataclass(frozen=True)
class RooflinePoint:
    """A measured kernel under its roof; intensity in FLOP per byte."""

    name: str
    intensity: float
    tflops: float
    bandwidth_gbps: float
    roof_tflops: float
    share_of_roof: float
    bottleneck: Bottleneck
    remedies: tuple[str, str]


def measure_ceilings(device: str | torch.device, dtypes: tuple[torch.dtype, ...]) -> Ceilings:
    """Copy bandwidth of a large buffer, and the best of square matrix products per dtype."""
    device = torch.device(device)
    gpu = device.type == "cuda"
    if gpu:
        with torch.cuda.device(device):
            bandwidth = copy_bandwidth() / 1e9
    else:
        source = torch.ones(2**22)
        target = torch.empty_like(source)
        ms = _best_ms(lambda: target.copy_(source), device)
        bandwidth = 2 * source.numel() * 4 / (ms * 1e-3) / 1e9
    tflops = {}
    for dtype in dtypes:
        size = 8192 if gpu else 512
        product = _product(size, dtype, device)
        if product is not None:
            ms = _best_ms(product, device)
            tflops[str(dtype).removeprefix("torch.")] = 2 * size**3 / (ms * 1e-3) / 1e12
    name = torch.cuda.get_device_name(device) if gpu else "cpu"
    return Ceilings(name, bandwidth, tflops)


def _product(size: int, dtype: torch.dtype, device: torch.device) -> Any:
    a = torch.randn(size, size, device=device)
    if dtype != torch.float8_e4m3fn:
        a = a.to(dtype)
        return lambda: a @ a
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        return None
    codes, one = a.to(dtype), torch.ones(1, device=device)
    return lambda: torch._scaled_mm(codes, codes.t(), one, one, out_dtype=torch.bfloat16)


def _best_ms(fn: Any, device: torch.device) -> float:
    warm_up(fn, 3, device)
    return summarize(time_calls(fn, 20, device)).minimum


def analyse(
    name: str, latency_ms: float, flops: int, num_bytes: int, dtype: str, ceilings: Ceilings
) -> RooflinePoint:
    """Place a measured kernel under ``ceilings`` and say what limits it.

    Args:
        name: label.
        latency_ms: measured time.
        flops: operations of one call.
        num_bytes: bytes that an ideal kernel moves.
        dtype: operand dtype; where the ceilings lack it the highest known roof counts.
        ceilings: measured roofs.

    Raises:
        SchemeError: a figure that is not positive, or ceilings without any FLOP/s.
    """
    for label, value in (
        ("latency_ms", latency_ms),
        ("flops", flops),
        ("num_bytes", num_bytes),
        ("ceilings.tflops", len(ceilings.tflops)),
    ):
        if not value > 0:
            raise SchemeError(f"{label}={value}: expected a positive number")
    seconds = latency_ms / 1e3
    intensity = flops / num_bytes
    peak = ceilings.tflops.get(dtype, max(ceilings.tflops.values()))
    slope = intensity * ceilings.bandwidth_gbps / 1e3
    roof = min(peak, slope)
    achieved = flops / seconds / 1e12
    share = achieved / roof
    if share < LATENCY_BOUND_SHARE:
        kind = Bottleneck.LAUNCH if latency_ms < LAUNCH_BOUND_MS else Bottleneck.LATENCY
    else:
        kind = Bottleneck.MEMORY if slope < peak else Bottleneck.COMPUTE
    return RooflinePoint(
        name,
        intensity,
        achieved,
        num_bytes / seconds / 1e9,
        roof,
        share,
        kind,
        REMEDIES[kind],
    )
