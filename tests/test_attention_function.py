# SPDX-License-Identifier: MIT
"""The public flash_attention: options, gradients against PyTorch's attention, FP8 and its state."""

import json

import pytest
import torch
import torch.nn.functional as F

from oss_fused import (
    AttentionFP8,
    FlashAttentionFunction,
    flash_attention,
    load_per_channel_state,
    save_per_channel_state,
)
from oss_fused.errors import (
    CheckpointError,
    NumericalOverflowError,
    SchemeError,
    ShapeMismatchError,
    UnsupportedDtypeError,
)
from oss_fused.quant.attention_fp8 import default_group_size
from oss_fused.quant.formats import E5M2, relative_error


def operands(n=24, m=24, heads=4, kv=2, d=16, dtype=torch.float32, device="cpu"):
    g = torch.Generator().manual_seed(0)
    shapes = ((2, heads, n, d), (2, kv, m, d), (2, kv, m, d))
    return tuple(torch.randn(s, generator=g).to(dtype).to(device) for s in shapes)


def gradients(out, inputs):
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
    return torch.autograd.grad((out * weight).sum(), inputs)


@pytest.mark.parametrize("causal", [False, True])
def test_forward_and_gradients_are_pytorchs(causal, device):
    inputs = tuple(t.requires_grad_() for t in operands(device=device))
    out = flash_attention(*inputs, causal=causal)
    wanted = F.scaled_dot_product_attention(*inputs, is_causal=causal, enable_gqa=True)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(gradients(out, inputs), gradients(wanted, inputs)):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(flash_attention(*inputs, causal=causal), out)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "window_left": 2},
        {"window_left": 1, "window_right": 1, "dropout_p": 0.3, "seed": 5},
    ],
    ids=["plain", "window", "dropout"],
)
def test_gradcheck(options):
    """In float64: dropout's mask is the same at every call, so that differences see it, too."""
    inputs = tuple(t.double().requires_grad_() for t in operands(n=4, m=5, heads=2, kv=1, d=3))
    mask = torch.ones(2, 1, 4, 5)
    mask[:, :, 1, 0] = 0
    mask[:, :, 2] = 0
    sinks = torch.tensor([0.2, -0.4], dtype=torch.float64, requires_grad=True)
    slopes = torch.tensor([0.1, 0.5], dtype=torch.float64)

    def run(q, k, v, sinks):
        return flash_attention(
            q, k, v, mask=mask, sinks=sinks, alibi_slopes=slopes, scale=0.5, **options
        )

    assert torch.autograd.gradcheck(run, (*inputs, sinks))


def test_the_call_of_the_requirements_and_masks_of_any_dtype(device):
    q, k, v = operands(n=40, m=40, device=device)
    out = flash_attention(q, k, v, window_left=128, window_right=0, causal=False)
    torch.testing.assert_close(out, flash_attention(q, k, v, causal=True))
    mask = (torch.rand(2, 1, 40, 40, device=device) > 0.3).float()
    torch.testing.assert_close(
        flash_attention(q, k, v, mask=mask), flash_attention(q, k, v, mask=mask.bool())
    )


def test_memory_of_the_graph_grows_with_n():
    """What backward keeps holds no [N, M]."""
    q, k, v = (t.requires_grad_() for t in operands(n=64, m=64))
    saved = []

    def keep(t):
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = flash_attention(q, k, v)
    assert out.grad_fn.name().startswith(FlashAttentionFunction.__name__)
    assert max(t.numel() for t in saved) == q.numel()


@pytest.mark.parametrize("mode", ["tensor", "channel", "group"])
@pytest.mark.parametrize("qk", [False, True])
def test_fp8_is_near_and_clips_little(mode, qk, device):
    fp8 = AttentionFP8(mode, quantize_qk=qk)
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        tensors = [torch.randn(2, 2, 24, 32, generator=generator).to(device) for _ in range(3)]
        out = flash_attention(*tensors, fp8=fp8)
    wanted = F.scaled_dot_product_attention(*tensors)
    # codes of q and k move the logits, too
    assert 1e-4 < relative_error(wanted, out) < (0.1 if qk else 0.06)
    assert out.dtype == torch.float32
    assert len(fp8.history) == 4 * (3 if qk else 1)
    last = fp8.history[-1]
    assert last["step"] == 4 and last["clip_ratio"] < 0.005
    assert 0 < last["scale_mean"] <= last["scale_max"] and last["amax_mean"] <= last["amax_max"]
    v_scale = fp8.scalers["v"].scale()
    assert v_scale.numel() == {"tensor": 1, "channel": 32, "group": 2}[mode]
    # another length: the averages go on
    flash_attention(*(t[:, :, :7] for t in tensors), fp8=fp8)
    assert fp8.scalers["v"].steps == 5


def test_a_channel_of_large_values_costs_the_others_nothing(device):
    q, k, v = operands(n=64, m=64, d=32, device=device)
    v[..., 3] *= 1e6
    wanted = flash_attention(q, k, v)
    errors = {}
    for mode in ("tensor", "channel"):
        out = flash_attention(q, k, v, fp8=mode)
        errors[mode] = relative_error(wanted[..., 4:], out[..., 4:])
    assert errors["channel"] < 0.05 < errors["tensor"]


def test_fp8_output_and_format(device):
    q, k, v = operands(n=64, m=64, d=32, device=device)
    wanted = flash_attention(q, k, v)
    codes, scale = flash_attention(q, k, v, fp8=AttentionFP8(quantize_output=True))
    assert codes.dtype == torch.float8_e4m3fn and scale.shape == (32,)
    assert relative_error(wanted, codes.float() * scale) < 0.08
    wide = AttentionFP8(fmt=E5M2, quantize_output=True)
    codes, scale = flash_attention(q, k, v, fp8=wide, dropout_p=0.2)
    dropped = flash_attention(q, k, v, dropout_p=0.2)
    assert relative_error(dropped, codes.float() * scale) < 0.15
    with pytest.raises(SchemeError, match="no gradient"):
        flash_attention(q, k, v.requires_grad_(), fp8=wide)


def test_fp8_gradients_are_straight_through(device):
    inputs = tuple(t.requires_grad_() for t in operands(d=32, device=device))
    wanted = gradients(flash_attention(*inputs, causal=True), inputs)
    found = gradients(flash_attention(*inputs, causal=True, fp8="channel"), inputs)
    for ours, theirs in zip(found, wanted):
        assert relative_error(theirs, ours) < 0.05


def test_state_is_kept_in_a_file(tmp_path, device):
    q, k, v = operands(d=32, device=device)
    path = tmp_path / "state" / "fp8.json"
    for step in (1, 2):
        flash_attention(q, k, step * v, fp8="channel", fp8_state_path=path)
    scaler = load_per_channel_state(path)["v"]
    amax = v.abs().amax((0, 1, 2)).cpu()
    torch.testing.assert_close(scaler.amax, 0.9 * amax + 0.1 * 2 * amax)
    assert scaler.steps == 2 and torch.equal(scaler.seen, 2 * amax)
    kept = AttentionFP8()
    kept.load(path)
    again = tmp_path / "again.json"
    save_per_channel_state(kept.scalers, again)
    assert json.loads(again.read_text()) == json.loads(path.read_text())
    with pytest.raises(SchemeError, match="'v' is of a 'per_channel' scaler, expected 'dynamic'"):
        flash_attention(q, k, v, fp8="tensor", fp8_state_path=path)
    for text in ("{", "[]", '{"format": 2, "scalers": {}}', '{"format": 1, "scalers": {"v": {}}}'):
        path.write_text(text)
        with pytest.raises(CheckpointError, match=r"fp8\.json: expected a state"):
            flash_attention(q, k, v, fp8="channel", fp8_state_path=path)


def test_groups(device):
    assert [default_group_size(c) for c in (64, 24, 8)] == [16, 8, 8]
    with pytest.raises(ShapeMismatchError, match="channels=20"):
        default_group_size(20)
    q, k, v = operands(d=32, device=device)
    fp8 = AttentionFP8("group", group_size=4)
    flash_attention(q, k, v, fp8=fp8)
    assert fp8.scalers["v"].scale().shape == (8,)
    flash_attention(q, k, v, fp8="group", fp8_group_size=32)
    with pytest.raises(ShapeMismatchError, match="fp8_group_size=5: expected a divisor"):
        flash_attention(q, k, v, fp8="group", fp8_group_size=5)


def test_bad_arguments_are_named(device):
    q, k, v = operands(device=device)
    cases = [
        (SchemeError, "window_left=-3: expected at least 0", {"window_left": -3}),
        (SchemeError, "fp8='row': expected one of tensor, channel, group", {"fp8": "row"}),
        (SchemeError, "fp8=3: expected one of", {"fp8": 3}),
        (SchemeError, "fp8=None", {"fp8_group_size": 8}),
        (SchemeError, "fp8='channel': expected 'group'", {"fp8": "channel", "fp8_group_size": 8}),
        (SchemeError, "fp8_group_size=8", {"fp8": AttentionFP8(), "fp8_group_size": 8}),
        (SchemeError, "scale=0", {"scale": 0.0}),
        (ShapeMismatchError, "mask.shape", {"mask": torch.ones(24, 24, device=device)}),
    ]
    for error, words, options in cases:
        with pytest.raises(error, match=words):
            flash_attention(q, k, v, **options)
    with pytest.raises(SchemeError, match="group_size=8: expected .* of mode 'group'"):
        AttentionFP8("channel", group_size=8)
    with pytest.raises(SchemeError, match="fmt='e3m4': expected one of e4m3, e5m2"):
        AttentionFP8(fmt="e3m4")
    assert AttentionFP8(fmt="e5m2").fmt == E5M2
    with pytest.raises(UnsupportedDtypeError, match="k.dtype"):
        flash_attention(q, k.int(), v)
    v[0, 0, 0, 0] = float("nan")
    with pytest.raises(NumericalOverflowError, match="NaN or Inf"):
        flash_attention(q, k, v, fp8="channel")
