# SPDX-License-Identifier: MIT
"""[norm,] QKV projection, rotary embedding and cache write as one operator.

On a CPU the parts run one after another; on a GPU the same tests reach the kernel that joins them.
"""

from __future__ import annotations

import pytest
import torch

from oss_fused.errors import ShapeMismatchError
from oss_fused.kernels.op import get_kernel
from tests.kernels.test_rope import cache_pair

FP8 = torch.float8_e4m3fn
EPS = 1e-5


def problem(tokens, heads, kv_heads, dim, hidden, cache_dtype, device, **changes):
    """Arguments of norm_qkv_rope_kv, without x and residual; caches last made, at 6 and 7."""
    torch.manual_seed(tokens)
    width = (heads + 2 * kv_heads) * dim
    weight = torch.randn(width, hidden) / hidden**0.5
    codes, scale = get_kernel("torch", "quantize_fp8")(weight.to(device), None, "channel")
    slots = torch.randperm(96)[:tokens]
    slots[tokens // 2 :: 3] = -1
    fp8 = cache_dtype == FP8
    one = [torch.full((1,), s, device=device) for s in (0.02, 0.03, 0.04)]
    arguments = {
        "gain": torch.rand(hidden, device=device).bfloat16(),
        "norm_eps": EPS,
        "weight": codes,
        "weight_scale": scale,
        "bias": torch.randn(width, device=device).bfloat16(),
        "positions": torch.randint(0, 40, (tokens,), device=device),
        "cos_sin_cache": torch.randn(40, dim).bfloat16().to(device),
        "num_heads": heads,
        "is_neox": True,
        "key_cache": None,
        "value_cache": None,
        "slot_mapping": slots.to(device),
        "k_scale": one[0] if fp8 else None,
        "v_scale": one[1] if fp8 else None,
        "q_norm": None,
        "k_norm": None,
        "eps": 1e-6,
        "q_scale": one[2] if fp8 else None,
    }
    return arguments | changes


def run(backend, x, residual, arguments, cache_dtype):
    """q, k cache, v cache, new residual; the norm apart where residual is "codes"."""
    kv_heads = arguments["weight"].shape[0] // arguments["cos_sin_cache"].shape[1]
    kv_heads = (kv_heads - arguments["num_heads"]) // 2
    caches = cache_pair(cache_dtype, kv_heads, arguments["cos_sin_cache"].shape[1], x.device)
    arguments = arguments | {"key_cache": caches[0], "value_cache": caches[1]}
    if residual != "codes":
        q, added = get_kernel(backend, "norm_qkv_rope_kv")(x, residual, *arguments.values())
        return q, *caches, added
    codes, scale, added, _ = get_kernel(backend, "add_rms_norm_quant")(
        x, None, arguments.pop("gain"), arguments.pop("norm_eps"), None, False
    )
    rest = list(arguments.values())
    q = get_kernel(backend, "qkv_rope_kv")(codes, rest[0], scale, *rest[1:3], x.dtype, *rest[3:])
    return q, *caches, added


def assert_close(got, want):
    for mine, theirs in zip(got, want, strict=True):
        mine, theirs = mine.double(), theirs.double()
        # a code or a bfloat16 may fall on the other side of a rounding
        assert (mine - theirs).norm() / theirs.norm().clamp_min(1e-9) < 1e-2
        assert ((mine == 0) == (theirs == 0)).double().mean() > 0.99


@pytest.mark.parametrize(
    "form,tokens,heads,kv_heads,dim,hidden,cache_dtype",
    [
        ("first layer", 1, 2, 1, 64, 192, torch.bfloat16),
        ("residual", 1, 2, 1, 128, 256, FP8),
        ("codes", 5, 2, 1, 128, 256, torch.bfloat16),
        ("residual", 7, 2, 1, 64, 144, torch.bfloat16),
        ("codes", 16, 3, 1, 64, 144, FP8),
        ("residual", 16, 3, 1, 64, 144, FP8),
        ("residual", 17, 2, 1, 64, 128, torch.bfloat16),
    ],
)
def test_agrees_with_reference(form, tokens, heads, kv_heads, dim, hidden, cache_dtype, device):
    arguments = problem(tokens, heads, kv_heads, dim, hidden, cache_dtype, device)
    x = torch.randn(tokens, hidden, device=device).bfloat16()
    residual = {"first layer": None, "residual": torch.randn_like(x), "codes": "codes"}[form]
    want = run("torch", x, residual, arguments, cache_dtype)
    # twice: the counts of the first launch must be gone
    for _ in range(2):
        assert_close(run("triton", x, residual, arguments, cache_dtype), want)


@pytest.mark.parametrize("changes", ["gpt-j", "norm", "no bias"])
def test_what_the_kernel_leaves_to_its_parts(changes, device):
    dim = 64
    other = {
        "gpt-j": {"is_neox": False},
        "norm": {k: torch.rand(dim, device=device).bfloat16() for k in ("q_norm", "k_norm")},
        "no bias": {"bias": None},
    }[changes]
    arguments = problem(3, 2, 1, dim, 128, torch.bfloat16, device, **other)
    x = torch.randn(3, 128, device=device).bfloat16()
    results = [run(b, x, None, arguments, torch.bfloat16) for b in ("triton", "torch")]
    assert_close(*results)


def test_not_a_number_stays_in_its_token(device):
    arguments = problem(4, 2, 1, 64, 128, torch.bfloat16, device)
    arguments["slot_mapping"] = torch.arange(4, device=device)
    x = torch.randn(4, 128, device=device).bfloat16()
    x[1, 7], x[2, 9] = float("nan"), float("inf")
    for backend in ("torch", "triton"):
        q, keys, values, added = run(backend, x, None, arguments, torch.bfloat16)
        assert q.isnan().all(1).tolist() == [False, True, True, False]
        assert q[[0, 3]].isfinite().all()
        assert values[0, :4].isnan().flatten(1).all(1).tolist() == [False, True, True, False]
        assert keys[0, [0, 3]].isfinite().all()
        assert torch.equal(added.isnan(), x.isnan())


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_no_tokens_and_wrong_shapes(backend, device):
    arguments = problem(0, 2, 1, 64, 128, torch.bfloat16, device)
    x = torch.randn(0, 128, device=device).bfloat16()
    assert run(backend, x, None, arguments, torch.bfloat16)[0].shape == (0, 128)
    with pytest.raises(ShapeMismatchError):
        run(backend, x[:, :64], None, arguments, torch.bfloat16)


@pytest.mark.parametrize(
    "tokens,n,k,static",
    [(1, 96, 144, False), (2, 80, 256, False), (3, 64, 128, True), (5, 33, 128, False)],
)
def test_linear_add(tokens, n, k, static, device):
    torch.manual_seed(n)
    weight = (torch.randn(n, k) / k**0.5).to(device)
    codes, scale = get_kernel("torch", "quantize_fp8")(weight, None, "channel")
    # strided rows, as a slice of a wider tensor leaves them
    x = torch.randn(tokens, 2 * k, device=device).bfloat16()[:, :k]
    residual = torch.randn(tokens, n, device=device).bfloat16()
    bias = torch.randn(n, device=device).bfloat16() if n != 80 else None
    args = (x, codes, scale, torch.full((1,), 0.01, device=device) if static else None, bias)
    want = get_kernel("torch", "fp8_linear_add")(*args, residual)
    got = get_kernel("triton", "fp8_linear_add")(*args, residual)
    assert (got.double() - want.double()).norm() / want.double().norm() < 5e-3
    x[0, 3] = float("nan")
    got = get_kernel("triton", "fp8_linear_add")(*args, residual)
    assert got[0].isnan().all()
    assert got[1:].isfinite().all()
    assert torch.ops.oss_fused.fp8_linear_add(x[:0], *args[1:], residual[:0]).shape == (0, n)
    with pytest.raises(ShapeMismatchError, match="residual.shape"):
        get_kernel("triton", "fp8_linear_add")(*args, residual[:, :-1])


def test_opcheck(device):
    arguments = problem(3, 2, 1, 64, 128, torch.bfloat16, device)
    caches = cache_pair(torch.bfloat16, 1, 64, device)
    arguments |= {"key_cache": caches[0].contiguous(), "value_cache": caches[1].contiguous()}
    x = torch.randn(3, 128, device=device).bfloat16()
    tests = ("test_autograd_registration", "test_faketensor")
    args = (x, x.clone(), *arguments.values())
    torch.library.opcheck(torch.ops.oss_fused.norm_qkv_rope_kv.default, args, test_utils=tests)
    codes, scale = torch.ops.oss_fused.quantize_fp8(x, None, "token")
    rest = list(arguments.values())[2:]
    args = (codes, rest[0], scale, *rest[1:3], torch.bfloat16, *rest[3:])
    torch.library.opcheck(torch.ops.oss_fused.qkv_rope_kv.default, args, test_utils=tests)
    args = (x, *rest[:2], None, rest[2], torch.randn(3, 256, device=device).bfloat16())
    torch.library.opcheck(torch.ops.oss_fused.fp8_linear_add.default, args, test_utils=tests)
