# SPDX-License-Identifier: MIT
"""Attention: the twin against PyTorch and in float64, the kernels against the twin."""

import pytest
import torch
import torch.nn.functional as F

from oss_fused.errors import SchemeError, ShapeMismatchError
from oss_fused.kernels.flash_attention import backward as backward_kernel
from oss_fused.kernels.flash_attention import forward as forward_kernel
from oss_fused.kernels.flash_attention import reference
from oss_fused.kernels.flash_attention.tile import Tiles
from oss_fused.kernels.op import get_kernel
from oss_fused.quant.formats import E4M3, E5M2

OFF = {
    "mask": None,
    "sinks": None,
    "slopes": None,
    "q_scale": None,
    "k_scale": None,
    "v_scale": None,
    "out_scale": None,
    "scale": 0.25,
    "causal": False,
    "window_left": -1,
    "window_right": -1,
    "dropout_p": 0.0,
    "seed": 7,
}
SCALES = ("q_scale", "k_scale", "v_scale", "out_scale")


def operands(heads=1, kv=1, n=70, m=70, d=16, dv=16, dtype=torch.float32, device="cpu", batch=1):
    g = torch.Generator().manual_seed(n + m)
    shapes = ((batch, heads, n, d), (batch, kv, m, d), (batch, kv, m, dv))
    return tuple(torch.randn(s, generator=g).to(dtype).to(device) for s in shapes)


def random_mask(n, m, device, heads=1):
    mask = torch.rand(1, heads, n, m, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[:, :, 3:4] = False
    return mask.to(device)


def forward(backend, tensors, **options):
    return get_kernel(backend, "flash_attention")(*tensors, *{**OFF, **options}.values())


def backward(backend, grad, tensors, results, **options):
    rest = {k: v for k, v in {**OFF, **options}.items() if k not in SCALES}
    run = get_kernel(backend, "flash_attention_backward")
    return run(grad, *tensors, *results, *rest.values())


def assert_near(got, want, tolerance):
    # of what is 0 but for rounding, against values of size 1
    norm = want.double().norm().clamp(min=0.3 * want.numel() ** 0.5)
    error = (got.double() - want.double()).norm() / norm
    assert error <= tolerance, float(error)


# float32: sums in another order. Halves: weights are rounded at another maximum than the twin's
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}

# sizes, options, whether mask, sinks and slopes come with them
CASES = {
    "plain": ({}, {}, False),
    "causal": ({}, {"causal": True}, False),
    "causal with extras": ({"heads": 2, "n": 40, "m": 40}, {"causal": True}, True),
    "window": ({"n": 100, "m": 100}, {"window_left": 40, "window_right": 7}, False),
    "window with extras": ({}, {"window_left": 12, "window_right": 20}, True),
    "window and causal": ({}, {"window_left": 30, "window_right": 4, "causal": True}, False),
    "only itself": ({}, {"window_left": 0, "window_right": 0}, False),
    "ahead": ({}, {"window_right": 30}, False),
    "more keys": ({"n": 33, "m": 90}, {"causal": True}, True),
    "more queries": ({"n": 90, "m": 33}, {"window_left": 10}, False),
    "even blocks": ({"n": 32, "m": 64}, {}, False),
    "wide heads": ({"n": 33, "m": 30, "d": 144, "dv": 136}, {"causal": True}, False),
    "padded heads": ({"n": 20, "m": 33, "d": 20, "dv": 8}, {}, False),
    "dropout": ({"heads": 2, "n": 20, "m": 40}, {"dropout_p": 0.3}, True),
    # of numbers in tuples Triton makes constants where they are 1
    "seed and window of one": (
        {"heads": 2, "n": 20, "m": 40},
        {"dropout_p": 0.3, "seed": 1, "window_left": 1, "window_right": 1},
        True,
    ),
    "one row": ({"n": 1}, {}, True),
}


@pytest.mark.parametrize("case", CASES)
def test_kernels_equal_the_twin(case, device):
    shape, options, extras = CASES[case]
    tensors = operands(**shape, device=device)
    heads, n, m = *tensors[0].shape[1:3], tensors[1].shape[2]
    if extras:
        options = {
            **options,
            "mask": random_mask(n, m, device, heads=1 if "dropout_p" in options else heads),
            "sinks": torch.tensor([0.3, -1.0], device=device)[:heads],
            "slopes": torch.tensor([0.5, 0.03], device=device)[:heads],
        }
    if case == "window with extras":
        del options["sinks"]
    want, got = (forward(backend, tensors, **options) for backend in ("torch", "triton"))
    for ours, theirs in zip(got, want):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert_near(ours, theirs, TOLERANCE[torch.float32])
    grad = torch.randn(want[0].shape, generator=torch.Generator().manual_seed(2)).to(device)
    wanted = backward("torch", grad, tensors, want, **options)
    for ours, theirs in zip(backward("triton", grad, tensors, want, **options), wanted):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert_near(ours, theirs, TOLERANCE[torch.float32])


@pytest.mark.parametrize("dim,dim_v", [(32, 32), (80, 80), (144, 136), (256, 256)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves(dtype, dim, dim_v, device):
    sizes = {"heads": 2, "kv": 1, "n": 40, "m": 40, "d": dim, "dv": dim_v}
    tensors = operands(**sizes, dtype=dtype, device=device)
    options = {"causal": True, "scale": dim**-0.5, "dropout_p": 0.1}
    want, got = (forward(backend, tensors, **options) for backend in ("torch", "triton"))
    assert got[0].dtype == dtype
    for ours, theirs in zip(got, want):
        assert_near(ours, theirs, TOLERANCE[dtype])
    grad = torch.randn(want[0].shape, generator=torch.Generator().manual_seed(2))
    grad = grad.to(dtype).to(device)
    wanted = backward("torch", grad, tensors, want, **options)
    for ours, theirs in zip(backward("triton", grad, tensors, want, **options), wanted):
        assert_near(ours, theirs, TOLERANCE[dtype])


@pytest.mark.parametrize("causal", [False, True])
def test_the_twin_is_pytorchs_attention(causal, device):
    tensors = operands(heads=4, kv=2, device=device)
    found = forward("torch", tensors, causal=causal)[0]
    wanted = F.scaled_dot_product_attention(*tensors, is_causal=causal, scale=0.25, enable_gqa=True)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def formula(q, k, v, mask, sinks, slopes, scale, left):
    """Attention with everything that no function of PyTorch has, by autograd's own operations."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    m, n = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    logits = q @ k.mT * scale - slopes[:, None, None] * (m - n).abs()
    logits = logits.masked_fill(~(mask & (n >= m - left)), -1e300)
    sink = sinks[:, None, None].expand(*logits.shape[:3], 1)
    return torch.softmax(torch.cat([logits, sink], -1), -1)[..., :-1] @ v


def test_the_twin_with_every_extra_in_float64():
    q, k, v = operands(heads=4, kv=2, n=9, m=12, dtype=torch.float64)
    mask, sinks = random_mask(9, 12, "cpu"), torch.randn(4, dtype=torch.float64)
    slopes = torch.rand(4, dtype=torch.float64)
    options = {"mask": mask, "sinks": sinks, "slopes": slopes, "window_left": 3}
    out, row_max, row_sum = forward("torch", (q, k, v), **options)
    wanted = formula(q, k, v, mask, sinks, slopes, 0.25, 3)
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    assert row_max.dtype == row_sum.dtype == torch.float64 and (row_sum >= 1).all()


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_rows_that_see_nothing_are_zero(backend, device):
    tensors = operands(n=20, device=device)
    mask = torch.ones(1, 1, 20, 70, dtype=torch.bool, device=device)
    mask[..., 5:9, :] = False
    results = forward(backend, tensors, mask=mask)
    for t in results:
        assert (t[:, :, 5:9] == 0).all() and t.isfinite().all()
    assert (results[0][:, :, 9:] != 0).any()
    # beyond the last key's window there is nothing at all
    far = forward(backend, operands(n=80, m=33, device=device), window_left=4)
    assert (far[0][:, :, 37:] == 0).all() and (far[0][:, :, 36] != 0).any()
    grad = torch.ones_like(results[0])
    dq, dk, dv = backward(backend, grad, tensors, results, mask=mask)
    assert (dq[:, :, 5:9] == 0).all()
    assert all(t.isfinite().all() for t in (dq, dk, dv))


def test_dropout_has_the_variance_of_the_theory(device):
    """v is constant: out = sum of kept weights / (1 - p), variance p / (1 - p) sum(P^2)."""
    q, k, _ = operands(n=2048, m=64, device=device)
    v = torch.ones(1, 1, 64, 16, device=device)
    p = 0.25
    out = forward("torch", (q, k, v), dropout_p=p, scale=0.01)[0][..., 0]
    assert abs(float(out.mean()) - 1) < 0.01
    # of nearly equal weights: p / (1 - p) / 64; five deviations of a variance of 2048 samples
    assert float(out.var()) == pytest.approx(p / (1 - p) / 64, rel=0.16)
    options = {"dropout_p": p, "scale": 0.01}
    part = (q[:, :, :30], k, v)
    first, again = (forward("triton", part, **options)[0][..., 0] for _ in "12")
    assert torch.equal(first, again)
    torch.testing.assert_close(first, out[..., :30])
    assert not torch.equal(first, forward("triton", part, **options, seed=8)[0][..., 0])


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("dim,dim_v", [(32, 16), (128, 128)])
def test_fp8_operands(fmt, dim, dim_v, device):
    tensors = operands(n=40, m=70, d=dim, dv=dim_v, device=device)
    codes, scales = [], []
    for t in tensors:
        scale = t.abs().amax((0, 1, 2)) / fmt.max
        codes.append((t / scale).to(fmt.dtype))
        scales.append(scale)
    names = dict(zip(("q_scale", "k_scale", "v_scale"), scales))
    want, got = (forward(backend, codes, causal=True, **names) for backend in ("torch", "triton"))
    assert got[0].dtype == torch.bfloat16
    for ours, theirs in zip(got, want):
        assert_near(ours, theirs, TOLERANCE[torch.bfloat16])
    wide = [c.float() * s for c, s in zip(codes, scales)]
    assert_near(got[0], forward("torch", wide, causal=True)[0], 0.02)
    # v alone, beside bfloat16, and the result in FP8
    mixed = [tensors[0].bfloat16(), tensors[1].bfloat16(), codes[2]]
    only = {"v_scale": scales[2], "out_scale": tensors[2].abs().amax((0, 1, 2)) / 448}
    want, got = (forward(backend, mixed, **only)[0] for backend in ("torch", "triton"))
    assert got.dtype == torch.float8_e4m3fn
    assert (want.view(torch.uint8) == got.view(torch.uint8)).float().mean() > 0.97
    exact = forward("torch", [*tensors[:2], wide[2]])[0]
    assert_near(got.float() * only["out_scale"], exact, 0.05)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_special_values_reach_only_who_sees_them(backend, device):
    q, k, v = operands(device=device)
    q[0, 0, 4] = float("nan")
    out = forward(backend, (q, k, v))[0]
    assert out[0, 0, 4].isnan().all() and out.isnan().sum() == out.shape[-1]
    q, k, v = operands(device=device)
    k[0, 0, 50, 0] = float("nan")
    out = forward(backend, (q, k, v), causal=True)[0]
    assert out[:, :, 50:].isnan().all() and out[:, :, :50].isfinite().all()
    q, k, v = operands(device=device)
    v[0, 0, 2, 3] = float("inf")
    out = forward(backend, (q, k, v))[0]
    assert (out[..., 3] == float("inf")).all() and out[..., :3].isfinite().all()


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("factor", [0.0, 1e-7, 1e4])
def test_magnitudes(backend, factor, device):
    """Zeros and tiny logits average the values; huge ones pick a single value, without overflow."""
    q, k, v = operands(device=device)
    out = forward(backend, (q * factor, k, v))[0]
    if factor < 1:
        mean = v.mean(2, keepdim=True).expand_as(out)
        torch.testing.assert_close(out, mean, rtol=1e-4, atol=1e-5)
    else:
        chosen = (q.double() @ k.double().mT).argmax(-1)
        picked = v[:, 0][:, chosen[0, 0]]
        torch.testing.assert_close(out[:, 0], picked, rtol=1e-3, atol=1e-3)


def test_strided_and_empty(device):
    g = torch.Generator().manual_seed(0)
    # [B, N, 3, H, D], the layout of a fused projection
    packed = torch.randn(2, 20, 3, 2, 16, generator=g).to(device)
    q, k, v = packed.permute(2, 0, 3, 1, 4)
    got = forward("triton", (q, k, v), causal=True)[0]
    assert_near(got, forward("torch", (q, k, v), causal=True)[0], TOLERANCE[torch.float32])
    turned = (t.mT.contiguous().mT for t in (q, k, v))
    assert torch.equal(forward("triton", tuple(turned), causal=True)[0], got)
    for shape in ({"n": 0}, {"m": 0}, {"batch": 0}):
        tensors = operands(**shape, device=device)
        for backend in ("torch", "triton"):
            results = forward(backend, tensors)
            assert results[0].shape == tensors[0].shape and (results[0] == 0).all()
            grads = backward(backend, torch.ones_like(results[0]), tensors, results)
            assert [t.shape for t in grads] == [t.shape for t in tensors]
            assert all((t == 0).all() for t in grads)


@pytest.mark.parametrize("side", ["window_left", "window_right"])
@pytest.mark.parametrize("size", [39, 40, 2**31 - 1, 2**63 - 1])
def test_a_window_over_all_rows_limits_nothing(side, size, device):
    """Also where its size added to a position leaves 32 or 64 bits."""
    tensors = operands(n=40, m=30, device=device)
    want = forward("torch", tensors)
    found = forward("triton", tensors, **{side: size})
    assert_near(found[0], want[0], TOLERANCE[torch.float32])
    grad = torch.ones_like(want[0])
    grads = backward("triton", grad, tensors, want, **{side: size})
    for ours, theirs in zip(grads, backward("torch", grad, tensors, want)):
        assert_near(ours, theirs, TOLERANCE[torch.float32])


def test_tiles_do_not_change_the_result(device):
    tensors = operands(n=40, m=70, device=device)
    want = forward("torch", tensors, causal=True, window_left=40)
    options = {**OFF, "causal": True, "window_left": 40}
    for tiles in (Tiles(16, 64, 4, 1), Tiles(64, 16, 4, 2)):
        found = forward_kernel.flash_attention(*tensors, *options.values(), config=tiles)
        for ours, theirs in zip(found, want):
            assert_near(ours, theirs, TOLERANCE[torch.float32])


@pytest.mark.parametrize("limit", [99 * 1024, 227 * 1024])
@pytest.mark.parametrize("dim", [16, 64, 80, 128, 160, 256])
def test_tiles_fit_shared_memory(limit, dim, monkeypatch):
    """Operands held, and each stage's keys and values, of sm_86 and of sm_90."""
    gpu, block = torch.device("cuda"), min(128, 1 << (dim - 1).bit_length())
    for module, held in ((forward_kernel, 1), (backward_kernel, 2)):
        monkeypatch.setattr(module, "shared_memory", lambda device: limit)
        tiles = module._tiles(gpu, torch.bfloat16, dim, dim)
        used = 2 * block * (held * tiles.block_m + tiles.stages * 2 * tiles.block_n)
        assert used <= limit and (dim <= 128 or tiles.stages == 1)
    # a mask's tiles are in flight, too
    tiles = forward_kernel._tiles(gpu, torch.bfloat16, dim, dim, masked=True)
    mask = tiles.stages * tiles.block_m * tiles.block_n
    used = 2 * block * (tiles.block_m + tiles.stages * 2 * tiles.block_n) + mask
    assert used <= limit
    assert forward_kernel._tiles(gpu, torch.float32, dim, dim).block_m == 32


def test_bad_arguments_are_named(device):
    q, k, v = operands(heads=2, device=device)
    mask = torch.ones(1, 3, 70, 70, dtype=torch.bool, device=device)
    cases = [
        (ShapeMismatchError, r"mask.shape=\(1, 3, 70, 70\): expected \[B, 1 or 2", {"mask": mask}),
        (SchemeError, "scale=-1.0", {"scale": -1.0}),
        (SchemeError, "dropout_p=1.0", {"dropout_p": 1.0}),
        (SchemeError, "window_left=-2", {"window_left": -2}),
        (
            SchemeError,
            "v_scale=given: expected .* v is FP8",
            {"v_scale": torch.ones(16).to(device)},
        ),
        (ShapeMismatchError, r"sinks.shape", {"sinks": torch.ones(5, device=device)}),
    ]
    for error, words, options in cases:
        with pytest.raises(error, match=words):
            forward("torch", (q, k, v), **options)
    with pytest.raises(SchemeError, match="k_scale=None"):
        forward("torch", (q, k.to(torch.float8_e5m2), v))
    with pytest.raises(ShapeMismatchError, match=r"k.shape=\(1, 3, 70, 16\): expected Hkv"):
        forward("torch", (q, k.repeat(1, 3, 1, 1), v.repeat(1, 3, 1, 1)))
    assert reference.product_dtype(q.to(torch.float8_e5m2)) == torch.bfloat16
