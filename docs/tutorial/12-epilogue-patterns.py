# SPDX-License-Identifier: MIT
# %% [markdown]
# # 12. Epilogue patterns
#
# **Goal.** Put the work after a matrix product into its kernel, where the result is still in
# registers, and count what that saves.
#
# | pattern | what | used by |
# |---|---|---|
# | bias and activation | `act(a @ b + bias)` | MLPs |
# | scales | `acc * a_scale * b_scale` | every FP8 product |
# | gate | two accumulators, `act(up) * gate` | gated MLPs |
# | quantise | FP8 codes and a scale per row | before the next FP8 product |
# | residual | `acc + r` | the end of a block |
#
# What needs a whole row (a norm, a softmax, a row's amax) fits only if a program owns the row.

# %%
import functools

import book
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from oss_fused import fused_gated_mlp
from oss_fused.bench.accuracy import check_accuracy
from oss_fused.bench.timing import time_graphs
from oss_fused.kernels.integers import cdiv
from oss_fused.kernels.numerics import INTERPRETED, round_to

matmul = book.chapter("06-matmul")

# %% [markdown]
# ## Bias and SiLU: bytes
#
# Three kernels write y, read it, write it, read it, write it. One kernel writes it once. At 4096^2
# the product is bound by arithmetic, so the time saved is less than the bytes saved; the cost of
# the epilogue itself must be small.


# %%
def epilogue_bytes(sizes: tuple[int, ...] = (512, 4096)) -> list[dict]:
    """Bytes of product, bias and SiLU as three kernels and as one, bfloat16."""
    rows = []
    for size in sizes:
        operands, result, bias = 2 * 2 * size**2, 2 * size**2, 2 * size
        three, one = operands + 5 * result + bias, operands + result + bias
        row = {"M = N = K": size, "three kernels, MB": three / 1e6, "one kernel, MB": one / 1e6}
        rows.append(row | {"saved": book.percent(1 - one / three)})
    return rows


if __name__ == "__main__":
    book.show(book.table(epilogue_bytes(), "Arithmetic from shapes, bfloat16."))

# %% [markdown]
# ## Time of an epilogue
#
# `matmul_v4` of [chapter 6](06-matmul.py) against `matmul_v3`: the same tiles, without and with the
# epilogue. The bar: with it, at least 95 % of the plain product's speed.


# %%
def speed(size: int = 64) -> list[dict]:
    """Plain product, epilogue in the kernel, and three kernels."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator).bfloat16().to(book.DEVICE) for _ in "ab")
    bias = torch.randn(size, generator=generator).bfloat16().to(book.DEVICE)
    wanted = F.silu(a.double() @ b.double() + bias.double())
    calls = {
        "plain product": (lambda: matmul.matmul_v3(a, b), a.double() @ b.double()),
        "bias and SiLU in it": (lambda: matmul.matmul_v4(a, b, bias), wanted),
        "three kernels": (lambda: F.silu(matmul.matmul_v3(a, b) + bias), wanted),
    }
    rows = []
    for name, (call, exact) in calls.items():
        result = check_accuracy(call(), exact)
        ms, spread, _ = book.timed(call)
        row = {"form": name, "relative L2": result.metrics.relative_l2, "ms": ms}
        rows.append(row | {"RSD": book.percent(spread)})
    return rows


def gpu_rows(bandwidth: float):
    """Plain product and epilogue at 4096^2 on this GPU, for scripts/bench_operators.py."""
    del bandwidth
    size = 4096
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in "ab")
    bias = torch.randn(size, device="cuda", dtype=torch.bfloat16)
    product = a.float() @ b.float()
    calls = {
        "plain": (functools.partial(matmul.matmul_v3, a, b), product),
        "bias and silu": (
            functools.partial(matmul.matmul_v4, a, b, bias),
            F.silu(product + bias.float()),
        ),
    }
    times = time_graphs({name: [call] for name, (call, _) in calls.items()}, 10)
    for name, (call, wanted) in calls.items():
        us = times[name].median
        fraction = times["plain"].median / us
        yield {
            "operation": "gemm epilogue",
            "implementation": name,
            "problem": f"{size}^3",
            "us": us,
            "value": f"{2 * size**3 / us * 1e-6:7.1f} TFLOPS {fraction:6.1%} of plain",
            "error": check_accuracy(call(), wanted).reason,
            "fraction": fraction,
        }


def figures(rows) -> dict[str, float]:
    """The figure of summary.json that ``gpu_rows`` gives; none where the result was wrong."""
    fused = [row for row in rows if row["implementation"] == "bias and silu" and not row["error"]]
    return {"operators.gemm_epilogue.fraction": fused[-1]["fraction"]} if fused else {}


def h200_epilogue() -> list[dict]:
    """v3 and v4 of the library's run on one H200, both with the tuned config."""
    times = book.measured("library.json", "matmul_ms") or {}
    plain, fused = times.get("v3"), times.get("v4")
    three = times.get("cublas+bias+silu")
    return [
        {"form": "plain product (v3)", "ms": plain, "of plain": book.percent(plain and 1.0)},
        {
            "form": "bias and SiLU in it (v4)",
            "ms": fused,
            "of plain": book.percent(fused and plain / fused),
        },
        {
            "form": "cuBLAS, bias, SiLU",
            "ms": three,
            "of plain": book.percent(three and plain / three),
        },
    ]


if __name__ == "__main__":
    book.show(book.table(speed(), book.here("64^2 bfloat16", True)))
    book.show(book.table(h200_epilogue(), "4096^2 bfloat16.", book.source("library.json")))

# %% [markdown]
# ## Two accumulators: the gate
#
# A gated MLP has two products of one input. One kernel loads the tile of x once and keeps two
# accumulators; the product of both never leaves registers. The tile must be smaller: two
# accumulators take twice the registers.


# %%
@triton.jit
def _gated_kernel(
    x, gate, up, out, m, n, k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    lane = tl.arange(0, BLOCK_K)
    acc_gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, k, BLOCK_K):
        inner = start + lane
        seen = (columns[None, :] < n) & (inner[:, None] < k)
        place = columns[None, :] * k + inner[:, None]
        tile = tl.load(
            x + rows[:, None] * k + inner[None, :],
            mask=(rows[:, None] < m) & (inner[None, :] < k),
            other=0.0,
        )
        left, right = tl.load(gate + place, seen, 0.0), tl.load(up + place, seen, 0.0)
        if INTERPRETED:
            # the interpreter multiplies bfloat16 bit patterns
            tile, left, right = tile.to(tl.float32), left.to(tl.float32), right.to(tl.float32)
        acc_gate = tl.dot(tile, left, acc_gate, input_precision="ieee")
        acc_up = tl.dot(tile, right, acc_up, input_precision="ieee")
    result = acc_gate / (1.0 + tl.exp(-acc_gate)) * acc_up
    mask = (rows[:, None] < m) & (columns[None, :] < n)
    place = out + rows[:, None] * n + columns[None, :]
    tl.store(place, round_to(result, out.dtype.element_ty), mask=mask)


def gated(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, block: int = 32) -> torch.Tensor:
    """``silu(x gate') * (x up')`` of x [M, K] and weights [N, K], contiguous, one dtype."""
    m, k = x.shape
    n = gate.shape[0]
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    if out.numel():
        tile = {"BLOCK_M": block, "BLOCK_N": block, "BLOCK_K": 32}
        _gated_kernel[(cdiv(m, block), cdiv(n, block))](x, gate, up, out, m, n, k, **tile)
    return out


# %% [markdown]
# ## The production version
#
# `fused_gated_mlp` is this kernel with FP8 weights, several activations, tuned tiles and a
# backward pass. `fp8_gemm` has scales and bias in its epilogue, and served layers quantise the
# next activation there ([gemm](../gemm.md), [kernels](../kernels.md)).


# %%
def against_production(m: int = 20, n: int = 48, k: int = 64) -> list[dict]:
    """Errors of this chapter's gated MLP and of the package's, on the same operands."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(m, k, generator=generator).to(book.DEVICE)
    gate, up = (torch.randn(n, k, generator=generator).to(book.DEVICE) / k**0.5 for _ in "gu")
    wanted = F.silu(x.double() @ gate.double().t()) * (x.double() @ up.double().t())
    found = {
        "chapter": gated(x, gate, up),
        "fused_gated_mlp": fused_gated_mlp(x, gate, up, activation_on="gate"),
    }
    rows = []
    for name, out in found.items():
        result = check_accuracy(out, wanted)
        row = {"version": name, "relative L2": result.metrics.relative_l2}
        rows.append(row | {"accepted": result.passed})
    return rows


def h200_gated() -> list[dict]:
    """The gated MLP of the package on one H200, against torch.compile and vLLM's FP8 layers."""
    rows = book.measured_rows("kernels.json", "results", group="gated_mlp")
    found = []
    for row in rows:
        entry = {"problem": row["name"], "us": row["us"]}
        found.append(entry | {f"{name}, us": us for name, us in row["baselines_us"].items()})
    return found or [{"gated MLP": None}]


if __name__ == "__main__":
    book.show(book.table(against_production(), book.here("20 x 64, 48 columns, float32")))
    book.show(book.table(h200_gated(), book.source("kernels.json")))

# %% [markdown]
# ## Acceptance numbers
#
# `scripts/bench_operators.py` has measured both forms side by side on one H200.


# %%
def acceptance() -> list[book.Bar]:
    """The product with an epilogue, of the plain product's speed."""
    value = book.measured("summary.json", "operators.gemm_epilogue.fraction")
    file = "operators-teaching.json"
    return [book.Bar("product with bias and SiLU, of the plain one's speed", 0.95, value, file)]


if __name__ == "__main__":
    book.show(book.bars(acceptance()))

# %% [markdown]
# ## Questions
#
# **Is an epilogue always free?** No. It runs after the last product of a tile, when tensor cores
# wait, unless another program or another tile of a persistent loop overlaps it.
#
# **Why is the activation float32?** The accumulator is. A rounding before the activation would be
# one more than the reference has.
#
# **When does fusing lose?** When the epilogue needs registers that the tile then lacks, or when the
# consumer would have read the value from L2 anyway.
#
# ## Exercises
#
# 1. Count the bytes that quantising y to FP8 in the epilogue saves over a kernel of its own.
# 2. From which K on is `silu(x w' + bias)` of 4096 x 4096 results bound by arithmetic on an H200?
# 3. Write `gated` for the other order, `gate * silu(up)`, without a new kernel.
#
# Answers: [answers/12-epilogue-patterns.py](answers/12-epilogue-patterns.py).
#
# Next: [mixed precision](13-mixed-precision.py).
