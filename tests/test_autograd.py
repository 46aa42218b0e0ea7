# SPDX-License-Identifier: MIT
"""Gradients: gradcheck of the analytic backward in float64, and the public functions' gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from oss_fused import (
    autograd,
    conv2d_bias_relu,
    flash_attention,
    layer_norm,
    layer_norm_dropout,
    softmax,
)
from oss_fused.functional import fp8_gemm, fused_gated_mlp, fused_rmsnorm_rope, quantize_fp8
from oss_fused.kernels.mlp.reference import gated_mlp_backward
from oss_fused.kernels.op import get_kernel
from oss_fused.kernels.rope.reference import rmsnorm_rope_backward
from oss_fused.specs import GatedMLPInput, RMSNormRoPEInput

EPS = 1e-6
ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def rope_formula(x, weight, cos, sin):
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight
    y = y.view(*x.shape[:2], -1, cos.shape[-1])
    left, right = y.chunk(2, -1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return (y * cos + torch.cat([-right, left], -1) * sin).view(x.shape)


def mlp_formula(x, gate, up, activation, activation_on):
    act = ACTIVATIONS[activation]
    g, u = x @ gate.t(), x @ up.t()
    return g * act(u) if activation_on == "up" else act(g) * u


class Rope64(torch.autograd.Function):
    """The formula in float64 with the library's backward."""

    @staticmethod
    def forward(ctx, x, weight, cos, sin):
        ctx.save_for_backward(x, weight, cos, sin)
        return rope_formula(x, weight, cos, sin)

    @staticmethod
    def backward(ctx, grad):
        return (*rmsnorm_rope_backward(grad, *ctx.saved_tensors, EPS), None, None)


class Mlp64(torch.autograd.Function):
    """Likewise for the gated MLP."""

    @staticmethod
    def forward(ctx, x, gate, up, *options):
        ctx.save_for_backward(x, gate, up)
        ctx.options = options
        return mlp_formula(x, gate, up, *options)

    @staticmethod
    def backward(ctx, grad):
        projections = gated_mlp_backward(grad, *ctx.saved_tensors, *ctx.options)
        return (*autograd.gated_mlp_gradients(*projections, *ctx.saved_tensors), None, None)


def test_gradcheck_rmsnorm_rope():
    args = RMSNormRoPEInput(2, 3, 8, 4, torch.float64).make()
    args["x"].requires_grad_()
    args["weight"].requires_grad_()
    assert torch.autograd.gradcheck(Rope64.apply, tuple(args.values()))


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("activation_on", ["up", "gate"])
def test_gradcheck_gated_mlp(activation, activation_on):
    args = GatedMLPInput(1, 3, 5, 4, dtype=torch.float64).make()
    tensors = [args[name].requires_grad_() for name in ("x", "gate_weight", "up_weight")]
    assert torch.autograd.gradcheck(Mlp64.apply, (*tensors, activation, activation_on))


def test_public_rmsnorm_rope_gradients_match_autograd():
    args = RMSNormRoPEInput(2, 3, 8, 4, torch.float32).make()
    ours = {n: t.clone().requires_grad_(n in ("x", "weight")) for n, t in args.items()}
    theirs = {n: t.clone().requires_grad_(n in ("x", "weight")) for n, t in args.items()}
    out = fused_rmsnorm_rope(**ours)
    grad = torch.randn_like(out)
    out.backward(grad)
    rope_formula(**theirs).backward(grad)
    for name in ("x", "weight"):
        torch.testing.assert_close(ours[name].grad, theirs[name].grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("activation_on", ["up", "gate"])
def test_public_gated_mlp_gradients_match_autograd(activation_on):
    args = GatedMLPInput(2, 3, 8, 16, dtype=torch.float32).make()
    names = ("x", "gate_weight", "up_weight")
    ours = [args[n].clone().requires_grad_() for n in names]
    theirs = [args[n].clone().requires_grad_() for n in names]
    out = fused_gated_mlp(*ours, activation_on=activation_on)
    grad = torch.randn_like(out)
    out.backward(grad)
    mlp_formula(*theirs, "silu", activation_on).backward(grad)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("quantized_weight", [False, True])
def test_fp8_gemm_is_straight_through(quantized_weight):
    a = torch.randn(4, 16, requires_grad=True)
    b, bias = torch.randn(16, 8), torch.randn(8, requires_grad=True)
    scale, wide = None, b
    if quantized_weight:
        q, scale = quantize_fp8(b.t().contiguous(), strategy="channel")
        wide, b = (q.float() * scale).t(), q.t()
    else:
        b = b.requires_grad_()
    grad = torch.randn(4, 8)
    fp8_gemm(a, b, b_scale=scale, bias=bias, out_dtype=torch.float32).backward(grad)
    torch.testing.assert_close(a.grad, grad @ wide.detach().t())
    torch.testing.assert_close(bias.grad, grad.sum(0))
    if not quantized_weight:
        torch.testing.assert_close(b.grad, a.detach().t() @ grad)


def test_frozen_inputs_cost_nothing():
    args = GatedMLPInput(2, 3, 8, 16, dtype=torch.float32).make()
    args["up_weight"].requires_grad_()
    out = fused_gated_mlp(**args)
    (expected,) = torch.autograd.grad(
        mlp_formula(args["x"], args["gate_weight"], args["up_weight"], "silu", "up").sum(),
        args["up_weight"],
    )
    out.sum().backward()
    torch.testing.assert_close(args["up_weight"].grad, expected, rtol=1e-4, atol=1e-5)
    assert args["x"].grad is None and args["gate_weight"].grad is None


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [2048, 2880, 8192])
def test_rmsnorm_rope_gradients_on_a_gpu(hidden):
    """bfloat16 in Triton against the float64 formula through autograd."""
    args = RMSNormRoPEInput(2, 130, hidden, 64).make()
    ours = {n: t.cuda().requires_grad_(n in ("x", "weight")) for n, t in args.items()}
    wide = {n: t.double().requires_grad_(n in ("x", "weight")) for n, t in args.items()}
    grad = torch.randn(2, 130, hidden).bfloat16()
    fused_rmsnorm_rope(**ours).backward(grad.cuda())
    rope_formula(**wide).backward(grad.double())
    for name in ("x", "weight"):
        got, want = ours[name].grad.cpu().double(), wide[name].grad
        assert (got - want).norm() / want.norm() < 4e-3


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [3, 200])
@pytest.mark.parametrize("activation_on", ["up", "gate"])
def test_gated_mlp_gradients_on_a_gpu(rows, activation_on):
    """Likewise; the products round what they are given, so each side keeps its own rounding."""
    args = GatedMLPInput(1, rows, 512, 704).make()
    names = ("x", "gate_weight", "up_weight")
    ours = [args[n].cuda().requires_grad_() for n in names]
    wide = [args[n].double().requires_grad_() for n in names]
    grad = torch.randn(1, rows, 704).bfloat16()
    fused_gated_mlp(*ours, activation_on=activation_on).backward(grad.cuda())
    mlp_formula(*wide, "silu", activation_on).backward(grad.double())
    for a, b in zip(ours, wide, strict=True):
        assert (a.grad.cpu().double() - b.grad).norm() / b.grad.norm() < 8e-3


@pytest.mark.gpu
def test_fp8_gemm_gradients_on_a_gpu():
    a, b = torch.randn(64, 256).bfloat16(), torch.randn(256, 96).bfloat16()
    ours = [t.cuda().requires_grad_() for t in (a, b)]
    grad = torch.randn(64, 96).bfloat16()
    fp8_gemm(*ours).backward(grad.cuda())
    wanted = (grad.double() @ b.double().t(), a.double().t() @ grad.double())
    for got, want in zip(ours, wanted, strict=True):
        assert got.grad.dtype == torch.bfloat16
        assert (got.grad.cpu().double() - want).norm() / want.norm() < 4e-3


def test_no_graph_without_grad():
    args = RMSNormRoPEInput(1, 2, 8, 4, torch.float32).make()
    args["x"].requires_grad_()
    with torch.no_grad():
        assert not fused_rmsnorm_rope(**args).requires_grad
    with torch.inference_mode():
        assert not fp8_gemm(torch.randn(2, 4, requires_grad=True), torch.randn(4, 3)).requires_grad


@pytest.mark.parametrize("grad", [False, True])
def test_functions_compile_without_graph_breaks(grad):
    rope = RMSNormRoPEInput(1, 3, 8, 4, torch.float32).make()
    mlp = GatedMLPInput(1, 3, 8, 16, dtype=torch.float32).make()

    def both(x, weight, cos, sin, gate, up):
        return fused_gated_mlp(fused_rmsnorm_rope(x, weight, cos, sin), gate, up)

    args = [*rope.values(), mlp["gate_weight"], mlp["up_weight"]]
    args[0].requires_grad_(grad)
    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    eager, out = both(*args), compiled(*args)
    torch.testing.assert_close(out, eager)
    if grad:
        (ours,) = torch.autograd.grad(out.sum(), args[0])
        (theirs,) = torch.autograd.grad(eager.sum(), args[0])
        torch.testing.assert_close(ours, theirs)


def _of_x(name, x):
    draw = torch.Generator().manual_seed(1)
    weight, gate, up = (torch.randn(s, generator=draw) for s in ((8,), (5, 8), (5, 8)))
    return {
        "rmsnorm_rope": lambda: fused_rmsnorm_rope(x, weight, gate[:3, :4], up[:3, :4]),
        "gated_mlp": lambda: fused_gated_mlp(x, gate, up),
        "flash_attention": lambda: flash_attention(x[None], x[None], x[None]),
        "flash_attention of codes": lambda: flash_attention(
            x[None], x[None], x[None], fp8="tensor"
        ),
        "layer_norm": lambda: layer_norm(x, weight),
        "layer_norm_dropout": lambda: layer_norm_dropout(x, weight, p=0.2, seed=3),
    }[name]()


@pytest.mark.parametrize(
    "name",
    [
        "rmsnorm_rope",
        "gated_mlp",
        "flash_attention",
        "flash_attention of codes",
        "layer_norm",
        "layer_norm_dropout",
    ],
)
def test_a_second_derivative_of_fused_gradients_is_refused(name):
    """A sum, whose gradient depends on nothing: x alone connects both derivatives."""
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    total = _of_x(name, x).sum()
    (plain,) = torch.autograd.grad(total, x, retain_graph=True)
    (grad,) = torch.autograd.grad(total, x, create_graph=True)
    assert torch.equal(grad, plain) and not plain.requires_grad
    penalised = total + grad.pow(2).sum()
    with pytest.raises(RuntimeError, match="gradient of oss_fused was differentiated"):
        torch.autograd.grad(penalised, x, retain_graph=True)
    with pytest.raises(RuntimeError, match="gradient of oss_fused was differentiated"):
        penalised.backward()


SECOND = {
    "softmax": ((4, 6), (), softmax, lambda x: x.softmax(-1)),
    "convolution": (
        (2, 3, 5, 5),
        ((4, 3, 3, 3), (4,)),
        lambda x, w, b: conv2d_bias_relu(x, w, b, padding=1),
        lambda x, w, b: F.conv2d(x, w, b, padding=1).relu(),
    ),
    "fp8_gemm": ((4, 16), ((16, 6),), fp8_gemm, torch.matmul),
}


@pytest.mark.parametrize("name", list(SECOND))
def test_second_derivatives_where_pytorch_computes_the_gradient(name):
    shape, others, ours, theirs = SECOND[name]
    draw = torch.Generator().manual_seed(0)
    start = [torch.randn(s, generator=draw) for s in (shape, *others)]
    found = []
    for function in (ours, theirs):
        inputs = [t.clone().requires_grad_() for t in start]
        out = function(*inputs)
        # not of out: an FP8 product rounds it
        weights = torch.linspace(-1, 1, out.numel()).view(out.shape).requires_grad_()
        grads = torch.autograd.grad(out, inputs, weights, create_graph=True)
        norm = sum((g * g).sum() for g in grads)
        found.append(torch.autograd.grad(norm, (*inputs, weights), allow_unused=True))
    for a, b in zip(*found, strict=True):
        # None stands for zeros
        a, b = (torch.zeros(1) if t is None or not t.any() else t for t in (a, b))
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_float64_gradients_are_computed_in_float64(device):
    """Triton's kernels compute in float32."""
    draw = torch.Generator().manual_seed(0)

    def make(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(device)

    rope = (make(2, 3, 8), make(2, 3, 8), make(8), make(3, 4), make(3, 4), EPS)
    mlp = (make(5, 16), make(5, 32), make(16, 32), make(16, 32), "silu", "up")
    mixed = (*(t.float() for t in rope[:2]), *rope[2:])
    for name, args in (
        ("rmsnorm_rope_backward", rope),
        ("rmsnorm_rope_backward", mixed),
        ("gated_mlp_backward", mlp),
    ):
        for a, b in zip(*(get_kernel(each, name)(*args) for each in ("triton", "torch"))):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
