# SPDX-License-Identifier: MIT
"""``norm_moe_norm``: the experts with the norms around them, against the operators it replaces."""

from __future__ import annotations

import pytest
import torch
from moe_layer import Layer

from oss_fused.errors import ShapeMismatchError
from oss_fused.kernels.launch import runs_gluon
from oss_fused.kernels.moe.config import SHARED_ROWS, ExpertShape, choose_config
from oss_fused.kernels.op import get_kernel

pytest.importorskip("triton")

EPS = 1e-5


class Block:
    """A small layer of experts with its router and norms."""

    def __init__(self, hidden, inter, experts, device, seed=0, dtype=torch.bfloat16):
        self.layer = Layer(hidden, inter, experts, seed).to(device)
        self.hidden, self.device, self.dtype = hidden, device, dtype
        self.gain, self.next_gain = (self.random(hidden) * 0.1 + 1 for _ in range(2))
        self.gate, self.gate_bias = self.random(experts, hidden) * 0.05, self.random(experts)
        self.arrivals = torch.zeros(16, dtype=torch.int32, device=device)

    def random(self, *shape):
        return torch.randn(*shape).to(self.device, self.dtype)

    def run(
        self, backend, x, residual, scale=None, top_k=4, renormalize=True, fp8=-1, bf16_rows=0,
        prefetch=False,
    ):  # fmt: skip
        return get_kernel(backend, "norm_moe_norm")(
            x, residual, self.gain, EPS, self.gate, self.gate_bias,
            *self.layer.packed13, self.layer.b13, *self.layer.packed2, self.layer.b2,
            top_k, renormalize, fp8, self.next_gain, EPS, scale, self.arrivals, prefetch,
            bf16_rows,
        )  # fmt: skip


def values(result):
    codes, scale, residual, _ = result
    return codes.float() * scale, residual.float()


def assert_close(actual, expected):
    # a code may be the next one
    for a, b in zip(values(actual), values(expected)):
        torch.testing.assert_close(a, b, rtol=0.13, atol=0.02 * float(b.abs().max()))
        assert float((a - b).norm()) <= 0.01 * float(b.norm())


def _shares_of(block, tokens, top_k=4):
    """How many programs add up a token's columns and arrive."""
    experts, rows13, _ = block.layer.packed13[0].shape
    shape = ExpertShape(top_k, experts, experts, 320, rows13 // 2)
    return choose_config(tokens, shape, False).down.shares


@pytest.mark.parametrize(
    ("tokens", "static"), [(1, False), (1, True), (3, False), (9, False), (40, True)]
)
def test_it_computes_what_the_operators_in_turn_do(device, tokens, static):
    # few tokens: long enough for several shares of K
    block = Block(320, {1: 544, 3: 288}.get(tokens, 96), 12, device, seed=tokens)
    assert (_shares_of(block, tokens) > 1) == (tokens <= 3)
    x, residual = block.random(tokens, 320), block.random(tokens, 320)
    scale = torch.full((1,), 0.02, device=device) if static else None
    expected = block.run("torch", x, residual, scale)
    actual = block.run("triton", x, residual, scale)
    assert [t.shape for t in actual] == [t.shape for t in expected]
    # a product of these codes reads them in tiles
    assert actual[0].untyped_storage().nbytes() == {40: 64}.get(tokens, 16) * 320
    assert [t.dtype for t in actual] == [t.dtype for t in expected]
    assert_close(actual, expected)
    assert not block.arrivals.any()


@pytest.mark.gpu
@pytest.mark.parametrize("experts", [12, 64])
def test_expected_experts_change_no_result(device, experts):
    """Nor does what their scratch holds: each program finds an expert in NaN, too."""
    if not runs_gluon(device):
        pytest.skip("needs a Hopper GPU and Gluon")
    block = Block(1344, 160, experts, device, seed=experts)
    x, residual = block.random(1, 1344), block.random(1, 1344)
    plain = block.run("triton", x, residual, prefetch=True)
    block.arrivals = torch.zeros(SHARED_ROWS + experts, dtype=torch.int32, device=device)
    scratch = block.arrivals[SHARED_ROWS:].view(torch.float32).fill_(float("nan"))
    for _ in range(3):
        again = block.run("triton", x, residual, prefetch=True)
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(again, plain))
    assert not block.arrivals[:SHARED_ROWS].any()
    norm = (residual, None, block.gain, EPS, block.gate, block.gate_bias)
    logits = get_kernel("torch", "add_rms_norm_router")(*norm)[2][0].float()
    torch.testing.assert_close(scratch, logits, rtol=2**-7, atol=0.05)
    scratch.fill_(float("nan"))
    unvouched = block.run("triton", x, residual)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(unvouched, plain))
    assert scratch.isnan().all()


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("experts", "top_k"), [(7, 3), (32, 1), (130, 8)])
def test_one_token_chooses_as_moe_route_does(device, experts, top_k, renormalize):
    """Its kernels find the experts in the logits, of which most here are equal."""
    block = Block(64, 32, experts, device, seed=top_k)
    block.gate.zero_()
    block.gate_bias = torch.randint(-2, 3, (experts,)).to(device, block.dtype)
    x, residual = block.random(1, 64), block.random(1, 64)
    expected = block.run("torch", x, residual, None, top_k, renormalize)
    assert_close(block.run("triton", x, residual, None, top_k, renormalize), expected)


def test_shares_of_as_many_tokens_as_they_are_made_for(device):
    """Every token has a counter of its own."""
    block = Block(320, 288, 12, device)
    assert _shares_of(block, 16, 1) > 1
    x, residual = block.random(16, 320), block.random(16, 320)
    expected = block.run("torch", x, residual, None, 1)
    assert_close(block.run("triton", x, residual, None, 1), expected)
    assert not block.arrivals.any()


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_poisoned_row_is_lost_and_no_other(device, tokens, poison):
    block = Block(128, 32, 8, device)
    x, residual = block.random(tokens, 128), block.random(tokens, 128)
    clean = block.run("triton", x, residual)
    x[0, 5] = poison
    codes, scale, *_ = block.run("triton", x, residual)
    assert (codes.float() * scale)[0].isnan().all()
    assert torch.equal(codes.float()[1:], clean[0].float()[1:])
    assert torch.equal(scale[1:], clean[1][1:])
    # the counters are ready for the next launch whatever the row held
    assert not block.arrivals.any()


def test_rows_with_strides_and_no_rows(device):
    block = Block(128, 32, 8, device)
    x, residual = block.random(6, 128), block.random(6, 128)
    expected = block.run("triton", x[::2].contiguous(), residual[::2].contiguous())
    for a, b in zip(block.run("triton", x[::2], residual[::2]), expected):
        assert torch.equal(a.float(), b.float())
    codes, scale, added, _ = block.run("triton", x[:0], residual[:0])
    assert codes.shape == added.shape == (0, 128) and scale.shape == (0, 1)


def test_fp8_activations_from_the_given_batch_on(device):
    block = Block(128, 64, 4, device)
    x, residual = block.random(6, 128), block.random(6, 128)
    few, many = (values(block.run("triton", x, residual, fp8=least))[0] for least in (7, 6))
    expected = values(block.run("torch", x, residual, fp8=6))[0]
    # a code of the intermediate may be the next one, which every column of the row then shows
    assert float((many - expected).norm()) <= 0.02 * float(expected.norm())
    assert not torch.equal(few, many)


def test_too_few_counters(device):
    block = Block(64, 32, 4, device)
    block.arrivals = block.arrivals[:2]
    x = block.random(3, 64)
    with pytest.raises(ShapeMismatchError, match=r"arrivals.numel\(\)=2: expected at least 3"):
        block.run("triton", x, x)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_no_experts_and_no_intermediate(device, backend):
    block = Block(64, 32, 4, device)
    x, layer = block.random(2, 64), block.layer
    block.gate, block.gate_bias = block.gate[:0], block.gate_bias[:0]
    for name in ("b13", "b2"):
        setattr(layer, name, getattr(layer, name)[:0])
    for name in ("packed13", "packed2"):
        setattr(layer, name, tuple(t[:0] for t in getattr(layer, name)))
    with pytest.raises(ShapeMismatchError, match="gate.shape=.*at least one expert"):
        block.run(backend, x, x)
    block = Block(64, 32, 4, device)
    block.layer.packed13 = tuple(t[:, :0] for t in block.layer.packed13)
    block.layer.b13 = block.layer.b13[:, :0]
    with pytest.raises(ShapeMismatchError, match="w13.shape=.*at least 1"):
        block.run(backend, x, x)
