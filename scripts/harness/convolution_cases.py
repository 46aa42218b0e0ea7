# SPDX-License-Identifier: MIT
"""3x3 convolutions of ResNet-50 for bench_operators: alone against cuDNN, fused against three."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from oss_fused.bench.accuracy import check_accuracy
from oss_fused.bench.operators import RESNET
from oss_fused.bench.problems import ConvolutionInput
from oss_fused.bench.timing import copies_for, time_graphs
from oss_fused.convolution import conv2d, conv2d_bias_relu

_REPLAYS = 15


def _three_kernels(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.relu(F.conv2d(x, w, padding=1) + bias[:, None, None])


def convolution_rows() -> Iterator[dict[str, Any]]:
    """Convolution alone and with bias and ReLU, in both layouts."""
    torch.backends.cudnn.benchmark = True
    for shape in RESNET:
        for last in (True, False):
            problem = ConvolutionInput(*shape, channels_last=last)
            made = problem.make("cuda")
            x, w, bias = made["x"], made["w"], made["bias"]
            sets = [x, *(x.clone() for _ in range(copies_for(problem.num_bytes) - 1))]
            functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
                "oss_fused": functools.partial(conv2d, w=w, padding=1),
                "cudnn": functools.partial(F.conv2d, weight=w, padding=1),
                "oss_fused bias relu": functools.partial(
                    conv2d_bias_relu, w=w, bias=bias, padding=1
                ),
                "cudnn, bias, relu": functools.partial(_three_kernels, w=w, bias=bias),
            }
            plain = F.conv2d(x.float(), w.float(), padding=1)
            wanted = (plain, plain, *[torch.relu(plain + bias.float()[:, None, None])] * 2)
            checked = [check_accuracy(f(x), y) for f, y in zip(functions.values(), wanted)]
            calls = {n: [functools.partial(f, one) for one in sets] for n, f in functions.items()}
            times = {n: t.median for n, t in time_graphs(calls, _REPLAYS).items()}
            for (name, us), verdict in zip(times.items(), checked):
                baseline = times["cudnn" if name in ("oss_fused", "cudnn") else "cudnn, bias, relu"]
                yield {
                    "operation": "convolution",
                    "implementation": name,
                    "problem": problem.label(),
                    "us": us,
                    "tflops": problem.flops / us * 1e-6,
                    "value": f"{problem.flops / us * 1e-6:7.1f} TFLOPS",
                    "speedup": baseline / us,
                    "saved": problem.saved,
                    "expanded_bytes": problem.expanded_bytes,
                    "input_bytes": x.numel() * x.element_size(),
                    "error": "" if verdict.passed else verdict.reason,
                }


def figures(rows: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Named figures of summary.json, the smallest of both layouts."""
    ours = [r for r in rows if r["operation"] == "convolution" and not r["error"]]
    plain = [r["speedup"] for r in ours if r["implementation"] == "oss_fused"]
    if not plain:
        return {}
    return {
        "operators.conv.vs_cudnn_min": min(plain),
        "operators.conv.fused_bytes_saved": min(r["saved"] for r in ours),
    }
