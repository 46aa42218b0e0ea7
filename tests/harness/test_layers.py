# SPDX-License-Identifier: MIT
"""Chains of decoder layers."""

import functools
import itertools

import pytest
import torch
from harness.layers import SHAPES, Chain, Shape

from oss_fused.bench.timing import capture

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


@functools.cache
def real_chain(model):
    chain = Chain(SHAPES[model], 2, torch.device("cuda"))
    for layer in chain.layers:
        codes, scale = layer["output"]
        layer["output"] = codes, torch.full_like(scale, codes.shape[1] ** -0.5)
    return chain


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 32, 100, 200])
@pytest.mark.parametrize("model", ["gpt-oss-20b", "llama-3-8b"])
def test_no_kernel_reads_what_is_not_there_yet(model, tokens):
    """A load that does not wait may find what the last replay left, so that is destroyed."""
    step = real_chain(model).prepare(tokens, 130)
    want = step()

    def poisoned():
        # freed, and then what the step's tensors are made of: NaN in each of its formats
        torch.full((64 << 20,), 255, dtype=torch.uint8, device="cuda")
        return step()

    graph, (got,) = capture([poisoned], keep=True)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(300):
        graph.replay()
        different += (got != want).any()
    assert want.isfinite().all() and different == 0
