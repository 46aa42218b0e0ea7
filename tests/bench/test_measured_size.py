# SPDX-License-Identifier: MIT
"""Rows of the suite at their measured size: values, memory, and problems that do not fit."""

from __future__ import annotations

import weakref

import pytest
import torch

from oss_fused.bench.memory import with_memory
from oss_fused.bench.problems import AttentionInput, ConvolutionInput, SoftmaxInput
from oss_fused.bench.roofline import Ceilings
from oss_fused.bench.runner import halved
from oss_fused.bench.suite import BenchmarkSuite
from oss_fused.specs import FP8GEMMInput, GatedMLPInput, RMSNormRoPEInput

CEILINGS = Ceilings("test", 10.0, {"bfloat16": 0.1, "float32": 0.1})


def suite_with_memory_for(rows, monkeypatch):
    """A suite on which ``_time`` takes so many rows of a product, and what it was asked for."""
    emptied, asked = [], []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    suite = BenchmarkSuite(1, 20, device="cpu", ceilings=CEILINGS, backends=())

    def time(function, problem):
        asked.append(problem.shape)
        if problem.m * problem.n > rows[function]:
            raise torch.OutOfMemoryError("2 GiB")
        return BenchmarkSuite._time(suite, function, problem)

    monkeypatch.setattr(suite, "_time", time)
    return suite, asked, emptied


def product(a, b):
    return a @ b


def needs_more(a, b):
    return a @ b


def test_what_has_no_memory_is_measured_smaller(monkeypatch):
    suite, asked, emptied = suite_with_memory_for({product: 9**9, needs_more: 500}, monkeypatch)
    problem = FP8GEMMInput(32, 48, 64)
    first, second = suite.benchmark("gemm", [problem], {"a": product, "b": needs_more})
    assert (first.status, first.problem, first.message) == ("ok", "32x48x64", "")
    assert (second.status, second.problem) == ("ok", "8x48x64")
    assert second.message == "out of memory at 32x48x64" and second.speedup is None
    assert second.tflops == pytest.approx(2 * 8 * 48 * 64 / second.latency_ms / 1e9)
    assert asked[1:] == [(32, 48, 64), (16, 48, 64), (8, 48, 64)] and emptied == [1, 1]


def test_a_row_without_any_memory_fails_alone(monkeypatch):
    suite, asked, emptied = suite_with_memory_for({product: 0, needs_more: 9**9}, monkeypatch)
    problem = FP8GEMMInput(2, 3, 64)
    first, second = suite.benchmark("gemm", [problem], {"a": product, "b": needs_more})
    assert (first.status, second.status) == ("failed", "ok")
    assert first.message == "OutOfMemoryError: 2 GiB"
    assert [shape[:2] for shape in asked] == [(2, 3), (1, 3), (1, 1), (1, 1), (2, 3)]
    assert len(emptied) == 3


def test_memory_of_a_failed_call_is_released_before_the_next(monkeypatch):
    made, alive = [], []

    def measure(rows):
        x = torch.zeros(rows)
        made.append(weakref.ref(x))
        raise torch.OutOfMemoryError("2 GiB")

    monkeypatch.setattr(
        torch.cuda, "empty_cache", lambda: alive.append([one() is not None for one in made])
    )
    with pytest.raises(torch.OutOfMemoryError):
        with_memory(measure, 16, lambda rows: rows // 2)
    assert alive == [[False], [False] * 2, [False] * 3] and len(made) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda y: y[-1].mul_(3.0), "relative_l2"),
        (lambda y: y[-1].fill_(float("nan")), "48 elements are NaN or Inf"),
        (lambda y: y.resize_(600, 47), "shape"),
    ],
)
def test_what_is_wrong_at_the_measured_size_only_gets_no_time(change, message):
    """The oracle looks at 15 rows; a kernel may go wrong at more."""

    def breaks(a, b):
        y = a @ b
        if len(a) > 100:
            change(y)
        return y

    suite = BenchmarkSuite(1, 20, device="cpu", ceilings=CEILINGS, backends=())
    problem = FP8GEMMInput(600, 48, 64)
    if message == "relative_l2":
        problem = FP8GEMMInput(120, 48, 64)
    first, second, third = suite.benchmark(
        "gemm", [problem], {"a": product, "b": breaks, "c": needs_more}
    )
    assert (first.status, second.status, third.status) == ("ok", "wrong", "ok")
    assert second.latency_ms is None and message in second.message


@pytest.mark.parametrize(
    ("problem", "shape"),
    [
        (RMSNormRoPEInput(3, 5, 64, 16), (1, 5, 64, 16)),
        (RMSNormRoPEInput(1, 5, 64, 16), (1, 2, 64, 16)),
        (GatedMLPInput(2, 5, 64, 96), (5, 64, 96)),
        (SoftmaxInput(9, 70), (4, 70)),
        (ConvolutionInput(1, 8, 8, 14), (1, 8, 8, 7, 3)),
        (AttentionInput(1, 2, 64, 16), (1, 1, 64, 16)),
        (AttentionInput(1, 1, 64, 16), (1, 1, 32, 16)),
    ],
)
def test_half_of_a_problem(problem, shape):
    assert halved(problem).shape == shape and halved(problem).dtype == problem.dtype
    assert halved(FP8GEMMInput(1, 1, 64)) is None


@pytest.mark.gpu
def test_a_call_beyond_the_memory_is_measured_smaller():
    def wasteful(a, b):
        # 2 GiB for a row
        torch.empty(a.shape[0] << 31, dtype=torch.uint8, device=a.device)
        return a @ b

    suite = BenchmarkSuite(1, 20, compile_baseline=False, backends=(), graphs=False)
    rows = torch.cuda.get_device_properties(0).total_memory >> 30
    (row,) = suite.benchmark("gemm", [FP8GEMMInput(rows, 64, 64)], {"wasteful": wasteful})
    assert row.status == "ok" and row.message == f"out of memory at {rows}x64x64"
    assert int(row.problem.split("x")[0]) < rows / 2 + 1
