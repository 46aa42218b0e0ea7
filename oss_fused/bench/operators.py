# SPDX-License-Identifier: MIT
"""BenchmarkSuite's methods for the operators of bench/problems.py, and what they compare."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from oss_fused.bench.problems import LayerNormInput, OperatorProblem, SoftmaxInput
from oss_fused.bench.runner import Implementation
from oss_fused.normalization import layer_norm, softmax

if TYPE_CHECKING:
    from oss_fused.bench.suite import BenchmarkRow

SQUARES = tuple((size, size) for size in (1024, 2048, 4096, 8192))


def _eager_softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def _eager_layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)


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
