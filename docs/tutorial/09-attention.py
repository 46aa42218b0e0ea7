# SPDX-License-Identifier: MIT
# %% [markdown]
# # 9. Attention, from three kernels to flash
#
# **Goal.** Compute `softmax(q k' / sqrt(D)) v` at three levels and see what each writes to memory.
#
# | level | kernels | goes through memory |
# |---|---|---|
# | a | product, softmax, product | logits and weights, each [B, H, N, N] |
# | b | product and softmax in one, product | weights [B, H, N, N] |
# | c | flash: one kernel | neither |
#
# q and k are [B, H, N, D], v is [B, H, N, Dv].

# %%
import functools

import book
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from oss_fused import flash_attention, softmax
from oss_fused.bench.accuracy import Tolerance, check_accuracy
from oss_fused.bench.problems import AttentionInput
from oss_fused.bench.timing import time_graphs
from oss_fused.errors import ShapeMismatchError
from oss_fused.kernels.checks import FLOAT_DTYPES, check_dtype, check_same_device
from oss_fused.kernels.integers import cdiv, next_power_of_2
from oss_fused.kernels.numerics import INTERPRETED, round_to

_BLOCK = 32
_LOG2E = tl.constexpr(1.4426950408889634)

# %% [markdown]
# ## A product of every head
#
# Axis 0 of the grid counts heads. The strides of the second operand are arguments, so that k' is k
# read with its strides exchanged: no copy.


# %%
@triton.jit
def _tile(base, first, rows, column, columns, stride, step, BLOCK_R: tl.constexpr, BLOCK_C):
    row = first + tl.arange(0, BLOCK_R)[:, None]
    cols = column + tl.arange(0, BLOCK_C)[None, :]
    mask = (row < rows) & (cols < columns)
    tile = tl.load(base + row * stride + cols * step, mask=mask, other=0.0)
    if INTERPRETED:
        # the interpreter multiplies bfloat16 bit patterns
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def _product_kernel(
    a, b, out, m, n, k, scale, stride_bk, stride_bn, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr
):
    """out [M, N] = scale * a [M, K] b [K, N] of one head; axis 0 counts heads."""
    head = tl.program_id(0).to(tl.int64)
    a += head * m * k
    b += head * k * n
    first, column = tl.program_id(1) * BLOCK, tl.program_id(2) * BLOCK
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for start in range(0, k, BLOCK_K):
        left = _tile(a, first, m, start, k, k, 1, BLOCK, BLOCK_K)
        right = _tile(b, start, k, column, n, stride_bk, stride_bn, BLOCK_K, BLOCK)
        acc = tl.dot(left, right, acc, input_precision="ieee")
    row = first + tl.arange(0, BLOCK)[:, None]
    cols = column + tl.arange(0, BLOCK)[None, :]
    place = out + head * m * n + row * n + cols
    tl.store(place, round_to(acc * scale, out.dtype.element_ty), mask=(row < m) & (cols < n))


def _checked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if not q.dim() == k.dim() == v.dim() == 4 or q.shape[3] != k.shape[3]:
        raise ShapeMismatchError(
            f"q.shape={tuple(q.shape)}, k.shape={tuple(k.shape)}: expected [B, H, N, D] of one D"
        )
    if q.shape[:2] != k.shape[:2] or k.shape[:3] != v.shape[:3]:
        raise ShapeMismatchError(
            f"k.shape={tuple(k.shape)}, v.shape={tuple(v.shape)}: expected the batch, heads and "
            f"keys of each other, and of q.shape={tuple(q.shape)}"
        )
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_dtype(name, tensor, FLOAT_DTYPES if name == "q" else (q.dtype,))
    check_same_device(q, k=k, v=v)
    return q.contiguous(), k.contiguous(), v.contiguous()


def _product(
    a: torch.Tensor, b: torch.Tensor, columns: int, scale: float, strides: tuple[int, int]
) -> torch.Tensor:
    """a [B, H, M, K] times b, whose element (k, n) lies at ``strides``; [B, H, M, columns]."""
    batch, heads, rows, inner = a.shape
    out = torch.empty(batch, heads, rows, columns, dtype=a.dtype, device=a.device)
    if out.numel():
        grid = (batch * heads, cdiv(rows, _BLOCK), cdiv(columns, _BLOCK))
        _product_kernel[grid](
            a, b, out, rows, columns, inner, scale, *strides, BLOCK=_BLOCK, BLOCK_K=_BLOCK
        )
    return out


# %% [markdown]
# ## Level a: three kernels


# %%
def attention_a(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Three kernels; logits and weights [B, H, N, N] go through memory."""
    q, k, v = _checked(q, k, v)
    dim = q.shape[3]
    # k' is k read with its strides exchanged
    logits = _product(q, k, k.shape[2], dim**-0.5, (1, dim))
    return _product(softmax(logits), v, v.shape[3], 1.0, (v.shape[3], 1))


# %% [markdown]
# ## Level b: product and softmax in one
#
# A program owns a block of queries. It walks over the keys twice: the first walk finds the running
# maximum and sum of [chapter 7](07-softmax-and-layernorm.py), the second computes the logits again
# and writes weights. Computing twice is cheaper than writing N x N logits. `2^x` with logits
# scaled by log2(e) is one instruction; `e^x` is two.


# %%
@triton.jit
def _weights_kernel(
    q, k, out, queries, keys, dim, scale, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Softmax of q k' of BLOCK queries: one walk over the keys for the sum, one to write."""
    head = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    k += head * keys * dim
    tile = _tile(q + head * queries * dim, first, queries, 0, dim, dim, 1, BLOCK, BLOCK_D)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    scale *= _LOG2E
    for start in range(0, keys, BLOCK):
        other = _tile(k, start, keys, 0, dim, dim, 1, BLOCK, BLOCK_D)
        logits = tl.dot(tile, tl.trans(other), input_precision="ieee") * scale
        n = start + tl.arange(0, BLOCK)[None, :]
        logits = tl.where(n < keys, logits, float("-inf"))
        new_best = tl.maximum(best, tl.max(logits, 1))
        total = total * tl.exp2(best - new_best)
        total += tl.sum(tl.exp2(logits - new_best[:, None]), 1)
        best = new_best
    row = first + tl.arange(0, BLOCK)[:, None]
    for start in range(0, keys, BLOCK):
        other = _tile(k, start, keys, 0, dim, dim, 1, BLOCK, BLOCK_D)
        logits = tl.dot(tile, tl.trans(other), input_precision="ieee") * scale
        weights = tl.exp2(logits - best[:, None]) / total[:, None]
        n = start + tl.arange(0, BLOCK)[None, :]
        place = out + head * queries * keys + row * keys + n
        inside = (row < queries) & (n < keys)
        tl.store(place, round_to(weights, out.dtype.element_ty), mask=inside)


def attention_b(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Two kernels; the weights [B, H, N, N] go through memory."""
    q, k, v = _checked(q, k, v)
    batch, heads, queries, dim = q.shape
    weights = torch.empty(batch, heads, queries, k.shape[2], dtype=q.dtype, device=q.device)
    if weights.numel():
        _weights_kernel[(batch * heads, cdiv(queries, _BLOCK))](
            q,
            k,
            weights,
            queries,
            k.shape[2],
            dim,
            dim**-0.5,
            BLOCK=_BLOCK,
            BLOCK_D=max(16, next_power_of_2(dim)),
        )
    return _product(weights, v, v.shape[3], 1.0, (v.shape[3], 1))


# %% [markdown]
# ## Level c: flash
#
# Keep the accumulator too. When a block of keys raises the maximum from m to m', what was summed so
# far is worth `e^(m - m')` of it:
#
# ```
# m' = max(m, max S)
# l' = e^(m - m') l + sum e^(S - m')
# acc' = e^(m - m') acc + e^(S - m') v
# ```
#
# and at the end `acc / l`. Nothing of size N x N exists. Backward needs m and l per row only: it
# computes the weights again. (Dao et al. 2022.)
#
# The step above, in PyTorch, for one head:


# %%
def flash_by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: int = 32):
    """Attention of one head, q, k [N, D], v [N, Dv], by blocks of keys; float32."""
    m = torch.full((q.shape[0], 1), float("-inf"), device=q.device)
    total = torch.zeros_like(m)
    acc = torch.zeros(q.shape[0], v.shape[1], device=q.device)
    for start in range(0, k.shape[0], block):
        logits = q.float() @ k[start : start + block].float().t() / q.shape[1] ** 0.5
        new = torch.maximum(m, logits.amax(1, keepdim=True))
        weights = torch.exp(logits - new)
        total = total * torch.exp(m - new) + weights.sum(1, keepdim=True)
        acc = acc * torch.exp(m - new) + weights @ v[start : start + block].float()
        m = new
    return acc / total


def levels(length: int = 72, dim: int = 16) -> list[dict]:
    """Error and bytes written between kernels of each level, float32, one batch and two heads."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, 2, length, dim)
    q, k, v = (torch.randn(shape, generator=generator).to(book.DEVICE) for _ in "qkv")
    wanted = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    square = 2 * length * length * 4
    found = {
        "a: three kernels": (attention_a(q, k, v), 2 * square),
        "b: two kernels": (attention_b(q, k, v), square),
        "c: by hand": (torch.stack([flash_by_hand(*t) for t in zip(q[0], k[0], v[0])])[None], 0),
        "c: oss_fused": (flash_attention(q, k, v), 0),
    }
    rows = []
    for name, (out, extra) in found.items():
        error = float((out.double() - wanted).abs().max())
        rows.append({"level": name, "N x N bytes written": extra, "largest error": error})
    return rows


if __name__ == "__main__":
    book.show(book.table(levels(), book.here("1x2x72x16 float32")))

# %% [markdown]
# ## Time


# %%
def speed(length: int = 64, dim: int = 16) -> list[dict]:
    """Times of the levels here, and of PyTorch's attention."""
    q, k, v = (torch.randn(1, 1, length, dim, device=book.DEVICE) for _ in "qkv")
    calls = {
        "a": lambda: attention_a(q, k, v),
        "b": lambda: attention_b(q, k, v),
        "c": lambda: flash_attention(q, k, v),
        "pytorch": lambda: F.scaled_dot_product_attention(q, k, v),
    }
    rows = []
    for name, call in calls.items():
        ms, spread, _ = book.timed(call)
        rows.append({"level": name, "ms": ms, "RSD": book.percent(spread)})
    return rows


def gpu_rows(bandwidth: float):
    """The three levels on this GPU, for scripts/bench_operators.py; bandwidth is not needed.

    Yields:
        A row per length and level: us, and peak memory beyond the operands in bytes.
    """
    del bandwidth
    loose = Tolerance(1e-2, 1e-1, "logits and weights rounded to bfloat16 on their way")
    calls = {"level a": attention_a, "level b": attention_b, "level c": flash_attention}
    for length in (512, 1024, 2048, 4096):
        shape = (4, 16, length, 64)
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
        part = [t[:1, :2].float() for t in (q, k, v)]
        wanted = F.scaled_dot_product_attention(part[0], part[1], part[2])
        for name, level in calls.items():
            verdict = check_accuracy(level(q, k, v)[:1, :2].float(), wanted.double(), loose)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            level(q, k, v)
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
            us = time_graphs({name: [functools.partial(level, q, k, v)]}, 10)[name].median
            yield {
                "operation": "attention level",
                "implementation": name,
                "problem": f"N{length} D64",
                "us": us,
                "value": f"{peak / 2**20:9.1f} MiB peak",
                "error": verdict.reason,
                "peak_bytes": peak,
            }
    yield from _windows_timed(loose)


def _windows_timed(tolerance: Tolerance):
    """Causal attention of 32 heads over 8192 tokens, without a window and with two."""
    q, k, v = (torch.randn(1, 32, 8192, 64, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    n = torch.arange(8192, device="cuda")
    part = [t[:, :1].float() for t in (q, k, v)]
    for row in window_cost():
        window = None if row["window_left"] == "none" else row["window_left"]
        call = functools.partial(flash_attention, q, k, v, causal=True, window_left=window)
        seen = n[None, :] <= n[:, None]
        if window is not None:
            seen &= n[None, :] >= n[:, None] - window
        wanted = F.scaled_dot_product_attention(part[0], part[1], part[2], attn_mask=seen)
        verdict = check_accuracy(call()[:, :1].float(), wanted.double(), tolerance)
        us = time_graphs({"window": [call]}, 10)["window"].median
        flops = 32e9 * row["GFLOPs"]
        yield {
            "operation": "attention window",
            "implementation": f"window {row['window_left']}",
            "problem": "N8192 D64",
            "us": us,
            "value": f"{flops * 1e-9:.1f} GFLOPs {32 * row['MB read']:.0f} MB of keys and values",
            "error": verdict.reason,
            "flops": flops,
        }


def h200_levels() -> list[dict]:
    """Time and peak memory of the levels on one H200."""
    rows = []
    for length in (512, 1024, 2048, 4096):
        row = {"N": length}
        for level in "abc":
            found = book.measured_rows(
                "operators-teaching.json",
                "rows",
                operation="attention level",
                implementation=f"level {level}",
                problem=f"N{length} D64",
            )
            row[f"{level}, us"] = found[0]["us"] if found else None
            row[f"{level}, MiB"] = found[0]["peak_bytes"] / 2**20 if found else None
        rows.append(row)
    return rows


if __name__ == "__main__":
    book.show(book.table(speed(), book.here("1x1x64x16 float32", True)))
    note = "B 4, H 16, D 64, bfloat16; MiB beyond the operands."
    book.show(book.table(h200_levels(), note, book.source("operators-teaching.json")))

# %% [markdown]
# ## Masks and windows
#
# A causal mask lets query m see keys n <= m; a window m - WL <= n <= m + WR. Blocks of keys that
# no query of a block sees are not visited. So a window costs O(N (WL + WR)) instead of O(N^2).
# Order: window, causal, padding, then softmax. A row that sees nothing gives 0, not NaN.


# %%
def window_cost(length: int = 8192, block: int = 64, windows=(None, 1024, 128)) -> list[dict]:
    """Blocks of keys that a causal kernel visits; FLOPs, and MB of them in 16 bits, at D = 64."""
    rows = []
    for window in windows:
        blocks = 0
        for first in range(0, length, block):
            start = 0 if window is None else max(0, first - window) // block
            blocks += cdiv(first + block, block) - start
        flops = 4 * blocks * block * block * 64
        row = {"window_left": window or "none", "blocks": blocks, "GFLOPs": flops / 1e9}
        rows.append({**row, "MB read": 4e-6 * blocks * block * 64})
    return rows


def h200_windows() -> list[dict]:
    """The same of 32 heads on one H200."""
    rows = []
    for window in ("none", 1024, 128):
        found = book.measured_rows(
            "operators-teaching.json",
            "rows",
            operation="attention window",
            implementation=f"window {window}",
        )
        rows.append({"window_left": window, "us": found[0]["us"] if found else None})
    return rows


if __name__ == "__main__":
    book.show(
        book.table(window_cost(), "N = 8192, causal, blocks of 64; arithmetic, not measured.")
    )
    book.show(book.table(h200_windows(), "32 heads.", book.source("operators-teaching.json")))


# %% [markdown]
# ## The production version
#
# `oss_fused.flash_attention` takes causal masks, windows, padding masks, dropout, fewer KV heads
# than query heads, sinks, ALiBi and FP8 values in any combination, and is differentiable. What an
# option does not need is not compiled ([operators](../operators.md#functions)).


# %%
def options(length: int = 48) -> list[dict]:
    """Options of the package's kernel against masks in PyTorch."""
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(1, 4, length, 16, generator=generator).to(book.DEVICE)
    k, v = (torch.randn(1, 2, length, 16, generator=generator).to(book.DEVICE) for _ in "kv")
    wide = [t.double() for t in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))]
    n = torch.arange(length, device=book.DEVICE)
    causal = n[None, :] <= n[:, None]
    near = causal & (n[None, :] >= n[:, None] - 8)
    cases = {"causal": ({"causal": True}, causal)}
    cases["causal, window of 8"] = ({"causal": True, "window_left": 8}, near)
    rows = []
    for name, (arguments, seen) in cases.items():
        wanted = F.scaled_dot_product_attention(*wide, attn_mask=seen)
        error = float((flash_attention(q, k, v, **arguments).double() - wanted).abs().max())
        rows.append({"option": name, "KV heads": 2, "largest error": error})
    return rows


if __name__ == "__main__":
    book.show(book.table(options(), book.here("1x4x48x16 float32")))

# %% [markdown]
# ## Acceptance numbers


# %%
def acceptance() -> list[book.Bar]:
    """Flash attention against FlashAttention 3, forward."""
    share = book.measured("summary.json", "operators.flash.vs_fa3_fwd_min")
    return [
        book.Bar(
            "flash attention of FlashAttention 3, forward", 0.6, share, "operators-attention.json"
        )
    ]


if __name__ == "__main__":
    book.show(book.bars(acceptance()))
    flops = AttentionInput(1, 16, 4096, 64).flops
    book.show(f"FLOPs of one call, B 1, H 16, N 4096, D 64: {flops:.3g}.")

# %% [markdown]
# ## Questions
#
# **Why does level a exist at all?** For short N its matrices fit L2, and its products are the
# vendor's. It is also the easiest to check.
#
# **What limits flash attention?** Exponentials, once the products run on tensor cores: each logit
# needs one. That is why the maximum is kept in units of log2.
#
# **My output is NaN in the first rows.** A row that sees no key: `-inf - (-inf)`. Replace the
# maximum by a finite number before you subtract.
#
# ## Exercises
#
# 1. From which N on do the N x N matrices of level a (B 1, H 32, bfloat16) take more than 1 GiB?
# 2. Extend `flash_by_hand` by a causal mask and compare it with PyTorch.
# 3. Merge two partial results (acc, m, l) of different keys into one. Decode attention does this.
#
# Answers: [answers/09-attention.py](answers/09-attention.py).
#
# Next: [autotuning](10-autotuning.py).
