# SPDX-License-Identifier: MIT
"""The expert kernels for one to four tokens (moe/few.py) against their reference twin."""

from __future__ import annotations

import pytest
import torch
from moe_layer import SAME_ARITHMETIC, Layer, inputs, layer_of, reference, relative_error, run

from oss_fused.kernels.launch import runs_gluon
from oss_fused.kernels.moe.config import (
    ExpertShape,
    choose_config,
    mxfp4_variant,
    takes_few,
    takes_few_gate_up,
)
from oss_fused.kernels.op import get_kernel

pytest.importorskip("triton")
# steps of rounding average less over one row than SAME_ARITHMETIC allows: 2.1e-3 were measured
ONE_ROW = 1.5 * SAME_ARITHMETIC
# gpt-oss-20b's
B20 = ExpertShape(4, 32, 32, 2880, 2880)


@pytest.mark.parametrize(
    ("tokens", "inter", "taken"),
    [
        (1, 2880, True),
        (2, 2880, True),
        (3, 2880, True),
        (4, 2880, True),
        (5, 2880, False),
        (1, 2944, False),
        (1, 1024, False),
    ],
)
def test_who_takes_the_kernel_for_few_tokens(tokens, inter, taken):
    config = choose_config(tokens, ExpertShape(4, 32, 32, 2880, inter), False, True)
    assert takes_few(config, tokens, 2880, inter) == taken
    # w13's K is the hidden size
    assert takes_few_gate_up(config, tokens, inter, 64) == (taken and tokens <= 2)
    assert not takes_few_gate_up(config, tokens, inter, 65)
    for fp8 in (True, False):
        other = choose_config(1, B20, fp8, gluon=fp8)
        assert not takes_few(other, 1, 2880, 2880)
        assert not takes_few_gate_up(other, 1, 2880, 32)


def test_tokens_of_a_tile_are_a_variant():
    """A server compiles w2's kernel for one, two and four tokens before it serves."""
    shape = ExpertShape(1, 32, 32, 2880, 2880)
    variants = [mxfp4_variant(tokens, shape, False) for tokens in (1, 2, 3, 4)]
    assert len(set(variants)) == 3 and variants[2] == variants[3]


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("hidden,inter", [(2880, 2880), (192, 1536), (256, 3360)])
def test_few_tokens(device, hidden, inter, tokens):
    """K with and without a part of a chunk; experts elsewhere; the same bits each time."""
    if not runs_gluon(device):
        pytest.skip("needs a Hopper GPU and Gluon")
    layer = Layer(hidden, inter, 4).to(device)
    expert_map = torch.tensor([-1, 0, 1, 2, 3, -1, -1, -1], dtype=torch.int32, device=device)
    x, logits = inputs(device, tokens, hidden, 8)
    logits[0, 2:5] = 9
    outputs = [run(layer, 0.05 * x, logits, 4, expert_map) for _ in range(3)]
    assert relative_error(*outputs[0]) < SAME_ARITHMETIC
    assert all(torch.equal(outputs[0][0], again) for again, _ in outputs)
    x[0, 5] = float("nan")
    bad = run(layer, 0.05 * x, logits, 4, expert_map)[0]
    assert bad[0].isnan().all() and torch.equal(bad[1:], outputs[0][0][1:])


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("experts", [8, 64])
@pytest.mark.parametrize(("hidden", "inter"), [(1344, 160), (1536, 256), (2880, 224)])
def test_w13_of_few_tokens(device, hidden, inter, experts, tokens):
    """K with and without a part of a chunk, intermediates too; with a choice of its own, and with
    another launch's. A NaN stays in its row."""
    if not runs_gluon(device):
        pytest.skip("needs a Hopper GPU and Gluon")
    layer = layer_of(hidden, inter, experts).to(device)
    config = choose_config(tokens, ExpertShape(2, experts, experts, hidden, inter), False, True)
    assert takes_few_gate_up(config, tokens, hidden, experts)
    x, logits = inputs(device, tokens, hidden, experts)
    # the second token's experts are not the first one's
    logits[-1, 3:5] = 9
    arguments = (logits, *layer.packed13, layer.b13, *layer.packed2, layer.b2, 2, True)
    for factor in (0.05, 20):
        # 20: beyond the clamps
        actual = get_kernel("triton", "moe_mxfp4")(factor * x, *arguments)
        assert relative_error(actual, reference(factor * x, *arguments)) < ONE_ROW
        for _ in range(3):
            again = get_kernel("triton", "moe_mxfp4")(factor * x, *arguments)
            assert torch.equal(actual, again)
    half = (logits, *layer.packed13, None, *layer.packed2, None, 2, True)
    actual = get_kernel("triton", "moe_mxfp4")((0.05 * x).half(), *half)
    assert relative_error(actual, reference((0.05 * x).half(), *half)) < ONE_ROW
    x[-1, 5] = float("nan")
    bad = get_kernel("triton", "moe_mxfp4")(20 * x, *arguments)
    assert bad[-1].isnan().all() and bad[:-1].isfinite().all()
