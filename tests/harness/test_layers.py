# SPDX-License-Identifier: MIT
"""Chains of decoder layers, on a CPU."""

import itertools

import pytest
import torch
from harness.layers import SHAPES, Chain, Shape

CPU = torch.device("cpu")
SMALL = {
    "experts": Shape(64, 64, 4, 2, 64, experts=8, window=32),
    "dense": Shape(64, 96, 4, 2, 64),
}


@pytest.mark.parametrize("kind", SMALL)
def test_a_step_is_the_same_each_time(kind):
    chain = Chain(SMALL[kind], 3, CPU)
    step = chain.prepare(5, 40)
    out = step()
    assert out.shape == (5, 64) and out.isfinite().all()
    # every token has its own values, of a size that no kernel saturates
    assert out.unique(dim=0).shape[0] == 5 and 0.5 < out.float().std() < 20
    assert torch.equal(step(), out)
    # scratch is left as it was, so that a graph can be replayed
    assert not step.arrivals.any() and not chain.arrivals.any()


@pytest.mark.parametrize("kind", SMALL)
def test_each_layer_takes_part(kind):
    results = [Chain(SMALL[kind], layers, CPU).prepare(2, 20)() for layers in (1, 2, 3)]
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(results))


def test_experts_do_not_depend_on_products_rounding():
    chain = Chain(SMALL["experts"], 2, CPU)
    step = chain.prepare(4, 20)
    out = step()
    for layer in chain.layers:
        codes, scale = layer["qkv"]
        layer["qkv"] = codes, scale * 3
    assert torch.equal(step(), out)


def test_positions_of_sequences_are_their_own():
    step = Chain(SMALL["dense"], 1, CPU).prepare(3, 40)
    assert step.table.unique().numel() == step.table.numel()
    assert step.slots.unique().numel() == 3
    # the newest position lies in the last page of its sequence
    assert torch.equal(step.slots // 16, step.table[:, -1].long())


def test_shapes_are_those_of_the_models():
    assert SHAPES["gpt-oss-20b"].qkv_rows == 5120
    assert SHAPES["llama-3-8b"].qkv_rows == 6144
