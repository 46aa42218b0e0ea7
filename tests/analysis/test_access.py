# SPDX-License-Identifier: MIT
"""Memory access: classes, cache lines, suggestions, real strides, and what orders are predicted."""

from __future__ import annotations

import pytest
import torch

from oss_fused.analysis.access import MemoryAccessAnalyzer, tensor_offsets
from oss_fused.errors import SchemeError, ShapeMismatchError

RANDOM = torch.randint(0, 2**20, (4096,), generator=torch.Generator().manual_seed(0))
LINE = MemoryAccessAnalyzer(element_bytes=4, line_bytes=128)


@pytest.mark.parametrize(
    ("indices", "kind", "stride", "utilization", "efficiency"),
    [
        (torch.arange(4096), "sequential", 1.0, 1.0, 1.0),
        (torch.arange(4096).flip(0), "sequential", 1.0, 1.0, 1.0),
        (torch.arange(0, 8192, 2), "strided", 2.0, 0.5, 0.5),
        (torch.arange(0, 2**15, 8), "strided", 8.0, 1 / 8, 1 / 8),
        (torch.arange(0, 2**17, 32), "strided", 32.0, 1 / 32, 0.1),
        (torch.zeros(4096, dtype=torch.int64), "broadcast", 0.0, 1.0, 0.95),
        ([5], "sequential", 0.0, 1 / 32, 1.0),
    ],
)
def test_patterns(indices, kind, stride, utilization, efficiency):
    found = LINE.analyze_pattern((2**20,), indices)
    assert list(found) == [
        "pattern_type",
        "average_stride",
        "cache_utilization",
        "bandwidth_efficiency",
    ]
    assert found["pattern_type"] == kind
    assert found["average_stride"] == pytest.approx(stride)
    assert found["cache_utilization"] == pytest.approx(utilization)
    assert found["bandwidth_efficiency"] == pytest.approx(efficiency)


def test_random_accesses_use_one_element_a_line():
    found = LINE.analyze_pattern((2**20,), RANDOM)
    assert (found["pattern_type"], found["bandwidth_efficiency"]) == ("random", 0.1)
    assert found["cache_utilization"] == pytest.approx(1 / 32, rel=0.02)


def test_the_size_of_an_element_counts():
    every_second = torch.arange(0, 8192, 2)
    wide = MemoryAccessAnalyzer(element_bytes=128).analyze_pattern((8192,), every_second)
    assert wide["cache_utilization"] == 1.0, "an element fills its line"
    narrow = MemoryAccessAnalyzer(element_bytes=1).analyze_pattern((8192,), torch.arange(8192))
    assert narrow["cache_utilization"] == 1.0


def test_coordinates_are_offsets():
    rows, columns = torch.meshgrid(torch.arange(64), torch.arange(32), indexing="ij")
    by_column = torch.stack((rows.t().reshape(-1), columns.t().reshape(-1)), 1)
    found = LINE.analyze_pattern((64, 32), by_column)
    assert (found["pattern_type"], found["bandwidth_efficiency"]) == ("strided", 0.1)
    flat = by_column[:, 0] * 32 + by_column[:, 1]
    assert LINE.analyze_pattern((64, 32), flat) == found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
def test_strides_of_real_tensors(dtype):
    x = torch.zeros(16, 8, 32, 64, dtype=dtype)

    def kind(tensor):
        return LINE.analyze_tensor(tensor)["pattern_type"]

    assert kind(x) == kind(x[3:, 2:]) == kind(x.flatten()) == "sequential"
    assert kind(x[..., ::4]) == kind(x.to(memory_format=torch.channels_last)) == "strided"
    assert kind(x[0, 0].t()) == "strided"
    assert kind(x[:1, :1, :1, :1].expand(16, 8, 32, 64)) == "broadcast"
    assert kind(x[:1].expand(16, 8, 32, 64)) == "broadcast"
    assert LINE.analyze_tensor(x[..., ::4])["cache_utilization"] == pytest.approx(0.25)


def test_offsets_are_where_the_elements_are():
    base = torch.arange(4000)
    for view in (base.view(40, 100).t()[3:, 1::2], base[100:].view(10, 30, 13).permute(2, 0, 1)):
        offsets = tensor_offsets(view)
        assert torch.equal(base[offsets], view.flatten())
    assert torch.equal(tensor_offsets(base, 7), torch.arange(7))


def test_predicted_order():
    base = torch.zeros(32 * 2**14)
    image = torch.zeros(1, 3, 64, 64)
    costs = [
        LINE.tensor_traffic(base[:1].expand(2**14)),
        LINE.tensor_traffic(base[: 2**14]),
        LINE.tensor_traffic(base[::2][: 2**14]),
        LINE.tensor_traffic(image.to(memory_format=torch.channels_last)),
        LINE.tensor_traffic(base[::8][: 2**14]),
        LINE.tensor_traffic(base[::32][: 2**14]),
        LINE.traffic(RANDOM),
    ]
    assert costs == sorted(costs) and len(set(costs)) == len(costs)
    assert costs[0] < 0.1 and costs[1] == pytest.approx(1, rel=0.2)
    assert LINE.tensor_traffic(image) == costs[1]


def test_a_line_that_two_windows_share_counts_once():
    aligned, shifted = torch.zeros(2**14), torch.zeros(2**14 + 3)[3:]
    assert LINE.tensor_traffic(shifted) == pytest.approx(LINE.tensor_traffic(aligned), rel=0.01)


def test_suggestions():
    def suggested(indices):
        return [
            text.split(":")[0]
            for text in LINE.suggest_optimization(LINE.analyze_pattern((2**20,), indices))
        ]

    assert suggested(torch.arange(4096)) == []
    assert suggested(torch.arange(0, 8192, 2)) == ["vector loads"]
    assert suggested(torch.arange(0, 2**14, 4)) == [
        "transpose or reorder",
        "vector loads",
        "prefetch or tiling",
    ]
    assert suggested(RANDOM) == ["transpose or reorder", "prefetch or tiling"]


@pytest.mark.parametrize(
    ("shape", "indices", "error", "words"),
    [
        ((4,), [], ShapeMismatchError, r"\[n\]"),
        ((4,), [0.5], ShapeMismatchError, "float32"),
        ((4,), [4], SchemeError, "0 to 3"),
        ((4,), [-1], SchemeError, "0 to 3"),
        ((4, 4), [[0, 0, 0]], ShapeMismatchError, r"\[n, 2\]"),
        ((4, 4), [[0, 4]], SchemeError, "inside"),
    ],
)
def test_bad_accesses(shape, indices, error, words):
    with pytest.raises(error, match=words):
        LINE.analyze_pattern(shape, indices)


def test_bad_sizes_and_tensors():
    with pytest.raises(ShapeMismatchError, match="element_bytes=0"):
        MemoryAccessAnalyzer(0)
    with pytest.raises(ShapeMismatchError, match="expected elements"):
        LINE.analyze_tensor(torch.zeros(0, 3))
