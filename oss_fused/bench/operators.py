# SPDX-License-Identifier: MIT
"""BenchmarkSuite's methods for the operators of bench/problems.py, and what they compare."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F

from oss_fused.attention import flash_attention
from oss_fused.bench.problems import (
    AttentionInput,
    ConvolutionInput,
    LayerNormInput,
    OperatorProblem,
    SoftmaxInput,
)
from oss_fused.bench.runner import Implementation
from oss_fused.convolution import conv2d_bias_relu
from oss_fused.normalization import layer_norm, softmax

if TYPE_CHECKING:
    from oss_fused.bench.suite import BenchmarkRow

# 3x3 convolutions of ResNet-50: images, channels in and out, size
RESNET = ((32, 64, 64, 56), (32, 128, 128, 28), (32, 256, 256, 14), (32, 512, 512, 7))
ATTENTION = tuple((16384 // length, 32, length, 64) for length in (512, 1024, 2048, 4096, 16384))
SQUARES = tuple((size, size) for size in (1024, 2048, 4096, 8192))


def _eager_softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def _eager_layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)


def _eager_convolution(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    # three kernels: what fusing is compared with
    y = F.conv2d(x, w, padding=w.shape[-1] // 2)
    return torch.relu(y + bias[:, None, None])


def _convolution(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return conv2d_bias_relu(x, w, bias, padding=w.shape[-1] // 2)


def _eager_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


class OperatorBenchmarks:
    """Mixed into BenchmarkSuite; the first implementation is what speed-ups refer to."""

    dtype: torch.dtype

    def benchmark(
        self,
        operation: str,
        problems: Sequence[OperatorProblem],
        implementations: Mapping[str, Implementation],
    ) -> list[BenchmarkRow]:
        """BenchmarkSuite's."""
        raise NotImplementedError

    def benchmark_softmax(self, shapes: Sequence[tuple[int, int]] = SQUARES) -> list[BenchmarkRow]:
        """Both methods of ``softmax`` over x [rows, columns] against PyTorch's."""
        found: dict[str, Implementation] = {
            "pytorch": _eager_softmax,
            "oss_fused": softmax,
            "oss_fused online": functools.partial(softmax, method="online"),
        }
        return self.benchmark("softmax", [SoftmaxInput(*s, self.dtype) for s in shapes], found)

    def benchmark_layer_norm(
        self, shapes: Sequence[tuple[int, int]] = SQUARES
    ) -> list[BenchmarkRow]:
        """Both methods of ``layer_norm`` over x [rows, columns] against PyTorch's."""
        found: dict[str, Implementation] = {
            "pytorch": _eager_layer_norm,
            "oss_fused": layer_norm,
            "oss_fused welford": functools.partial(layer_norm, method="welford"),
        }
        return self.benchmark("layer_norm", [LayerNormInput(*s, self.dtype) for s in shapes], found)

    def benchmark_convolution(
        self, shapes: Sequence[tuple[int, int, int, int]] = RESNET
    ) -> list[BenchmarkRow]:
        """``conv2d_bias_relu`` in both layouts against cuDNN, bias and ReLU as three kernels.

        Args:
            shapes: images, channels in and out, height and width.
        """
        found: dict[str, Implementation] = {
            "pytorch": _eager_convolution,
            "oss_fused": _convolution,
        }
        problems = [
            ConvolutionInput(*shape, dtype=self.dtype, channels_last=last)
            for shape in shapes
            for last in (True, False)
        ]
        return self.benchmark("convolution", problems, found)

    def benchmark_flash_attention(
        self,
        shapes: Sequence[tuple[int, int, int, int]] = ATTENTION,
        causal: Sequence[bool] = (False, True),
    ) -> list[BenchmarkRow]:
        """``flash_attention`` against PyTorch's.

        Args:
            shapes: batch, heads, length, head size.
            causal: which of both to measure.
        """
        found: dict[str, Implementation] = {
            "pytorch": _eager_attention,
            "oss_fused": cast(Implementation, flash_attention),
        }
        problems = [AttentionInput(*s, causal=c, dtype=self.dtype) for s in shapes for c in causal]
        return self.benchmark("flash_attention", problems, found)
