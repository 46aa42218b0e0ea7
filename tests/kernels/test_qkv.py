# SPDX-License-Identifier: MIT
"""QKV projection, rotary embedding and cache write as one operator.

On a CPU the parts run one after another; on a GPU the same tests reach the kernel that joins them.
"""

from __future__ import annotations

import pytest
import torch

from oss_fused.errors import ShapeMismatchError, UnsupportedDtypeError
from oss_fused.kernels.op import get_kernel
from tests.kernels.test_rope import cache_pair

FP8 = torch.float8_e4m3fn


def problem(tokens, heads, kv_heads, dim, hidden, cache_dtype, device, **changes):
    """Arguments of qkv_rope_kv but for x and its scale; ``run`` makes the caches."""
    torch.manual_seed(tokens)
    width = (heads + 2 * kv_heads) * dim
    weight = torch.randn(width, hidden) / hidden**0.5
    codes, scale = get_kernel("torch", "quantize_fp8")(weight.to(device), None, "channel")
    slots = torch.randperm(96)[:tokens]
    slots[tokens // 2 :: 3] = -1
    fp8 = cache_dtype == FP8
    one = [torch.full((1,), s, device=device) for s in (0.02, 0.03, 0.04)]
    arguments = {
        "weight": codes,
        "weight_scale": scale,
        "bias": torch.randn(width, device=device).bfloat16(),
        "out_dtype": torch.bfloat16,
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


def run(backend, x, x_scale, arguments, cache_dtype):
    """q, k cache, v cache."""
    kv_heads = arguments["weight"].shape[0] // arguments["cos_sin_cache"].shape[1]
    kv_heads = (kv_heads - arguments["num_heads"]) // 2
    caches = cache_pair(cache_dtype, kv_heads, arguments["cos_sin_cache"].shape[1], x.device)
    named = arguments | {"key_cache": caches[0], "value_cache": caches[1]}
    weight, *rest = named.values()
    return get_kernel(backend, "qkv_rope_kv")(x, weight, x_scale, *rest), *caches


def codes_of(x):
    return get_kernel("torch", "quantize_fp8")(x, None, "token")


def assert_close(got, want):
    for mine, theirs in zip(got, want, strict=True):
        # a code or a bfloat16 may fall on the other side of a rounding
        tolerance = 2e-2 if mine.dtype == FP8 else 1e-2
        mine, theirs = mine.double(), theirs.double()
        assert (mine - theirs).norm() / theirs.norm().clamp_min(1e-9) < tolerance
        assert ((mine == 0) == (theirs == 0)).double().mean() > 0.99


@pytest.mark.parametrize(
    "tokens,heads,kv_heads,dim,hidden,cache_dtype",
    [
        (1, 2, 1, 64, 192, torch.bfloat16),
        (1, 2, 1, 128, 256, FP8),
        (5, 2, 1, 128, 256, torch.bfloat16),
        (7, 2, 1, 64, 144, torch.bfloat16),
        (16, 3, 1, 64, 144, FP8),
        (17, 2, 1, 64, 128, torch.bfloat16),
        (40, 3, 1, 64, 400, FP8),
        (128, 2, 1, 128, 144, torch.bfloat16),
        # more than one launch holds
        (129, 2, 1, 64, 128, torch.bfloat16),
    ],
)
def test_agrees_with_reference(tokens, heads, kv_heads, dim, hidden, cache_dtype, device):
    arguments = problem(tokens, heads, kv_heads, dim, hidden, cache_dtype, device)
    x, x_scale = codes_of(torch.randn(tokens, hidden, device=device).bfloat16())
    want = run("torch", x, x_scale, arguments, cache_dtype)
    # twice: the counts of the first launch must be gone
    for _ in range(2):
        assert_close(run("triton", x, x_scale, arguments, cache_dtype), want)


@pytest.mark.parametrize("changes", ["gpt-j", "norm", "no bias"])
def test_what_the_kernel_leaves_to_its_parts(changes, device):
    dim = 64
    other = {
        "gpt-j": {"is_neox": False},
        "norm": {k: torch.rand(dim, device=device).bfloat16() for k in ("q_norm", "k_norm")},
        "no bias": {"bias": None},
    }[changes]
    arguments = problem(3, 2, 1, dim, 128, torch.bfloat16, device, **other)
    x, x_scale = codes_of(torch.randn(3, 128, device=device).bfloat16())
    results = [run(b, x, x_scale, arguments, torch.bfloat16) for b in ("triton", "torch")]
    assert_close(*results)


@pytest.mark.parametrize("tokens", [4, 90])
def test_not_a_number_stays_in_its_token(tokens, device):
    arguments = problem(tokens, 2, 1, 64, 128, torch.bfloat16, device)
    arguments["slot_mapping"] = torch.arange(tokens, device=device)
    x = torch.randn(tokens, 128, device=device).bfloat16()
    x[1, 7], x[2, 9] = float("nan"), float("inf")
    x, x_scale = codes_of(x)
    for backend in ("torch", "triton"):
        q, keys, values = run(backend, x, x_scale, arguments, torch.bfloat16)
        assert q.isnan().all(1).nonzero().flatten().tolist() == [1, 2]
        assert q[[0, *range(3, tokens)]].isfinite().all()
        assert values[0, :4].isnan().flatten(1).all(1).tolist() == [False, True, True, False]
        assert keys[0, [0, 3]].isfinite().all()


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_no_tokens_and_wrong_shapes(backend, device):
    arguments = problem(0, 2, 1, 64, 128, torch.bfloat16, device)
    x, x_scale = codes_of(torch.randn(0, 128, device=device).bfloat16())
    assert run(backend, x, x_scale, arguments, torch.bfloat16)[0].shape == (0, 128)
    with pytest.raises(ShapeMismatchError):
        run(backend, x[:, :64], x_scale, arguments, torch.bfloat16)
    with pytest.raises(UnsupportedDtypeError, match="key_cache.dtype=torch.float16: expected one"):
        run(backend, x, x_scale, arguments, torch.float16)


def test_opcheck(device):
    arguments = problem(3, 2, 1, 64, 128, torch.bfloat16, device)
    caches = cache_pair(torch.bfloat16, 1, 64, device)
    arguments |= {"key_cache": caches[0].contiguous(), "value_cache": caches[1].contiguous()}
    x, x_scale = codes_of(torch.randn(3, 128, device=device).bfloat16())
    weight, *rest = arguments.values()
    torch.library.opcheck(
        torch.ops.oss_fused.qkv_rope_kv.default,
        (x, weight, x_scale, *rest),
        test_utils=("test_autograd_registration", "test_faketensor"),
    )
