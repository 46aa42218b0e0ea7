# SPDX-License-Identifier: MIT
"""rmsnorm_rope and rope_kv against their references and their formulas."""

import pytest
import torch

from oss_fused import functional as F
from oss_fused.errors import SchemeError, ShapeMismatchError, UnsupportedDtypeError
from oss_fused.kernels.launch import multiprocessors
from oss_fused.kernels.op import get_kernel

FP8 = torch.float8_e4m3fn


def randn(*shape, dtype=torch.bfloat16, device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g).to(dtype).to(device)


def tables(length, dim, device):
    angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(dim // 2) / (dim // 2))
    full = torch.cat([angles, angles], -1)
    return full.cos().to(device), full.sin().to(device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("hidden,head_dim", [(576, 64), (2880, 64), (256, 128), (96, 6)])
def test_rmsnorm_rope(dtype, hidden, head_dim, device):
    x = randn(2, 5, hidden, dtype=dtype, device=device)
    w = randn(hidden, dtype=dtype, device=device, seed=1)
    cos, sin = tables(5, head_dim, device)
    x64 = x.double()
    y = x64 * torch.rsqrt(x64.pow(2).mean(-1, keepdim=True) + 1e-6) * w.double()
    y = y.view(2, 5, -1, head_dim)
    left, right = y.chunk(2, -1)
    want = y * cos[:, None].double() + torch.cat([-right, left], -1) * sin[:, None].double()
    want = want.view(2, 5, hidden)
    for got in (
        F.fused_rmsnorm_rope(x, w, cos, sin),
        get_kernel("triton", "rmsnorm_rope")(x, w, cos, sin, 1e-6),
    ):
        assert got.dtype == dtype and got.shape == x.shape
        assert (got.double() - want).norm() / want.norm() < {2: 4e-3, 4: 1e-6}[dtype.itemsize]


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_rmsnorm_rope_edges(backend, device):
    op = get_kernel(backend, "rmsnorm_rope")
    cos, sin = tables(3, 8, device)
    w = randn(16, device=device)
    assert op(randn(0, 3, 16, device=device), w, cos, sin, 1e-6).shape == (0, 3, 16)
    x = randn(2, 3, 16, device=device)
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(op(strided, w, cos, sin, 1e-6), op(x, w, cos, sin, 1e-6))
    for bad in (float("nan"), float("inf")):
        broken = x.clone()
        broken[1, 2, 5] = bad
        out = op(broken, w, cos, sin, 1e-6)
        assert out[1, 2].isnan().any() and out[0].isfinite().all()
    with pytest.raises(ShapeMismatchError, match="cos.shape"):
        op(x, w, cos[:2], sin[:2], 1e-6)


@pytest.mark.parametrize("heads,dim", [(5, 16), (3, 64), (16, 128), (45, 64), (33, 128), (40, 256)])
def test_rmsnorm_rope_rows_of_a_program(heads, dim, device):
    """What the tuner varies changes no result, whether or not the rows divide evenly."""
    op = get_kernel("triton", "rmsnorm_rope")
    wide = randn(1, 7, heads * dim + 16, device=device)
    args = (wide[..., : heads * dim], randn(heads * dim, device=device), *tables(7, dim, device))
    want = get_kernel("torch", "rmsnorm_rope")(*args, 1e-6).double()
    for config in (None, {"num_warps": 1, "rows": 1, "stages": 1}, {"rows": 2}, {"rows": 16}):
        launch = config and {"num_warps": 4, "stages": 3, **config}
        got = op(*args, 1e-6, launch)
        assert (got.double() - want).norm() / want.norm() < 4e-3


@pytest.mark.parametrize("heads,dim", [(45, 64), (32, 128), (33, 256)])
def test_rmsnorm_rope_of_more_rows_than_run_at_once(heads, dim, device):
    """A program asks L2 for a later row, which may be of another batch or behind the last one."""
    tokens = 4 * multiprocessors(torch.device(device)) + 3
    wide = randn(2, tokens, heads * dim + 16, device=device)
    args = (wide[..., 16:], randn(heads * dim, device=device), *tables(tokens, dim, device))
    want = get_kernel("torch", "rmsnorm_rope")(*args, 1e-6).double()
    got = get_kernel("triton", "rmsnorm_rope")(*args, 1e-6)
    assert (got.double() - want).norm() / want.norm() < 4e-3


def cache_pair(dtype, kv_heads, dim, device, blocks=6, size=16, layout="NHD"):
    """Views [blocks, size, heads, dim] of a fused cache, as vLLM's attention layers hold it."""
    shape = (blocks, kv_heads, size, 2 * dim)
    raw = torch.zeros(shape, dtype=torch.uint8 if dtype == FP8 else dtype, device=device)
    raw = raw.view(FP8) if dtype == FP8 else raw
    if layout == "NHD":
        raw = raw.view(torch.uint8 if dtype == FP8 else dtype).transpose(1, 2).contiguous()
        raw = (raw.view(FP8) if dtype == FP8 else raw).transpose(1, 2)
    return raw.transpose(1, 2).split(dim, -1)


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8])
@pytest.mark.parametrize(
    "tokens,heads,kv_heads,dim,rotary,layout,neox,norm",
    [
        (1, 4, 2, 64, 64, "NHD", True, False),
        (1, 4, 2, 64, 64, "HND", True, True),
        (7, 3, 1, 32, 16, "NHD", True, True),
        (7, 3, 1, 32, 16, "HND", False, False),
        (66, 3, 1, 16, 16, "NHD", True, False),
    ],
)
def test_rope_kv(cache_dtype, tokens, heads, kv_heads, dim, rotary, layout, neox, norm, device):
    wide = randn(tokens, (heads + 2 * kv_heads) * dim + 16, device=device)
    qkv = wide[:, :-16]
    positions = torch.randint(0, 40, (tokens,), device=device)
    table = torch.randn(40, rotary).to(torch.bfloat16).to(device)
    slots = torch.randperm(6 * 16)[:tokens].to(device)
    slots[tokens // 2 :: 3] = -1
    scales = [torch.full((1,), s, device=device) for s in (0.02, 0.03)]
    norms = [randn(dim, device=device, seed=s) if norm else None for s in (3, 4)]
    results = []
    for backend in ("torch", "triton"):
        caches = cache_pair(cache_dtype, kv_heads, dim, device, layout=layout)
        q = get_kernel(backend, "rope_kv")(
            *(qkv, positions, table, heads, neox, *caches, slots, *scales, *norms, 1e-6),
            torch.full((1,), 0.05, device=device) if cache_dtype == FP8 else None,
        )
        results.append((q, *caches))
    for want, got in zip(*results, strict=True):
        want, got = want.double(), got.double()
        assert (got - want).norm() / want.norm().clamp_min(1e-9) < (
            3e-3 if got.dim() == 2 else 8e-3
        )
        assert ((got == 0) == (want == 0)).double().mean() > 0.999


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("tokens", [0, 1, 66])
@pytest.mark.parametrize("rotary", [64, 16])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8])
def test_rope_kv_with_keys(backend, tokens, rotary, cache_dtype, device):
    """Keys that an FP8 cache rounds, and those of padding, are rotated in the rows too."""
    heads, kv_heads, dim = 5, 3, 64
    qkv = randn(tokens, (heads + 2 * kv_heads) * dim, device=device)
    if tokens:
        qkv[0, heads * dim] = torch.nan
    positions = torch.randint(0, 40, (tokens,), device=device)
    table = torch.randn(40, rotary).to(torch.bfloat16).to(device)
    slots = torch.randperm(6 * 16)[:tokens].to(device)
    slots[1::3] = -1
    norms = [randn(dim, device=device, seed=s) for s in (3, 4)]
    rest = (table, heads, True)
    results = []
    for with_keys in (False, True):
        caches = cache_pair(cache_dtype, kv_heads, dim, device)
        q = get_kernel(backend, "rope_kv")(
            qkv, positions, *rest, *caches, slots, None, None, *norms, 1e-6, None, with_keys
        )
        results.append((q, *(cache.float() for cache in caches)))
    (q, *stored), (both, *stored_too) = results
    assert both.shape == (tokens, (heads + kv_heads) * dim)
    for want, got in ((q, both[:, : heads * dim]), *zip(stored, stored_too, strict=True)):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    # the keys are the queries of a projection whose q is its k
    k = qkv.view(tokens, heads + 2 * kv_heads, dim)[:, heads : heads + kv_heads].flatten(1)
    as_q = torch.cat([k, k, k], 1)
    want = get_kernel("torch", "rope_kv")(
        *(as_q, positions, table, kv_heads, True),
        *(*cache_pair(torch.bfloat16, kv_heads, dim, device), slots - slots - 1),
        *(None, None, norms[1], norms[1], 1e-6),
    )
    torch.testing.assert_close(both[:, heads * dim :], want, rtol=2**-7, atol=2**-7, equal_nan=True)


def test_opcheck_with_keys(device):
    index = torch.arange(4, device=device)
    caches = cache_pair(torch.bfloat16, 1, 16, device)
    args = (
        randn(4, 64, device=device),
        index,
        randn(8, 16, device=device),
        2,
        True,
        *caches,
        index,
    )
    args = (*args, None, None, None, None, 1e-6, None, True)
    torch.library.opcheck(torch.ops.oss_fused.rope_kv.default, args)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_rope_kv_keeps_no_keys_beside_a_quantised_q(backend, device):
    index = torch.arange(4, device=device)
    caches = cache_pair(FP8, 1, 16, device)
    one = torch.ones(1, device=device)
    with pytest.raises(SchemeError, match="with_keys=True: expected no q_scale"):
        get_kernel(backend, "rope_kv")(
            *(randn(4, 48, device=device), index, randn(8, 16, device=device), 1, True),
            *(*caches, index, one, one, None, None, 1e-6, one, True),
        )


def test_rope_kv_rotates_pairs(device):
    qkv = torch.zeros(1, 3 * 4, device=device)
    qkv[0, 0] = 1.0
    table = torch.tensor([[0.0, 1.0, 1.0, 0.0]], device=device)  # 90 degrees, then 0
    caches = [torch.zeros(1, 1, 1, 4, device=device) for _ in range(2)]
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    for neox, place in ((True, 2), (False, 1)):
        q = torch.ops.oss_fused.rope_kv(
            qkv, slots, table, 1, neox, *caches, slots, None, None, None, None, 1e-6
        )
        assert q[0, place] == 1 and q.abs().sum() == 1


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_rope_kv_empty_and_fewer_slots(backend, device):
    op = get_kernel(backend, "rope_kv")
    table = randn(8, 16, device=device)
    caches = cache_pair(torch.bfloat16, 1, 16, device)
    none = (None, None, None, None, 1e-6)
    index = torch.arange(4, device=device)
    empty = randn(0, 48, device=device)
    assert op(empty, index[:0], table, 1, True, *caches, index[:0], *none).shape == (0, 16)
    op(randn(4, 48, device=device), index, table, 1, True, *caches, index[:2], *none)
    assert caches[1][0, :2].abs().sum() > 0 and caches[1][0, 2:].abs().sum() == 0
    with pytest.raises(ShapeMismatchError, match="qkv.shape"):
        op(randn(4, 40, device=device), index, table, 1, True, *caches, index, *none)


def test_opcheck(device, check_op):
    cos, sin = tables(3, 8, device)
    args = (randn(2, 3, 16, device=device), randn(16, device=device), cos, sin, 1e-6)
    check_op(torch.ops.oss_fused.rmsnorm_rope.default, args)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_cache_has_the_dtype_of_qkv_or_is_fp8(backend, device):
    index = torch.arange(4, device=device)
    table, qkv = randn(8, 16, device=device), randn(4, 48, device=device)
    caches = cache_pair(torch.float16, 1, 16, device)
    words = "key_cache.dtype=torch.float16: expected one of float8_e4m3fn, bfloat16"
    with pytest.raises(UnsupportedDtypeError, match=words):
        get_kernel(backend, "rope_kv")(
            *(qkv, index, table, 1, True, *caches, index), None, None, None, None, 1e-6
        )
