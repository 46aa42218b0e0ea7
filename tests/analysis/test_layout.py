# SPDX-License-Identifier: MIT
"""Layouts: shapes for vectors, choice by cost, conversions that pay; round trips bit for bit."""

from __future__ import annotations

import math

import pytest
import torch

from oss_fused.analysis.conversion import DynamicLayoutConverter, LaidOutTensor, LayoutUse
from oss_fused.analysis.layout import (
    LAYOUTS,
    WALKS,
    AdaptiveDataReorganizer,
    SIMDOptimizedLayout,
    walk,
)
from oss_fused.errors import SchemeError, ShapeMismatchError

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8]


def odd_values(shape, dtype):
    """Every bit pattern counts, NaN's too."""
    bits = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
    return bits.view(dtype).view(shape)


def same_bits(a, b):
    return a.shape == b.shape and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


@pytest.mark.parametrize(
    ("shape", "pattern", "stored", "name", "speedup"),
    [
        ((30, 24), "row_major", (30, 24), "row_padding", 1.0),
        ((2, 5, 21), "row_major", (2, 5, 24), "row_padding", 7 / 3),
        ((30, 24), "column_major", (24, 32), "transpose_and_pad", 7.5),
        ((130, 70), "blocked", (3, 2, 64, 64), "blocked", 8 * 130 * 70 / (6 * 4096)),
        ((12, 70), "blocked", (1, 6, 12, 12), "blocked", 6 * 12 * 70 / (6 * 144)),
    ],
)
def test_simd_layouts(shape, pattern, stored, name, speedup):
    layout = SIMDOptimizedLayout(8).optimize_for_simd(shape, pattern)
    assert layout == {
        "original_shape": shape,
        "optimized_shape": stored,
        "transformation": name,
        "expected_speedup": pytest.approx(speedup),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", ["row_major", "column_major", "blocked"])
def test_stored_and_restored_bit_for_bit(pattern, dtype):
    simd = SIMDOptimizedLayout()
    x = odd_values((131, 70), dtype)
    layout = simd.optimize_for_simd(x.shape, pattern)
    stored = simd.apply(x, layout)
    assert tuple(stored.shape) == layout["optimized_shape"] and stored.is_contiguous()
    assert same_bits(simd.restore(stored, layout), x)
    wrong = torch.zeros(3, 3, dtype=dtype)
    for function in (simd.apply, simd.restore):
        with pytest.raises(ShapeMismatchError, match=r"\(3, 3\)"):
            function(wrong, layout)


def test_bad_simd_arguments():
    simd = SIMDOptimizedLayout()
    with pytest.raises(SchemeError, match="pattern='diagonal'"):
        simd.optimize_for_simd((4, 4), "diagonal")
    for shape, pattern in [((4, 4, 4), "blocked"), ((4,), "column_major"), ((0, 4), "row_major")]:
        with pytest.raises(ShapeMismatchError, match="shape="):
            simd.optimize_for_simd(shape, pattern)
    with pytest.raises(ShapeMismatchError, match="vector_width=0"):
        SIMDOptimizedLayout(0)


@pytest.mark.parametrize("op", LAYOUTS)
def test_a_layout_gives_every_element_its_own_place(op):
    shape = (16, 24) if op == "matmul" else (2, 3, 32, 8)
    for order in WALKS[op].values():
        at = walk(order, shape)
        places = {tuple(int(index[i]) for index in at) for i in range(len(at[0]))}
        assert len(places) == len(at[0]) == math.prod(shape), "a walk visits each once"
        for layout in LAYOUTS[op].values():
            offsets = layout(shape, at)
            assert sorted(offsets.tolist()) == list(range(math.prod(shape)))


def test_a_walk_stays_inside_an_odd_shape():
    at = walk(WALKS["matmul"]["tile"], (13, 21))
    assert len(at[0]) == 13 * 21 and int(at[0].max()) == 12 and int(at[1].max()) == 20


@pytest.mark.parametrize(
    ("op", "shapes", "patterns", "best"),
    [
        ("matmul", [(512, 512)], ["row"], "row_major"),
        ("matmul", [(512, 512)], ["column"], "column_major"),
        ("matmul", [(512, 512)], ["tile"], "blocked_8x8"),
        ("matmul", [(512, 512)], ["panel"], "vector_packed"),
        ("attention", [(2, 4, 256, 64)], ["head"], "head_first"),
        ("attention", [(2, 4, 256, 64)], ["token"], "sequence_first"),
        ("attention", [(2, 4, 256, 64)], ["block"], "blocked_attention"),
        ("attention", [(2, 4, 256, 64)], ["sparse"], "sparse_optimized"),
    ],
)
def test_each_order_has_its_layout(op, shapes, patterns, best):
    choice = AdaptiveDataReorganizer().determine_optimal_layout(op, shapes, patterns)
    assert choice.layout == best, choice.scores
    assert choice.scores.keys() == LAYOUTS[op].keys()
    assert all(0 < score <= 1 for score in choice.scores.values())
    assert choice.scores[best] > 0.9


def test_scores_are_weighed_and_kept():
    organizer = AdaptiveDataReorganizer()
    one = organizer.determine_optimal_layout("matmul", [(64, 64)], ["row"])
    assert organizer.determine_optimal_layout("matmul", [[64, 64]], ("row",)) is one
    other = organizer.determine_optimal_layout("matmul", [(64, 64)], ["column"])
    both = organizer.determine_optimal_layout("matmul", [(64, 64)] * 2, ["row", "column"])
    for name, score in both.scores.items():
        assert score == pytest.approx((one.scores[name] + other.scores[name]) / 2)
    # column by column through rows: no line's other elements, no vector
    wide = AdaptiveDataReorganizer(8, 4)
    score = wide.determine_optimal_layout("matmul", [(4096, 4096)], ["column"]).scores["row_major"]
    assert score == pytest.approx(0.3 / 8 + 0.7 / (32 * 5))


@pytest.mark.parametrize(
    ("op", "shapes", "patterns", "words"),
    [
        ("sort", [(4, 4)], ["row"], "op='sort'"),
        ("matmul", [(4, 4)], ["head"], "patterns='head'"),
        ("matmul", [(4, 4)], ["row", "row"], "as many"),
        ("matmul", [(4, 4, 4)], ["row"], "expected 2 sizes"),
        ("attention", [(4, 4)], ["head"], "expected 4 sizes"),
    ],
)
def test_bad_reorganizer_arguments(op, shapes, patterns, words):
    with pytest.raises((SchemeError, ShapeMismatchError), match=words):
        AdaptiveDataReorganizer().determine_optimal_layout(op, shapes, patterns)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", [("column_major",), ("blocked",), ("column_major", "blocked")])
def test_conversions_there_and_back_bit_for_bit(way, dtype):
    converter = DynamicLayoutConverter()
    x, now = odd_values((19, 30), dtype), "row_major"
    made = x
    for layout in (*way, *reversed(way[:-1]), "row_major"):
        made = converter.convert_layout(made, now, layout, x.shape)
        now = layout
        if layout == "column_major":
            assert made.stride() == (1, 19)
    assert same_bits(made, x) and made.is_contiguous()


def test_sparse_and_dense_round_trip():
    converter = DynamicLayoutConverter()
    x = torch.eye(5)
    sparse = converter.convert_layout(x, "dense", "sparse")
    assert sparse.is_sparse and torch.equal(converter.convert_layout(sparse, "sparse", "dense"), x)


def test_a_missing_pair_is_named_and_can_be_registered():
    converter = DynamicLayoutConverter()
    x = torch.arange(6.0).view(2, 3)
    with pytest.raises(ValueError, match="'row_major' -> 'reversed'"):
        converter.convert_layout(x, "row_major", "reversed")
    converter.register_conversion_kernel("row_major", "reversed", lambda t: t.flip(0, 1))
    assert converter.convert_layout(x, "row_major", "reversed")[0, 0] == 5
    assert converter.convert_layout(x, "reversed", "reversed") is x


def test_costs():
    converter = DynamicLayoutConverter()
    x = torch.zeros(10, 20, dtype=torch.bfloat16)
    for pair, factor in {
        ("row_major", "column_major"): 1.5,
        ("column_major", "row_major"): 1.0,
        ("row_major", "blocked"): 2.0,
        ("sparse", "blocked"): 2.0,
        ("sparse", "dense"): 3.0,
    }.items():
        assert converter.conversion_cost(x, *pair) == 2 * 400 * factor
    assert converter.conversion_cost(x, "blocked", "blocked") == 0


def test_a_pipeline_converts_only_what_pays():
    converter = DynamicLayoutConverter()
    tensors = {"a": torch.randn(256, 256), "b": torch.randn(256, 256), "c": torch.randn(256, 256)}
    uses = [
        LayoutUse("a", "column_major", "column"),  # read badly: pays at once
        LayoutUse("b", "column_major", "row", reads=9),  # reads well as it is
        LayoutUse("c", "row_major", "row"),  # as wanted
        LayoutUse("a", "column_major", "column"),
    ]
    stored, cost = converter.auto_convert_pipeline(tensors, uses)
    assert {name: one.layout for name, one in stored.items()} == {
        "a": "column_major",
        "b": "row_major",
        "c": "row_major",
    }
    assert cost == converter.conversion_cost(tensors["a"], "row_major", "column_major")
    assert torch.equal(stored["a"].data, tensors["a"]) and stored["a"].data.stride() == (1, 256)
    assert stored["b"].data is tensors["b"]
    # one more read of tiles is what makes blocks of it worth their cost
    tile = LayoutUse("b", "blocked", "tile")
    few, none = converter.auto_convert_pipeline(tensors, [tile])
    many, paid = converter.auto_convert_pipeline(tensors, [tile] * 40)
    assert (few["b"].layout, none) == ("row_major", 0.0)
    assert many["b"].layout == "blocked" and paid > 0
    back = converter.convert_layout(many["b"].data, "blocked", "row_major", many["b"].shape)
    assert torch.equal(back, tensors["b"])


def test_what_tensors_and_uses_are_refused():
    converter = DynamicLayoutConverter()
    x = torch.randn(8, 8)
    assert LaidOutTensor.of(x.t()).layout == "column_major"
    assert LaidOutTensor.of(x.to_sparse()).layout == "sparse"
    for bad, words in ((x[:, ::2], "dense"), (x[0], r"\[M, N\]")):
        with pytest.raises(ShapeMismatchError, match=words):
            converter.auto_convert_pipeline({"x": bad}, [])
    for use, words in (
        (LayoutUse("y", "blocked", "row"), "tensor='y'"),
        (LayoutUse("x", "sparse", "row"), "layout='sparse'"),
        (LayoutUse("x", "blocked", "zigzag"), "walk='zigzag'"),
    ):
        with pytest.raises(SchemeError, match=words):
            converter.auto_convert_pipeline({"x": x}, [use])
