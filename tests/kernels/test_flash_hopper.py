# SPDX-License-Identifier: MIT
"""The Gluon kernels of attention: when they are chosen, and on a Hopper GPU what they return."""

import pytest
import torch

from oss_fused.kernels.flash_attention import forward as forward_kernel
from oss_fused.kernels.flash_attention import tile
from oss_fused.kernels.launch import runs_gluon
from oss_fused.kernels.op import get_kernel

CUDA = torch.device("cuda")
BF16, HALF = torch.bfloat16, torch.float16
# no mask, sinks, slopes nor scales
NOTHING = (None,) * 7


def operands(heads=2, kv=2, n=64, m=64, d=64, dv=64, dtype=BF16, device="cpu", batch=1):
    g = torch.Generator().manual_seed(n + m)
    shapes = ((batch, heads, n, d), (batch, kv, m, d), (batch, kv, m, dv))
    return tuple(torch.randn(s, generator=g).to(dtype).to(device) for s in shapes)


def run(backend, tensors, causal=False, scale=None, dropout_p=0.0):
    scale = scale or tensors[0].shape[3] ** -0.5
    kernel = get_kernel(backend, "flash_attention")
    return kernel(*tensors, *NOTHING, scale, causal, -1, -1, dropout_p, 0)


@pytest.mark.parametrize(
    "shape,taken",
    [
        ({"n": 2048}, True),
        ({"n": 2047}, False),
        ({"dtype": HALF, "d": 128, "dv": 72}, True),
        ({"d": 33, "dv": 72}, False),
        ({"d": 136}, False),
        ({"d": 128, "dv": 32}, False),
        ({"d": 128, "m": 0}, False),
        ({"d": 128, "dtype": torch.float32}, False),
    ],
)
def test_the_rule(shape, taken, monkeypatch):
    monkeypatch.setattr(tile, "runs_gluon", lambda device: True)
    assert forward_kernel._for_hopper(*operands(**shape)) == taken
    monkeypatch.setattr(tile, "runs_gluon", lambda device: False)
    assert not forward_kernel._for_hopper(*operands(**shape))


def test_the_rule_of_strides(monkeypatch):
    monkeypatch.setattr(tile, "runs_gluon", lambda device: True)
    q, k, v = operands(d=128, dv=128)
    assert tile.for_hopper(q.transpose(1, 2), k, v)
    for other in (q.mT, q[:, :1].expand(-1, 2, -1, -1), q.flatten()[4:-124].view(1, 1, -1, 128)):
        assert not tile.for_hopper(other, k, v)


@pytest.fixture
def hopper(monkeypatch):
    """Heads of 64 take the kernel at any length."""
    if not runs_gluon(CUDA):
        pytest.skip("needs a Hopper GPU and Gluon")
    monkeypatch.setattr(forward_kernel, "_LONG", 1)


def assert_near(got, want):
    for ours, theirs, tolerance in zip(got, want, (5e-3, 1e-3, 1e-3)):
        error = (ours.double() - theirs.double()).norm() / theirs.double().norm().clamp_min(1e-6)
        assert ours.dtype == theirs.dtype and error < tolerance, float(error)


LENGTHS = (
    # batch, heads, KV heads, queries, keys
    (1, 2, 2, 1, 1),
    (1, 1, 1, 64, 128),
    (2, 4, 2, 130, 257),
    (1, 3, 1, 777, 333),
    (1, 2, 1, 1000, 1500),
    (1, 2, 2, 2048, 2048),
)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [BF16, HALF])
@pytest.mark.parametrize("d,dv", [(64, 64), (128, 128), (80, 80), (40, 128), (72, 48)])
def test_lengths(hopper, d, dv, dtype, causal):
    for batch, heads, kv, n, m in LENGTHS:
        tensors = operands(heads, kv, n, m, d, dv, dtype, CUDA, batch)
        assert tile.for_hopper(*tensors)
        assert_near(run("triton", tensors, causal), run("torch", tensors, causal))


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128])
def test_runs_are_equal_bit_by_bit(hopper, d):
    """A buffer overwritten too early would show in one of them."""
    tensors = operands(8, 8, 3000, 3000, d, d, device=CUDA, batch=2)
    first = run("triton", tensors)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, run("triton", tensors)))


@pytest.mark.gpu
def test_rows_of_a_fused_projection(hopper):
    packed = torch.randn(2, 300, 3, 4, 64, device=CUDA, dtype=BF16)
    tensors = packed.permute(2, 0, 3, 1, 4).unbind(0)
    assert tile.for_hopper(*tensors)
    assert_near(run("triton", tensors, True), run("torch", tensors, True))


@pytest.mark.gpu
def test_special_values_reach_only_who_sees_them(hopper):
    q, k, v = operands(n=300, m=300, device=CUDA)
    q[0, 0, 4] = float("nan")
    out = run("triton", (q, k, v))[0]
    assert out[0, 0, 4].isnan().all() and out.isnan().sum() == 64
    q, k, v = operands(n=300, m=300, device=CUDA)
    k[0, :, 150, 0] = float("nan")
    out = run("triton", (q, k, v), causal=True)[0]
    assert out[:, :, 150:].isnan().all() and out[:, :, :150].isfinite().all()
    # huge logits pick one value, and nothing overflows; another head's rows lie behind the last
    q, k, v = operands(n=300, m=300, device=CUDA)
    out, row_max, row_sum = run("triton", (q * 1e4, k, v))
    assert all(t.isfinite().all() for t in (out, row_max, row_sum))
    k[0, 1] = float("nan")
    assert run("triton", (q, k, v))[0][0, 0].isfinite().all()


def gradients(backend, grad, tensors, results, causal):
    run = get_kernel(backend, "flash_attention_backward")
    scale = tensors[0].shape[3] ** -0.5
    return run(grad, *tensors, *results, None, None, None, scale, causal, -1, -1, 0.0, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [BF16, HALF])
@pytest.mark.parametrize("d,dv", [(64, 64), (128, 128), (80, 80), (40, 128), (72, 48)])
def test_gradients(hopper, d, dv, dtype, causal):
    """From the statistics of the kernel's own forward."""
    for batch, heads, kv, n, m in LENGTHS:
        tensors = operands(heads, kv, n, m, d, dv, dtype, CUDA, batch)
        results = run("triton", tensors, causal)
        grad = torch.randn_like(results[0])
        found = gradients("triton", grad, tensors, results, causal)
        wanted = gradients("torch", grad, tensors, run("torch", tensors, causal), causal)
        for ours, theirs in zip(found, wanted):
            norm = theirs.double().norm().clamp_min(0.1 * theirs.numel() ** 0.5)
            assert (ours.double() - theirs.double()).norm() < 0.01 * norm


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128])
def test_runs_of_gradients_are_equal_bit_by_bit(hopper, d):
    tensors = operands(8, 4, 2000, 3000, d, d, device=CUDA, batch=2)
    results = run("triton", tensors, True)
    grad = torch.randn_like(results[0])
    first = gradients("triton", grad, tensors, results, True)
    for _ in range(4):
        again = gradients("triton", grad, tensors, results, True)
        assert all(torch.equal(a, b) for a, b in zip(first, again))
