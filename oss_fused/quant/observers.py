# SPDX-License-Identifier: MIT
"""Observers of a running layer: inputs of linears, and the keys and values that it caches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from oss_fused.errors import NumericalOverflowError
from oss_fused.quant.formats import E4M3, amax_to_scale, fake_quantize

_BIN_BITS = 16  # of a float32 that a bin of magnitudes leaves out
_INFINITE = 0x7F80  # bin of Inf
_CLIP_STEP = 16  # bins from one scale tried to the next: eight per binade
_CLIP_BINADES = 12  # below the largest magnitude


class AmaxObserver:
    """Largest magnitude seen, as float32 [1].

    Raises (on use):
        NumericalOverflowError: NaN or Inf was seen, or nothing was; names what is watched.
    """

    def __init__(self, what: str) -> None:
        """Watch ``what``, a name for messages."""
        self.what = what
        self.amax: torch.Tensor | None = None

    def see(self, x: torch.Tensor) -> None:
        """Take a tensor of any shape into account."""
        if x.numel():
            amax = x.detach().abs().amax().float().view(1)
            self.amax = amax if self.amax is None else torch.maximum(self.amax, amax)

    def scale(self) -> torch.Tensor:
        """The static scale [1] that maps the largest magnitude to the format's largest value."""
        if self.amax is None:
            raise NumericalOverflowError(f"{self.what}: no calibration sample reached it")
        if not self.amax.isfinite().all():
            raise NumericalOverflowError(f"{self.what}: NaN or Inf on calibration data")
        return amax_to_scale(self.amax).cpu()


class ClipObserver(AmaxObserver):
    """Counts magnitudes, to find the scale with the least squared error that clips few of them."""

    def __init__(self, what: str, clip_target: float) -> None:
        """Watch ``what``; a share of at most ``clip_target`` of its values may saturate."""
        super().__init__(what)
        self.clip_target = clip_target
        self._counts: torch.Tensor | None = None

    def see(self, x: torch.Tensor) -> None:
        """Take a tensor of any shape into account."""
        super().see(x)
        # a magnitude's upper 16 bits: 128 bins per binade
        bins = x.detach().abs().float().view(torch.int32).flatten() >> _BIN_BITS
        counts = torch.bincount(bins, minlength=1 << (31 - _BIN_BITS))
        self._counts = counts if self._counts is None else self._counts + counts

    def scale(self) -> torch.Tensor:
        """The static scale [1]."""
        plain = super().scale()
        assert self._counts is not None and self.amax is not None
        counts = self._counts.double().cpu()
        first = torch.arange(len(counts), dtype=torch.int32) << _BIN_BITS
        middles = (first + (1 << (_BIN_BITS - 1))).view(torch.float32)
        top = int(counts.nonzero().max())
        if top == 0:
            return plain
        above = counts.sum() - counts.cumsum(0)
        candidates = []
        # a larger scale only shifts the grid against the values: a binade shows every shift
        for end in range(top + 128 - _CLIP_STEP, max(top - _CLIP_BINADES * 128, 0), -_CLIP_STEP):
            if above[min(end, top)] > self.clip_target * counts.sum():
                break
            if end + 1 >= _INFINITE:
                continue
            limit = first[end + 1 : end + 2].view(torch.float32)  # of the bin's values
            rounded = fake_quantize(middles[: top + 1], "tensor", amax_to_scale(limit))
            error = ((rounded - middles[: top + 1]).double().square() * counts[: top + 1]).sum()
            candidates.append((float(error), amax_to_scale(limit)))
        return min(candidates, key=lambda candidate: candidate[0])[1]


def make_observer(what: str, clip_target: float | None) -> AmaxObserver:
    """An observer that clips nothing, or, with a target, what that allows."""
    return AmaxObserver(what) if clip_target is None else ClipObserver(what, clip_target)


class CacheObserver:
    """Stands in for a KV cache: a layer hands it the keys and values that serving would cache.

    With ``scales`` it returns them as an FP8 cache would.
    """

    def __init__(self, module: str, clip_target: float | None = None) -> None:
        """Watch the attention ``module``."""
        self.key = make_observer(f"{module}.k_scale", clip_target)
        self.value = make_observer(f"{module}.v_scale", clip_target)
        self.scales: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Observe keys and values [B, H, T, D]; return what attention reads."""
        if self.scales is None:
            self.key.see(key)
            self.value.see(value)
            return key, value
        k_scale, v_scale = (scale.to(key.device) for scale in self.scales)
        return fake_quantize(key, "tensor", k_scale), fake_quantize(value, "tensor", v_scale)

    def freeze(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Fix the scales from what was seen, and quantise from now on."""
        self.scales = (self.key.scale(), self.value.scale())
        return self.scales


class OutputError:
    """Error of a linear's output against that of the unquantised weight and input."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, input_scale: torch.Tensor | None
    ) -> None:
        """Compare against ``weight`` [N, K] and ``bias`` [N]; a static input scale may clip."""
        self.weight, self.bias, self.input_scale = weight, bias, input_scale
        self.difference = self.norm = 0.0
        self.by_token: list[torch.Tensor] = []
        self.clipped = self.values = 0

    def see(self, x: torch.Tensor, output: torch.Tensor) -> None:
        """Compare the output [..., N] for the input [..., K]."""
        baseline = nn.functional.linear(x, self.weight, self.bias).float()
        difference = (output.float() - baseline).square().sum(-1)
        norm = baseline.square().sum(-1)
        self.difference += float(difference.sum())
        self.norm += float(norm.sum())
        self.by_token.append((difference / norm.clamp_min(1e-30)).sqrt().flatten().cpu())
        self.values += x.numel()
        if self.input_scale is not None:
            limit = E4M3.max * float(self.input_scale)
            self.clipped += int((x.abs() > limit).sum())

    def metrics(self) -> dict[str, Any]:
        """Fields of a LinearRecord; zero errors if all outputs seen are zero."""
        levels = torch.tensor([0.5, 0.9, 0.99])
        p50, p90, p99 = torch.cat(self.by_token).quantile(levels).tolist()
        return {
            "output_error": (self.difference / self.norm) ** 0.5 if self.norm else 0.0,
            "error": {"p50": p50, "p90": p90, "p99": p99},
            "clip_ratio": self.clipped / self.values,
        }


def drift(baseline: Sequence[torch.Tensor], states: Sequence[torch.Tensor]) -> float:
    """RMS over tokens of ``|x' - x| / |x|`` for hidden states, each [1, T, H]."""
    shares = [
        (other - one).square().sum(-1) / one.square().sum(-1).clamp_min(1e-30)
        for one, other in zip(baseline, states)
    ]
    return float(torch.cat([share.flatten() for share in shares]).mean().sqrt())


def watch_inputs(
    modules: Mapping[str, nn.Module], see: Callable[[str, torch.Tensor], None]
) -> list[Any]:
    """Call ``see(name, input)`` before each module runs; returns the hooks' handles."""
    handles = []
    for name, module in modules.items():

        def hook(_: nn.Module, inputs: tuple[Any, ...], name: str = name) -> None:
            see(name, inputs[0])

        handles.append(module.register_forward_pre_hook(hook))
    return handles
