# SPDX-License-Identifier: MIT
"""act_mul_quant, gate_up_quant, MLPs, gated_mlp against their references and formulas."""

import pytest
import torch

from oss_fused import functional as F
from oss_fused.errors import SchemeError, ShapeMismatchError
from oss_fused.kernels import tiles
from oss_fused.kernels.op import get_kernel

FP8 = torch.float8_e4m3fn
ACTIVATIONS = ["silu", "gelu", "gelu_tanh"]


def rows(*shape, dtype=torch.bfloat16, device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=g) * 2).to(dtype).to(device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("intermediate", [64, 130, 1536])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("static", [True, False])
def test_act_mul_quant_equals_reference(dtype, intermediate, activation, static, device):
    x = rows(5, 2 * intermediate, dtype=dtype, device=device)
    scale = torch.full((1,), 0.02, device=device) if static else None
    want, want_scale = get_kernel("torch", "act_mul_quant")(x, activation, scale)
    got, got_scale = get_kernel("triton", "act_mul_quant")(x, activation, scale)
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(got_scale, want_scale, rtol=unit, atol=0)
    assert (got.view(torch.uint8) == want.view(torch.uint8)).float().mean() > 0.99
    error = (got.float() * got_scale - want.float() * want_scale).norm()
    assert error / (want.float() * want_scale).norm() < 5e-3


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_act_mul_quant_edges(backend, device):
    op = get_kernel(backend, "act_mul_quant")
    q, scale = op(rows(0, 64, device=device), "silu", None)
    assert q.shape == (0, 32) and scale.shape == (0, 1)
    x = rows(3, 64, device=device)
    x[1, 3] = float("nan")
    x[2, 40] = float("inf")
    q, scale = op(x, "silu", None)
    assert scale[0].isfinite() and not scale[1:].isfinite().any()
    wide = rows(4, 3, 160, device=device)[..., 16:144]
    assert torch.equal(
        op(wide, "silu", None)[0].view(torch.uint8),
        op(wide.contiguous(), "silu", None)[0].view(torch.uint8),
    )
    with pytest.raises(ShapeMismatchError, match="x.shape"):
        op(rows(2, 7, device=device), "silu", None)
    with pytest.raises(SchemeError, match="activation='relu'"):
        op(rows(2, 8, device=device), "relu", None)


def test_silu_of_every_magnitude(device):
    """Each value of its own, by its formula: the up value brings the product to 8 and more."""
    tiny = [10.0**-power for power in range(1, 37)]
    gate = torch.tensor([*tiny, *torch.linspace(0.1, 86, 220).tolist()]).bfloat16()
    gate = torch.cat([gate, -gate])
    silu = gate.double() * torch.sigmoid(gate.double())
    up = torch.exp2(3 - torch.log2(silu.abs()).floor()).bfloat16()
    op, one = get_kernel("triton", "act_mul_quant"), torch.ones(1, device=device)
    q, _ = op(torch.cat([gate, up])[None].to(device), "silu", one)
    # a code has three bits behind its first one, and the activation is rounded before
    torch.testing.assert_close(q[0].double().cpu(), silu * up.double(), rtol=0.07, atol=0)
    ends = torch.tensor([0.0, -100.0, -3e38, float("-inf"), float("inf"), float("nan")])
    q, _ = op(torch.cat([ends, torch.ones(6)]).bfloat16()[None].to(device), "silu", one)
    assert q[0, :3].float().tolist() == [0.0, 0.0, 0.0] and q[0, 3:].isnan().all()


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("on", ["up", "gate"])
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_gated_mlp_bf16(activation, on, tokens, device):
    x = rows(tokens, 96, device=device)
    gate = rows(72, 96, device=device, seed=1) / 10
    up = rows(72, 96, device=device, seed=2) / 10
    got = F.fused_gated_mlp(x, gate, up, activation, activation_on=on)
    f = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}[activation]
    g, u = x.double() @ gate.double().t(), x.double() @ up.double().t()
    want = g * f(u) if on == "up" else f(g) * u
    for result in (got, get_kernel("triton", "gated_mlp")(x, gate, up, None, None, activation, on)):
        assert result.dtype == x.dtype
        assert (result.double() - want).norm() / want.norm() < 4e-3


@pytest.mark.parametrize("channels", [True, False])
@pytest.mark.parametrize("tokens,hidden", [(3, 96), (65, 80), (4, 50)])
def test_gated_mlp_fp8_equals_reference(channels, tokens, hidden, device):
    x = rows(tokens, hidden, device=device)
    gate, up = (rows(40, hidden, device=device, seed=s).to(FP8) for s in (1, 2))
    scales = [torch.rand(*((40, 1) if channels else (1,)), device=device) / 50 for _ in range(2)]
    args = (x, gate, up, *scales, "silu", "gate")
    want = get_kernel("torch", "gated_mlp")(*args)
    got = get_kernel("triton", "gated_mlp")(*args)
    assert (got.double() - want.double()).norm() / want.double().norm() < 4e-3


def test_act_mul_quant_of_few_rows_equals_that_of_many(device):
    # few rows are cut into parts that share a scale, many are not
    op = get_kernel("triton", "act_mul_quant")
    x = rows(33, 2 * 1300, device=device)
    x[1, 1200] = float("nan")
    q, scale = op(x, "silu", None)
    few, few_scale = op(x[:5], "silu", None)
    assert torch.equal(few.view(torch.uint8), q[:5].view(torch.uint8))
    torch.testing.assert_close(few_scale, scale[:5], rtol=0, atol=0, equal_nan=True)
    assert few_scale[1].isnan()


def codes_of(x):
    return get_kernel("torch", "quantize_fp8")(x, None, "token")


def gate_up(rows_, hidden, intermediate, device, seed=0, dtype=torch.bfloat16):
    x = rows(rows_, hidden, dtype=dtype, device=device, seed=seed)
    weight = rows(2 * intermediate, hidden, dtype=dtype, device=device, seed=seed + 1)
    (codes, scale), (w, w_scale) = codes_of(x), codes_of(weight / 8)
    return [codes, w, scale, w_scale, dtype]


def same(got, want):
    return all(
        torch.equal(g.contiguous().view(torch.uint8), w.contiguous().view(torch.uint8))
        for g, w in zip(got, want, strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 2, 5, 70])
def test_gate_up_quant_equals_the_separate_operators(tokens, dtype, device):
    """Bit for bit: the same sums in the same order, rounded in the same places."""
    operands = gate_up(tokens, 112, 37, device, dtype=dtype)
    a, b, a_scale, b_scale, _ = operands
    if tokens == 1:
        # a product of one row alone has sums in another order on a GPU
        a, a_scale = a.repeat(2, 1), a_scale.repeat(2, 1)
    for activation in ACTIVATIONS:
        got = get_kernel("triton", "gate_up_quant")(*operands, activation)
        product = get_kernel("triton", "fp8_gemm")(a, b, a_scale, b_scale, None, dtype)[:tokens]
        assert same(got, get_kernel("triton", "act_mul_quant")(product, activation, None))


@pytest.mark.parametrize("tokens", [1, 2, 6])
def test_gate_up_quant_equals_reference(tokens, device):
    operands = gate_up(tokens, 64, 48, device)
    (got, scale), (want, want_scale) = (
        get_kernel(backend, "gate_up_quant")(*operands, "silu") for backend in ("triton", "torch")
    )
    # the activation's last bit moves a scale by one unit of bf16
    torch.testing.assert_close(scale, want_scale, rtol=2**-7, atol=0)
    error = (got.float() * scale - want.float() * want_scale).norm()
    assert error / (want.float() * want_scale).norm() < 2e-2


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("tokens", [2, 6])
def test_gate_up_quant_edges(backend, tokens, device):
    op = get_kernel(backend, "gate_up_quant")
    codes, w, scale, w_scale, dtype = gate_up(tokens, 64, 40, device)
    q, out_scale = op(codes[:0], w, scale[:0], w_scale, dtype, "silu")
    assert q.shape == (0, 40) and out_scale.shape == (0, 1)
    # one scale for all rows takes another path
    each = op(codes, w, scale[:1].expand_as(scale).contiguous(), w_scale, dtype, "silu")
    assert same(op(codes, w, scale[:1].view(1), w_scale, dtype, "silu"), each)
    wide = torch.cat([codes.view(torch.uint8)] * 3, 1).view(FP8)[:, 64:128]
    assert same(
        op(wide, w, scale, w_scale, dtype, "silu"), op(codes, w, scale, w_scale, dtype, "silu")
    )
    codes[1] = 0
    q, out_scale = op(codes, w, scale, w_scale, dtype, "silu")
    assert out_scale[1] == 1 and not q[1].float().any()
    codes.view(torch.uint8)[0, 3] = 127
    q, out_scale = op(codes, w, scale, w_scale, dtype, "silu")
    assert out_scale[0].isnan() and q[0].float().isnan().all() and out_scale[1].isfinite()
    with pytest.raises(ShapeMismatchError, match="weight.shape"):
        op(codes, w[:5], scale, w_scale[:5], dtype, "silu")


def whole(tokens, device, hidden=64, inner=48, outputs=72, dtype=torch.bfloat16):
    """Operands of mlp_fp8."""
    x, w, x_scale, w_scale, _ = gate_up(tokens, hidden, inner, device, dtype=dtype)
    down, down_scale = codes_of(rows(outputs, inner, device=device, seed=5) / 8)
    bias = rows(outputs, device=device, seed=6)
    return [x, w, x_scale, w_scale, down, down_scale, bias, dtype, "silu"]


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("tokens", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mlp_is_both_products(backend, tokens, dtype, device):
    operands = whole(tokens, device, dtype=dtype)
    for at, value in ((6, None), (8, "gelu")):
        operands[at] = value
        codes, scale = get_kernel(backend, "gate_up_quant")(*operands[:4], *operands[7:])
        want = get_kernel(backend, "fp8_gemm")(codes, operands[4], scale, *operands[5:8])
        got = get_kernel(backend, "mlp_fp8")(*operands)
        assert got.shape == (tokens, 72) and got.dtype == dtype
        torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-7)


def test_mlp_names_what_does_not_fit(device):
    operands = whole(2, device)
    operands[4] = operands[4][:, :16]
    with pytest.raises(ShapeMismatchError, match=r"down_weight.shape=.*\[N, 48\]"):
        get_kernel("triton", "mlp_fp8")(*operands)
    operands[1], operands[3] = operands[1][:5], operands[3][:5]
    with pytest.raises(ShapeMismatchError, match="weight.shape=.*2 . intermediate"):
        get_kernel("triton", "mlp_fp8")(*operands)


def whole_and_norm(tokens, device, scale=None, bf16_rows=0):
    """Operands of mlp_norm."""
    operands = whole(tokens, device)
    residual, gain = rows(tokens, 72, device=device, seed=7), rows(72, device=device, seed=8).abs()
    return [*operands[:7], residual, gain, 1e-5, scale, "silu", False, bf16_rows]


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("tokens", [0, 1, 3, 40])
@pytest.mark.parametrize("kind", ["dynamic", "static", "levels", "no bias"])
def test_mlp_norm_is_an_mlp_and_a_norm(backend, tokens, kind, device):
    scale = torch.full((1,), 0.02, device=device) if kind == "static" else None
    operands = whole_and_norm(tokens, device, scale, 8 if kind == "levels" else 0)
    if kind == "no bias":
        operands[6] = None
    # rows of a wider tensor
    operands[7] = torch.cat([operands[7]] * 2, 1)[:, :72]
    out = get_kernel(backend, "mlp_fp8")(*operands[:7], torch.bfloat16, "silu")
    q, out_scale, added, _, levels = get_kernel(backend, "add_rms_norm_quant")(
        out, *operands[7:11], False, False, operands[13]
    )
    got = get_kernel(backend, "mlp_norm")(*operands)
    given = 2 * min(tokens, operands[13]) if tokens <= operands[13] else 0
    assert got[3].shape == levels.shape
    for ours, theirs in zip(
        (*got[:3], got[3][:given]), (q, out_scale, added, levels[:given]), strict=True
    ):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=0, atol=0)


@pytest.mark.parametrize("wide", [False, True])
def test_mlp_norm_adds_parts_only_of_the_kernel_that_leaves_them(wide, device, monkeypatch):
    """On Hopper that kernel takes all but rows that are not aligned; elsewhere another one runs."""
    monkeypatch.setattr(tiles, "has_two_parts", lambda m, n, k: True)
    operands = whole_and_norm(40, device)
    if wide:
        operands[4] = torch.cat([operands[4].view(torch.uint8)] * 3, 1)[:, 1:49].view(FP8)
    got, want = (get_kernel(backend, "mlp_norm")(*operands) for backend in ("triton", "torch"))
    # a code that flips moves a value
    assert (got[2].double() - want[2].double()).norm() < 0.01 * want[2].double().norm()


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_mlp_norm_keeps_a_row_that_is_not_finite_to_itself(backend, bad, device):
    operands = whole_and_norm(3, device)
    operands[7][1, 5] = bad
    codes, scale, added, _ = get_kernel(backend, "mlp_norm")(*operands)
    assert not scale[1].isfinite() and scale[[0, 2]].isfinite().all()
    assert not added[1, 5].isfinite() and added[[0, 2]].isfinite().all()
    assert (codes.float() * scale)[[0, 2]].isfinite().all()


def test_mlp_norm_names_what_does_not_fit(device):
    op = get_kernel("triton", "mlp_norm")
    operands = whole_and_norm(2, device)
    one = torch.ones(1, device=device)
    for at, wrong, message in (
        (7, operands[7][:1], "residual.shape"),
        (8, operands[8][:5], "gain.shape"),
        (4, operands[4][:, :16], r"down_weight.shape=.*\[N, 48\]"),
    ):
        with pytest.raises(ShapeMismatchError, match=message):
            op(*operands[:at], wrong, *operands[at + 1 :])
    with pytest.raises(SchemeError, match="bf16_rows=8: expected 0 with a given scale"):
        op(*operands[:10], one, *operands[11:13], 8)
    with pytest.raises(SchemeError, match="activation='relu'"):
        op(*operands[:11], "relu", *operands[12:])


def test_gated_mlp_bad_arguments(device):
    x, w = rows(2, 16, device=device), rows(8, 16, device=device)
    with pytest.raises(ShapeMismatchError, match="up_weight.shape"):
        F.fused_gated_mlp(x, w, w[:4])
    with pytest.raises(SchemeError, match="activation_on"):
        F.fused_gated_mlp(x, w, w, activation_on="both")


def test_opcheck(device, check_op):
    x, w = rows(2, 16, device=device), rows(8, 16, device=device)
    check_op(torch.ops.oss_fused.act_mul_quant.default, (x, "silu", None))
    check_op(torch.ops.oss_fused.gate_up_quant.default, (*gate_up(2, 16, 8, device), "silu"))
    check_op(torch.ops.oss_fused.mlp_fp8.default, tuple(whole(2, device)))
    for scale, levels in ((None, 8), (torch.ones(1, device=device), 0)):
        operands = whole_and_norm(2, device, scale, levels)
        check_op(torch.ops.oss_fused.mlp_norm.default, tuple(operands))
    check_op(torch.ops.oss_fused.gated_mlp.default, (x, w, w, None, None, "silu", "up"))


def test_one_row_of_a_wider_buffer(device):
    """Its stride is no multiple of 16 bytes, which no descriptor takes."""
    x, w = rows(1, 49, device=device)[:, :48], rows(8, 48, device=device)
    for gate, scale in ((w, None), (w.to(FP8), torch.ones(8, 1, device=device))):
        wide = torch.zeros(1, 50, device=device, dtype=gate.dtype)[:, 1:49].copy_(gate[:1])
        for weight, factor in ((gate, scale), (wide, None if scale is None else scale[:1])):
            args = (x, weight, weight, factor, factor, "silu", "up")
            want, got = (get_kernel(b, "gated_mlp")(*args) for b in ("torch", "triton"))
            torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_one_scale_of_any_shape(device):
    x, w = rows(2, 16, device=device), rows(8, 16, device=device).to(FP8)
    one = torch.full((1,), 0.5, device=device)
    for gate, up in ((one.view(1, 1, 1), one), (one.view(()), one.expand(8, 1))):
        args = (x, w, w, gate, up, "silu", "up")
        want, got = (get_kernel(b, "gated_mlp")(*args) for b in ("torch", "triton"))
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
