# SPDX-License-Identifier: MIT
# %% [markdown]
# # 5. Elementwise kernels and reductions
#
# **Goal.** Write kernels whose cost is memory traffic: a vector addition, three activations, and a
# sum. State their speed as bytes per second, and as a share of what a copy reaches.
#
# An elementwise kernel reads each input once and writes each output once. It does one or two
# operations per value. A GPU can do hundreds of operations in the time that it takes to read one
# value from memory, so the arithmetic is free and only bytes count.

# %%
import functools

import book
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from oss_fused.bench.accuracy import check_accuracy
from oss_fused.bench.timing import copies_for, time_graphs
from oss_fused.kernels.checks import FLOAT_DTYPES, check_dtype, check_same_device, check_shape
from oss_fused.kernels.integers import cdiv
from oss_fused.kernels.numerics import round_to

# %% [markdown]
# ## Vector addition
#
# A program takes `BLOCK_SIZE` neighbours. `program_id` says which block is its own. The mask cuts
# what lies beyond N, so any N works. Sums are float32, and `round_to` rounds once at the end.
#
# `to(tl.int64)` is needed: block number times block size passes 2^31 for tensors of two billion
# values, and an int32 would wrap to a negative offset.


# %%
@triton.jit
def _add_kernel(a, b, out, n, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n
    total = tl.load(a + offsets, mask=mask).to(tl.float32)
    total += tl.load(b + offsets, mask=mask).to(tl.float32)
    tl.store(out + offsets, round_to(total, out.dtype.element_ty), mask=mask)


def add(a: torch.Tensor, b: torch.Tensor, BLOCK_SIZE: int = 1024) -> torch.Tensor:
    """``a + b`` of two vectors [N] of one floating dtype, added in float32.

    Raises:
        ShapeMismatchError: the shapes differ.
        UnsupportedDtypeError: not floating, or the dtypes differ.
        UnsupportedDeviceError: different devices.
    """
    check_dtype("a", a, FLOAT_DTYPES)
    check_dtype("b", b, (a.dtype,))
    check_shape("a", a, (a.numel(),))
    check_shape("b", b, tuple(a.shape))
    check_same_device(a, b=b)
    out = torch.empty_like(a, memory_format=torch.contiguous_format)
    if out.numel():
        grid = (cdiv(out.numel(), BLOCK_SIZE),)
        _add_kernel[grid](a.contiguous(), b.contiguous(), out, out.numel(), BLOCK_SIZE)
    return out


# %% [markdown]
# A launcher checks its arguments before it launches. A kernel cannot: it sees pointers, and a wrong
# shape would read memory of another tensor.
#
# ## Three activations
#
# ReLU, GELU (tanh form) and the sum with a scalar differ in one line. The load, the mask and the
# launch are shared.


# %%
@triton.jit
def _load(x, n, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n
    return tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32), offsets, mask


@triton.jit
def _relu_kernel(x, out, n, BLOCK_SIZE: tl.constexpr):
    value, offsets, mask = _load(x, n, BLOCK_SIZE)
    # not a maximum with 0, which would swallow NaN
    value = tl.where(value < 0.0, 0.0, value)
    tl.store(out + offsets, round_to(value, out.dtype.element_ty), mask=mask)


@triton.jit
def _gelu_tanh_kernel(x, out, n, BLOCK_SIZE: tl.constexpr):
    value, offsets, mask = _load(x, n, BLOCK_SIZE)
    # 0.5 * (1 + tanh(z)) = 1 / (1 + e^(-2 z)) with z = sqrt(2 / pi) * (x + 0.044715 x^3)
    twice = 1.5957691216057308 * (value + 0.044715 * value * value * value)
    value = value / (1.0 + tl.exp(-twice))
    tl.store(out + offsets, round_to(value, out.dtype.element_ty), mask=mask)


@triton.jit
def _add_scalar_kernel(x, out, n, scalar, BLOCK_SIZE: tl.constexpr):
    value, offsets, mask = _load(x, n, BLOCK_SIZE)
    tl.store(out + offsets, round_to(value + scalar, out.dtype.element_ty), mask=mask)


def _launch(kernel, x: torch.Tensor, *scalars: float, BLOCK_SIZE: int) -> torch.Tensor:
    check_dtype("x", x, FLOAT_DTYPES)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.numel():
        grid = (cdiv(out.numel(), BLOCK_SIZE),)
        kernel[grid](x.contiguous(), out, out.numel(), *scalars, BLOCK_SIZE=BLOCK_SIZE)
    return out


def relu(x: torch.Tensor, BLOCK_SIZE: int = 1024) -> torch.Tensor:
    """``max(x, 0)``; raises UnsupportedDtypeError where x is not floating."""
    return _launch(_relu_kernel, x, BLOCK_SIZE=BLOCK_SIZE)


def gelu_tanh(x: torch.Tensor, BLOCK_SIZE: int = 1024) -> torch.Tensor:
    """``0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`` (Hendrycks and Gimpel 2016)."""
    return _launch(_gelu_tanh_kernel, x, BLOCK_SIZE=BLOCK_SIZE)


def add_scalar(x: torch.Tensor, scalar: float, BLOCK_SIZE: int = 1024) -> torch.Tensor:
    """``x + scalar``, added in float32."""
    return _launch(_add_scalar_kernel, x, float(scalar), BLOCK_SIZE=BLOCK_SIZE)


# %% [markdown]
# NaN and Inf must pass through. `tl.maximum(x, 0)` would return 0 for NaN, and a broken model would
# look sound. That is why ReLU compares.
#
# ## Do they compute the right thing?
#
# Before any time is taken, each result is compared with float64.


# %%
def correctness(n: int = 3000, block: int = 256) -> list[dict]:
    """Relative L2 error of each kernel against float64, for N that no block divides."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(0)).to(book.DEVICE)
    exact = x.double()
    pairs = {
        "add": (add(x, x, block), exact + exact),
        "relu": (relu(x, block), F.relu(exact)),
        "gelu (tanh)": (gelu_tanh(x, block), F.gelu(exact, approximate="tanh")),
        "add scalar": (add_scalar(x, 0.3, block), exact + 0.3),
    }
    rows = []
    for name, (found, wanted) in pairs.items():
        result = check_accuracy(found, wanted)
        error = result.metrics.relative_l2
        rows.append({"kernel": name, "N": n, "relative L2": error, "accepted": result.passed})
    return rows


if __name__ == "__main__":
    book.show(book.table(correctness(), book.here("N = 3000 float32")))

# %% [markdown]
# ## How fast is it?
#
# `add` moves three times N values: two read, one written. Effective bandwidth is these bytes over
# the time. The roof is not the datasheet but a copy of a large tensor, measured on the same GPU.
#
# Under the interpreter a time says nothing about a GPU. It is shown so that you see a compiled
# kernel is needed before any statement about speed. The Python loop adds one value at a time.


# %%
def python_loop(a: list[float], b: list[float]) -> list[float]:
    """Sums of pairs, one after the other."""
    return [x + y for x, y in zip(a, b)]


def speed(sizes: tuple[int, ...] = (10_000, 40_000), block: int = 4096) -> list[dict]:
    """Time and effective GB/s of ``add``, of PyTorch and of a Python loop."""
    rows = []
    for n in sizes:
        a, b = torch.ones(n, device=book.DEVICE), torch.ones(n, device=book.DEVICE)
        # a loop over a few thousand values is enough to know its rate
        part = [t[: min(n, 1000)].tolist() for t in (a, b)]
        calls = {
            "triton": (functools.partial(add, a, b, block), n),
            "pytorch": (functools.partial(torch.add, a, b), n),
            "python loop": (functools.partial(python_loop, *part), len(part[0])),
        }
        for name, (call, count) in calls.items():
            ms, spread, _ = book.timed(call)
            row = {"N": n, "kernel": name, "ms": ms * n / count, "RSD": book.percent(spread)}
            rows.append(row | {"GB/s": 12 * count / ms * 1e-6})
    return rows


def gpu_rows(bandwidth: float):
    """Additions of 1e6, 4e6 and 16e6 on this GPU, for scripts/bench_operators.py.

    Args:
        bandwidth: of a copy, bytes per second.
    """
    for n in (1_000_000, 4_000_000, 16_000_000):
        nbytes = 3 * 4 * n
        sets = [
            (torch.randn(n, device="cuda"), torch.randn(n, device="cuda"))
            for _ in range(copies_for(nbytes))
        ]
        verdict = check_accuracy(add(*sets[0]), sets[0][0].double() + sets[0][1].double())
        us = time_graphs({"add": [functools.partial(add, *one) for one in sets]}, 10)["add"].median
        share = nbytes / (us * 1e-6) / bandwidth
        yield {
            "operation": "vector add",
            "implementation": "tutorial",
            "problem": f"{n}",
            "us": us,
            "value": f"{nbytes / us * 1e-3:7.0f} GB/s {share:6.1%} of copy",
            "error": verdict.reason,
            "gbps": nbytes / us * 1e-3,
            "share": share,
        }


def h200_additions() -> list[dict]:
    """The same on one H200, at N = 1e6, 4e6 and 16e6."""
    rows = book.measured_rows("operators-teaching.json", "rows", operation="vector add")
    sizes = [row["problem"] for row in rows] or ["1000000", "4000000", "16000000"]
    found = {row["problem"]: row for row in rows}
    return [
        {
            "N": n,
            "us": found.get(n, {}).get("us"),
            "GB/s": found.get(n, {}).get("gbps"),
            "of a copy": book.percent(found.get(n, {}).get("share")),
        }
        for n in sizes
    ]


if __name__ == "__main__":
    book.show(book.table(speed(), book.here("float32", True)))
    book.show(book.table(h200_additions(), book.source("operators-teaching.json")))

# %% [markdown]
# ## A sum
#
# A reduction has one more question: how do partial results meet? A program adds its block to one
# number. Then either a second launch adds these numbers, or each program adds its own to one
# place with an atomic. The first way gives the same bits on every run. The second does not, because
# float addition is not associative and the order of atomics is free. This package uses the first.


# %%
@triton.jit
def _sum_kernel(x, out, n, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    values = tl.load(x + offsets, mask=offsets < n, other=0.0).to(tl.float32)
    tl.store(out + tl.program_id(0), tl.sum(values, 0))


def total(x: torch.Tensor, BLOCK_SIZE: int = 1024) -> torch.Tensor:
    """Sum of all values of x as a float32 scalar; the same bits on every run.

    Raises:
        UnsupportedDtypeError: x is not floating.
    """
    check_dtype("x", x, FLOAT_DTYPES)
    part = x.contiguous().flatten()
    if not part.numel():
        return torch.zeros((), device=x.device)
    while part.numel() > 1 or part.dtype != torch.float32:
        blocks = cdiv(part.numel(), BLOCK_SIZE)
        found = torch.empty(blocks, device=x.device)
        _sum_kernel[(blocks,)](part, found, part.numel(), BLOCK_SIZE)
        part = found
    return part[0]


def launches(n: int, BLOCK_SIZE: int = 1024) -> int:
    """How often ``total`` launches its kernel for n float32 values."""
    return 0 if n <= 1 else 1 + launches(cdiv(n, BLOCK_SIZE), BLOCK_SIZE)


# %% [markdown]
# Masked lanes get `other=0.0`, the neutral element of a sum. A maximum needs minus infinity. A
# wrong neutral element is the most frequent error in reductions, and N that fills its blocks hides
# it.
#
# ## The production version
#
# The package has no elementwise kernel of its own: it fuses them into the kernel before or after.
# Its reductions work on rows. `layer_norm_stats` returns mean and variance of each row, which is
# the reduction of this chapter per row.


# %%
def rows_compared(rows: int = 4, columns: int = 500, block: int = 128) -> list[dict]:
    """Row means by ``total`` and by the package's ``layer_norm_stats``."""
    from oss_fused import layer_norm_stats

    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)).to(book.DEVICE)
    exact = x.double().mean(-1)
    mine = torch.stack([total(row, block) for row in x]) / columns
    theirs = layer_norm_stats(x)[0]
    return [
        {"version": name, "launches": count, "largest error": float((found - exact).abs().max())}
        for name, found, count in (
            ("total", mine, rows * launches(columns, block)),
            ("layer_norm_stats", theirs, 1),
        )
    ]


if __name__ == "__main__":
    book.show(book.table(rows_compared(), book.here("4 x 500 float32")))


# %% [markdown]
# ## Acceptance numbers


# %%
def acceptance() -> list[book.Bar]:
    """Times of the library's suite scatter little; additions reach the bandwidth of a copy."""
    file = "library-norm/library-suite.json"
    rows = book.measured_rows(file, "rows", implementation="oss_fused", status="ok")
    spread = [row["relative_std"] for row in rows]
    shares = [
        row["share"]
        for row in book.measured_rows("operators-teaching.json", "rows", operation="vector add")
    ]
    return [
        book.Bar(
            "largest relative standard deviation of a time",
            0.05,
            max(spread, default=None),
            file,
            at_most=True,
        ),
        book.Bar(
            "vector addition of 16e6, of a copy",
            0.9,
            (shares or [None])[-1],
            "operators-teaching.json",
        ),
    ]


if __name__ == "__main__":
    book.show(book.bars(acceptance()))

# %% [markdown]
# ## Questions
#
# **Why 1024 values per block?** Four warps of 32 threads then take eight float32 each: two loads of
# 16 bytes. Far fewer leave loads short; far more take registers and help nothing.
#
# **Why is PyTorch as fast?** Its addition is limited by the same bytes. A hand-written elementwise
# kernel pays only where it saves a trip through memory, see [epilogues](12-epilogue-patterns.py).
#
# **My mask is right and the last values are wrong.** Look at `other`. A masked load without it
# returns an undefined value.
#
# ## Exercises
#
# 1. Write `silu(x) = x / (1 + e^-x)` with the helpers of this chapter. What does it give for -200?
# 2. Compute the bytes that `gelu_tanh(add_scalar(x, c))` moves as two kernels and as one.
# 3. Change `total` into the maximum of all values. Which neutral element does the mask need?
#
# Answers: [answers/05-elementwise-and-reduction.py](answers/05-elementwise-and-reduction.py).
#
# Next: [a matrix product](06-matmul.py), where arithmetic counts too.
