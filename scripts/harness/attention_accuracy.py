# SPDX-License-Identifier: MIT
"""How far attention is from float32: plain, with a window, with dropout, with V in FP8."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from oss_fused.attention import flash_attention
from oss_fused.errors import SchemeError
from oss_fused.kernels.op import get_kernel
from oss_fused.quant.attention_fp8 import AttentionFP8
from oss_fused.quant.scalers import AveragingScaler, GroupScaler

BINS = 50
# the smallest difference that the histogram resolves, as a share of the largest
_SMALLEST_BIN = 1e-6
_CALIBRATION_STEPS = 4
_SEED = 1

# called with unpacked arguments
_attention: Callable[..., Any] = flash_attention


@dataclass(frozen=True)
class Problem:
    """Sizes and options of the evaluation; ``window_left`` of the curve that has a window."""

    B: int
    H: int
    N: int
    D: int
    window_left: int
    dropout: float
    dtype: torch.dtype = torch.bfloat16

    def tensors(
        self, step: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v of a step."""
        generator = torch.Generator().manual_seed(step)
        shape = (self.B, self.H, self.N, self.D)
        made = [torch.randn(shape, generator=generator) for _ in "qkv"]
        q, k, v = (t.to(self.dtype).to(device) for t in made)
        return q, k, v


def choose_group(clip_ratios: dict[int, float], target: float) -> int:
    """The smallest group whose clip ratio meets ``target``, else the largest."""
    within = [size for size in sorted(clip_ratios) if clip_ratios[size] <= target]
    return within[0] if within else max(clip_ratios)


def difference(actual: torch.Tensor, exact: torch.Tensor, clip_ratio: float) -> dict[str, Any]:
    """One curve: largest and mean differences, quantiles, histogram, distance from Laplace's."""
    exact = exact.double()
    absolute = (actual.double() - exact).abs().flatten()
    relative = absolute / exact.abs().flatten().clamp(min=1e-6)
    top = max(float(absolute.max()), 1e-30)
    edges = torch.logspace(
        math.log10(top * _SMALLEST_BIN), math.log10(top), BINS + 1, dtype=torch.float64
    )
    clamped = absolute.cpu().clamp(min=float(edges[0]), max=float(edges[-1]))
    counts = torch.histogram(clamped, edges).hist
    quantiles = torch.quantile(
        absolute[:: max(1, absolute.numel() // 2**22)],
        torch.tensor([0.5, 0.9, 0.99], dtype=torch.float64, device=absolute.device),
    ).tolist()
    return {
        "max_abs": float(absolute.max()),
        "mean_abs": float(absolute.mean()),
        "max_rel": float(relative.max()),
        "mean_rel": float(relative.mean()),
        **dict(zip(("p50_abs", "p90_abs", "p99_abs"), quantiles)),
        "abs_diff_hist_counts": [int(count) for count in counts],
        "abs_diff_hist_edges": edges.tolist(),
        "kl_vs_laplace_like": laplace_divergence(counts, edges, float(absolute.mean())),
        "clip_ratio": clip_ratio,
    }


def laplace_divergence(counts: torch.Tensor, edges: torch.Tensor, mean: float) -> float:
    """KL divergence of a histogram of |x| from a Laplace variable's of the same mean."""
    if mean == 0:
        return 0.0
    # of |x| the distribution is exponential; what lies below the first edge counts to its bin
    below = 1 - torch.exp(-edges / mean)
    expected = below[1:] - below[:-1]
    expected[0] = below[1]
    expected = expected / expected.sum()
    share = counts / counts.sum()
    seen = share > 0
    return float((share[seen] * (share[seen] / expected[seen].clamp(min=1e-300)).log()).sum())


def _exact(problem: Problem, tensors: Sequence[torch.Tensor], **options: Any) -> torch.Tensor:
    """The twin in float32."""
    values = {"window_left": -1, "dropout_p": 0.0, **options}
    result = get_kernel("torch", "flash_attention")(
        *(t.float() for t in tensors),
        *[None] * 7,
        problem.D**-0.5,
        False,
        values["window_left"],
        -1,
        values["dropout_p"],
        _SEED,
    )
    return result[0]


def _calibrated(problem: Problem, device: torch.device, mode: str, **options: Any) -> AttentionFP8:
    fp8 = AttentionFP8(mode, **options)
    for step in range(_CALIBRATION_STEPS):
        fp8.quantize(*problem.tensors(step, device))
    return fp8


def _fp8_curve(
    problem: Problem, fp8: AttentionFP8, tensors: Sequence[torch.Tensor], exact: torch.Tensor
) -> dict[str, Any]:
    # what the scale learnt so far clips of values that it has not seen
    clip_ratio = fp8.scalers["v"].clip_ratio(tensors[2])
    return difference(_attention(*tensors, fp8=fp8), exact, clip_ratio)


def _moments(name: str, values: torch.Tensor) -> dict[str, float]:
    return {f"{name}_mean": float(values.mean()), f"{name}_max": float(values.max())}


def evaluate(
    problem: Problem,
    device: torch.device,
    fp8: bool,
    clip_target: float,
    candidates: Sequence[int],
) -> dict[str, Any]:
    """The curves, and what the FP8 scales are.

    Raises:
        SchemeError: no candidate divides D.
    """
    tensors = problem.tensors(_CALIBRATION_STEPS, device)
    exact = _exact(problem, tensors)
    window: dict[str, Any] = {"window_left": problem.window_left}
    dropout: dict[str, Any] = {"dropout_p": problem.dropout}
    curves = {
        "baseline": difference(_attention(*tensors), exact, 0.0),
        "window": difference(
            _attention(*tensors, **window), _exact(problem, tensors, **window), 0.0
        ),
        "dropout": difference(
            _attention(*tensors, **dropout, seed=_SEED),
            _exact(problem, tensors, **dropout),
            0.0,
        ),
    }
    results: dict[str, Any] = {"curves": curves}
    if not fp8:
        return results
    per_channel = _calibrated(problem, device, "channel")
    curves["fp8_per_channel"] = _fp8_curve(problem, per_channel, tensors, exact)
    scaler = per_channel.scalers["v"]
    seen = scaler.amax
    assert seen is not None  # it was calibrated
    results["per_channel"] = _moments("amax", seen) | _moments("scale", scaler.scale())
    found = {
        size: _calibrated(problem, device, "group", group_size=size)
        for size in sorted(candidates)
        if problem.D % size == 0
    }
    if not found:
        raise SchemeError(
            f"--group-candidates={','.join(map(str, candidates))}: expected a divisor of "
            f"D={problem.D}"
        )
    clips = {size: one.scalers["v"].clip_ratio(tensors[2]) for size, one in found.items()}
    size = choose_group(clips, clip_target)
    curves["fp8_group"] = _fp8_curve(problem, found[size], tensors, exact)
    group_scaler: AveragingScaler = found[size].scalers["v"]
    assert isinstance(group_scaler, GroupScaler)
    results["per_group"] = {
        **_moments("scale", group_scaler.scale()),
        "group_size": size,
        "candidates": {str(one): {"clip_ratio": clip} for one, clip in clips.items()},
        "target_clip": clip_target,
    }
    return results


def plot(curves: dict[str, dict[str, Any]]) -> bytes:
    """PNG: a log-log histogram of each curve, its distribution function dashed on a second axis."""
    import io

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    shares = axes.twinx()
    for name, curve in curves.items():
        edges, counts = curve["abs_diff_hist_edges"], curve["abs_diff_hist_counts"]
        line = axes.step(edges[1:], counts, where="pre", label=name)[0]
        total, below = sum(counts), 0
        distribution = []
        for count in counts:
            below += count
            distribution.append(below / total)
        shares.plot(edges[1:], distribution, linestyle="--", color=line.get_color())
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("absolute difference from float32")
    axes.set_ylabel("values in a bin")
    shares.set_ylabel("share of values below (dashed)")
    shares.set_ylim(0, 1.02)
    axes.legend(fontsize=8)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()
