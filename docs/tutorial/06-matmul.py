# SPDX-License-Identifier: MIT
# %% [markdown]
# # 6. A matrix product in five steps
#
# **Goal.** Take a Triton kernel from correct to fast, one change per step, and know what each
# change is worth: `a [M, K] @ b [K, N]`, from version v0 to v4.
#
# | step | what is new | what it fixes |
# |---|---|---|
# | v0 | one program per row and 128 columns; one `k` at a time | nothing yet: it is correct |
# | v1 | 64 x 64 tiles, `tl.dot` | each value loaded serves 64 results; tensor cores |
# | v2 | 128 x 128 tiles, `num_stages=3`, grouped order | loads hide behind products; L2 reuse |
# | v3 | tile sizes, warps, stages as arguments | the tuner picks them per shape and device |
# | v4 | bias and SiLU before the store | two round trips of the result through memory |

# %%
import functools

import book
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from oss_fused.bench.accuracy import check_accuracy
from oss_fused.errors import ShapeMismatchError
from oss_fused.kernels.checks import FLOAT_DTYPES, check_dtype, check_same_device, check_shape
from oss_fused.kernels.integers import cdiv
from oss_fused.kernels.numerics import INTERPRETED, round_to

# %% [markdown]
# ## v0: correct
#
# A program owns one row of `a` and 128 columns of `b`. Per step of `k` it loads 1 + 128 values for
# 128 multiplications and additions. Two operations per loaded value of two bytes is about one
# FLOP per byte. Where arithmetic is to be the limit, a GPU needs over a hundred, as
# [the roofline](11-roofline.py) shows. Whatever else we do, reuse comes first.

# %%
_NAIVE_COLUMNS = 128


@triton.jit
def _matmul_naive_kernel(
    a,
    b,
    out,
    n,
    k,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = cols < n
    acc = tl.zeros([BLOCK_N], tl.float32)
    for i in range(0, k):
        scalar = tl.load(a + row * stride_am + i * stride_ak).to(tl.float32)
        line = tl.load(b + i * stride_bk + cols * stride_bn, mask=mask, other=0.0)
        acc += scalar * line.to(tl.float32)
    tl.store(out + row * n + cols, round_to(acc, out.dtype.element_ty), mask=mask)


def _checked_output(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ShapeMismatchError(
            f"a.shape={tuple(a.shape)}, b.shape={tuple(b.shape)}: expected [M, K] and [K, N]"
        )
    check_dtype("a", a, FLOAT_DTYPES)
    check_dtype("b", b, (a.dtype,))
    check_same_device(a, b=b)
    return torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)


def matmul_v0(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Naive: every program reads its row of a and all of its columns of b alone."""
    out = _checked_output(a, b)
    m, n = out.shape
    if out.numel():
        _matmul_naive_kernel[(m, cdiv(n, _NAIVE_COLUMNS))](
            a, b, out, n, a.shape[1], *a.stride(), *b.stride(), BLOCK_N=_NAIVE_COLUMNS
        )
    return out


# %% [markdown]
# ## One kernel for v1 to v4
#
# A program owns a tile of the result. It keeps it in registers as float32, walks along `k`, loads a
# tile of `a` and a tile of `b`, and lets `tl.dot` run them through the tensor cores. A tile of
# 64 x 64 uses each loaded value 64 times.
#
# Three rules hold for every kernel of this repository and start here: offsets in int64, masks on
# every ragged dimension, accumulation in float32.


# %%
@triton.jit
def _matmul_tile_kernel(
    a,
    b,
    bias,
    out,
    m,
    n,
    k,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    SILU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    # GROUP_M row blocks walk the columns of b together: they find them in L2
    pid = tl.program_id(0)
    blocks_m = tl.cdiv(m, BLOCK_M)
    blocks_n = tl.cdiv(n, BLOCK_N)
    group = pid // (GROUP_M * blocks_n)
    inside = pid % (GROUP_M * blocks_n)
    size = tl.minimum(blocks_m - group * GROUP_M, GROUP_M)
    offs_m = ((group * GROUP_M + inside % size) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    offs_n = ((inside // size) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    offs_k = tl.arange(0, BLOCK_K).to(tl.int64)
    a_ptrs = a + offs_m[:, None] * stride_am + offs_k[None, :] * stride_ak
    b_ptrs = b + offs_k[:, None] * stride_bk + offs_n[None, :] * stride_bn
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, k, BLOCK_K):
        in_k = offs_k < k - start
        tile_a = tl.load(a_ptrs, mask=(offs_m[:, None] < m) & in_k[None, :], other=0.0)
        tile_b = tl.load(b_ptrs, mask=in_k[:, None] & (offs_n[None, :] < n), other=0.0)
        if INTERPRETED:
            # the interpreter multiplies bfloat16 bit patterns
            tile_a, tile_b = tile_a.to(tl.float32), tile_b.to(tl.float32)
        acc = tl.dot(tile_a, tile_b, acc, input_precision="ieee")
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    if bias is not None:
        acc += tl.load(bias + offs_n, mask=offs_n < n, other=0.0).to(tl.float32)[None, :]
    if SILU:
        # a power of two with log2(e) in the factor: half the instructions of tl.exp
        acc = tl.fdiv(acc, 1.0 + tl.exp2(acc * -1.4426950408889634))
    mask = (offs_m[:, None] < m) & (offs_n[None, :] < n)
    out_ptrs = out + offs_m[:, None] * n + offs_n[None, :]
    tl.store(out_ptrs, round_to(acc, out.dtype.element_ty), mask=mask)


def _launch_tiles(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, silu: bool, **config: int
) -> torch.Tensor:
    out = _checked_output(a, b)
    m, n = out.shape
    if out.numel() == 0:
        return out
    if bias is not None:
        check_shape("bias", bias, (n,))
        bias = bias.contiguous()
    grid = (cdiv(m, config["BLOCK_M"]) * cdiv(n, config["BLOCK_N"]),)
    _matmul_tile_kernel[grid](
        a, b, bias, out, m, n, a.shape[1], *a.stride(), *b.stride(), SILU=silu, **config
    )
    return out


# %% [markdown]
# ## v1: tiles
#
# `num_stages=1`: the program waits for its loads, multiplies, and waits again. Tiles follow each
# other row by row (`GROUP_M=1`).


# %%
def matmul_v1(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Tiles on tensor cores: a loaded value serves a whole tile; loads and products alternate."""
    tile = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "GROUP_M": 1}
    return _launch_tiles(a, b, None, False, **tile, num_warps=4, num_stages=1)


# %% [markdown]
# ## v2: pipeline and order
#
# The same kernel, other constants. `num_stages=3` tells Triton to keep the next tiles on their way
# to shared memory while the current ones are multiplied. The tile grows to 128 x 128, because each
# value is then used 128 times. `GROUP_M=8`: eight row blocks walk over the columns of `b` together,
# so that a column tile is read from memory once and seven times from L2.

# %%
# a good tile of 4096^2 bfloat16 on Hopper before any tuning
UNTUNED = {
    "BLOCK_M": 128,
    "BLOCK_N": 128,
    "BLOCK_K": 64,
    "GROUP_M": 8,
    "num_warps": 4,
    "num_stages": 3,
}


def matmul_v2(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Larger tiles, three of them in flight while one is multiplied, and grouped tile order."""
    return _launch_tiles(a, b, None, False, **UNTUNED)


# %% [markdown]
# How much does the order save? Count the tiles of `a` and `b` that one wave of programs reads for
# the first time. A wave is what runs at once: here one program per multiprocessor.


# %%
def first_reads(blocks: int, wave: int, group: int) -> int:
    """Different tiles of a and b that the first ``wave`` programs of blocks x blocks tiles touch.

    Args:
        blocks: tiles along M and along N.
        wave: programs that run at once.
        group: GROUP_M.
    """
    touched = set()
    for pid in range(min(wave, blocks * blocks)):
        inside = pid % (group * blocks)
        size = min(blocks - pid // (group * blocks) * group, group)
        touched |= {("a", pid // (group * blocks) * group + inside % size), ("b", inside // size)}
    return len(touched)


def order_rows(blocks: int = 32, wave: int = 132) -> list[dict]:
    """Row and column tiles that a wave needs, by GROUP_M."""
    return [
        {"GROUP_M": group, "programs at once": wave, "tile rows and columns": reads}
        for group in (1, 4, 8, 16)
        if (reads := first_reads(blocks, wave, group))
    ]


if __name__ == "__main__":
    book.show(
        book.table(order_rows(), "4096^2 in tiles of 128: 32 x 32 tiles, 132 multiprocessors.")
    )

# %% [markdown]
# ## v3: let the machine choose
#
# `matmul_v3` takes its config as arguments, which is all that `TritonAutoTuner` asks of a kernel.
# [Chapter 10](10-autotuning.py) tunes it.


# %%
def matmul_v3(
    a: torch.Tensor,
    b: torch.Tensor,
    BLOCK_M: int = 128,
    BLOCK_N: int = 256,
    BLOCK_K: int = 64,
    GROUP_M: int = 8,
    num_warps: int = 8,
    num_stages: int = 3,
) -> torch.Tensor:
    """v2 with its config as arguments, for the tuner; the default is a common one for Hopper."""
    tile = {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "BLOCK_K": BLOCK_K, "GROUP_M": GROUP_M}
    return _launch_tiles(a, b, None, False, **tile, num_warps=num_warps, num_stages=num_stages)


# %% [markdown]
# ## v4: use what is in registers
#
# A linear layer with bias and SiLU costs eager PyTorch three kernels, and the result crosses
# memory five times. `matmul_v4` adds the bias row and applies SiLU to the accumulator before its
# one store. The kernels that serve are built on this step: scales, bias, activation and
# quantisation all live in [epilogues](12-epilogue-patterns.py).


# %%
def matmul_v4(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor,
    BLOCK_M: int = 128,
    BLOCK_N: int = 256,
    BLOCK_K: int = 64,
    GROUP_M: int = 8,
    num_warps: int = 8,
    num_stages: int = 3,
) -> torch.Tensor:
    """``silu(a @ b + bias)``: the epilogue works on registers and saves two trips to memory."""
    tile = {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "BLOCK_K": BLOCK_K, "GROUP_M": GROUP_M}
    return _launch_tiles(a, b, bias, True, **tile, num_warps=num_warps, num_stages=num_stages)


# %% [markdown]
# ## Every step is the same product
#
# On a GPU the table has times. Under the interpreter it shows that each step is right on a
# shape that no tile divides, and how many programs it takes.


# %%
# the interpreter runs the inner loop of v0 in Python
SIZE = 4000 if book.GPU else 24


def steps(size: int = SIZE, timed: bool = book.GPU) -> list[dict]:
    """Error, programs and time of v0 to v4 on a square product of bfloat16."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator).bfloat16().to(book.DEVICE) for _ in "ab")
    bias = torch.randn(size, generator=generator).bfloat16().to(book.DEVICE)
    product = a.double() @ b.double()
    programs = {
        "v0": size * cdiv(size, _NAIVE_COLUMNS),
        "v1": cdiv(size, 64) ** 2,
        "v2": cdiv(size, 128) ** 2,
        "v3": cdiv(size, 128) * cdiv(size, 256),
        "v4": cdiv(size, 128) * cdiv(size, 256),
    }
    plain = {"v0": matmul_v0, "v1": matmul_v1, "v2": matmul_v2, "v3": matmul_v3}
    calls = {name: functools.partial(call, a, b) for name, call in plain.items()}
    calls["v4"] = functools.partial(matmul_v4, a, b, bias)
    rows = []
    for name, call in calls.items():
        wanted = F.silu(product + bias.double()) if name == "v4" else product
        result = check_accuracy(call(), wanted)
        row = {"step": name, "programs": programs[name], "relative L2": result.metrics.relative_l2}
        row["accepted"] = result.passed
        if timed:
            ms, spread, _ = book.timed(call)
            row |= {"ms": ms, "RSD": book.percent(spread)}
            row["TFLOP/s"] = 2 * size**3 / ms * 1e-9
        rows.append(row)
    return rows


if __name__ == "__main__":
    book.show(book.table(steps(), book.here(f"{SIZE}^2 bfloat16", book.GPU)))

# %% [markdown]
# ## One H200
#
# v3 and v4 run with the config that the tuner found. "of cuBLAS" compares v4 with `a @ b`, bias and
# SiLU as eager PyTorch runs them.


# %%
def h200_steps(size: int = 4096) -> list[dict]:
    """Times of v0 to v4 and of cuBLAS."""
    times = book.measured("library.json", "matmul_ms") or {}
    rows = []
    for name in ("v0", "v1", "v2", "v3", "v4", "cublas", "cublas+bias+silu"):
        ms = times.get(name)
        base = times.get("cublas+bias+silu" if name in ("v4", "cublas+bias+silu") else "cublas")
        rows.append(
            {
                "step": name,
                "ms": ms,
                "TFLOP/s": ms and 2 * size**3 / ms * 1e-9,
                "of cuBLAS": book.percent(ms and base / ms),
            }
        )
    return rows


if __name__ == "__main__":
    note = "4096^2 bfloat16, medians of rounds of 20 samples."
    book.show(book.table(h200_steps(), note, book.source("library.json")))

# %% [markdown]
# Each step answers the limit of the one before. v0 is limited by loads from L1 and L2, v1 by
# waiting, v2 by the tile that it was given, v3 by the tensor cores.
#
# ## The production version
#
# The product that serves in plain Triton is `gemm_large` in `oss_fused/kernels/gemm/portable.py`.
# It adds FP8 operands, tensor descriptors (TMA) and a persistent loop. For few tokens `gemv.py`
# beside it is limited by memory, not by arithmetic. [gemm.md](../gemm.md) explains all of them.
# Its error here is that of FP8 operands; [chapter 13](13-mixed-precision.py) says what that is.


# %%
def against_production(m: int = 32, n: int = 48, k: int = 64) -> list[dict]:
    """Error and operand bytes of v3 and of ``fp8_gemm``."""
    from oss_fused import fp8_gemm

    generator = torch.Generator().manual_seed(2)
    a = torch.randn(m, k, generator=generator).bfloat16().to(book.DEVICE)
    b = torch.randn(n, k, generator=generator).bfloat16().to(book.DEVICE).t()
    exact = a.double() @ b.double()
    rows = []
    for name, out, width in (("matmul_v3", matmul_v3(a, b), 2), ("fp8_gemm", fp8_gemm(a, b), 1)):
        error = float((out.double() - exact).norm() / exact.norm())
        rows.append({"version": name, "operand bytes": width * k * (m + n), "relative L2": error})
    return rows


if __name__ == "__main__":
    book.show(book.table(against_production(), book.here("32 x 48 x 64")))

# %% [markdown]
# ## Acceptance numbers


# %%
def acceptance() -> list[book.Bar]:
    """v3 against cuBLAS at 4096^2."""
    value = book.measured("summary.json", "library.matmul_v3.fraction_of_cublas")
    return [book.Bar("v3 of cuBLAS at 4096^2 bfloat16", 0.7, value, "library.json")]


if __name__ == "__main__":
    book.show(book.bars(acceptance()))

# %% [markdown]
# ## Questions
#
# **Why is the accumulator float32?** A sum of K products of bfloat16 loses a bit each time that it
# doubles. With float32 the operands are the only rounding. Tensor cores do it at no cost.
#
# **My kernel is right for 4096 and wrong for 4095.** A mask is missing along `k`. Rows and columns
# beyond the matrix are never stored, but values beyond `k` are added to the sum.
#
# **More stages made it slower. Why?** Stages take shared memory. Past its limit fewer programs are
# resident, or the kernel does not compile.
#
# **Why `input_precision="ieee"`?** With float32 operands Triton would otherwise use TF32, which
# keeps ten bits of mantissa.
#
# ## Exercises
#
# 1. Compute the FLOPs per byte that a program of v1 and of v2 reaches, from their tiles alone.
# 2. How much shared memory do the stages of v2 and of v3 take? Use `estimate_resources`.
# 3. Give v4 a residual: `silu(a @ b + bias) + r`. Compose it of v4 and an addition, and count
#    bytes.
#
# Answers: [answers/06-matmul.py](answers/06-matmul.py).
#
# Next: [softmax and LayerNorm](07-softmax-and-layernorm.py).
