# SPDX-License-Identifier: MIT
# %% [markdown]
# # 13. Mixed precision
#
# **Goal.** Choose a format for storage, one for products and one for sums, and know the error of
# each before you measure it.
#
# Store narrow, multiply narrow, add wide. Bytes and tensor cores reward narrow operands. Sums must
# be float32, because each addition to a large sum rounds.

# %%
import book
import torch
import triton
import triton.language as tl

from oss_fused import dequantize_fp8, fp8_gemm, quantize_fp8
from oss_fused.kernels.numerics import magnitude_bits, quantize_dynamic, scale_of_amax
from oss_fused.quant.formats import E4M3, E5M2, fake_quantize, relative_error

# %% [markdown]
# ## Formats
#
# | format | mantissa bits | for |
# |---|---|---|
# | float32 | 23 | sums, scales, statistics |
# | float16 | 10 | values that stay below 65504 |
# | bfloat16 | 7 | the range of float32; activations, weights |
# | E4M3 | 3 | weights and activations, with a scale; no Inf |
# | E5M2 | 2 | wide range: gradients |
# | MXFP4 (E2M1) | 1 | weights in blocks of 32 with a power of two as scale |
#
# Rounding to m mantissa bits has a relative error of at most 2^-(m+1).


# %%
def formats(n: int = 4096) -> list[dict]:
    """Largest value, and relative RMS error of random values in each format."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(0))
    rows = []
    for dtype in (torch.float16, torch.bfloat16):
        error = relative_error(x, x.to(dtype))
        largest = torch.finfo(dtype).max
        rows.append({"format": str(dtype)[6:], "largest": largest, "relative RMS error": error})
    for fmt in (E4M3, E5M2):
        error = relative_error(x, fake_quantize(x[None], "token", fmt=fmt)[0])
        rows.append({"format": fmt.name, "largest": fmt.max, "relative RMS error": error})
    return rows


if __name__ == "__main__":
    book.show(book.table(formats(), "4096 normal values; FP8 with one scale."))

# %% [markdown]
# E4M3 is the precise format, E5M2 the wide one. With a scale the range of E4M3 is enough.
#
# ## Sums
#
# Add n values near 1 in three formats. In bfloat16 the sum stops at 256: the next 1 is less than
# half of its last bit.


# %%
def sums(count: int = 2000) -> list[dict]:
    """A running sum of ones, in each format."""
    rows = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        total = torch.zeros((), dtype=dtype)
        one = torch.ones((), dtype=dtype)
        for _ in range(count):
            total = total + one
        rows.append({"sum in": str(dtype)[6:], "ones": count, "result": float(total)})
    return rows


if __name__ == "__main__":
    book.show(book.table(sums()))

# %% [markdown]
# ## Quantise: the arithmetic
#
# A scale is a dequantisation multiplier: `x ~= q * scale`, `scale = amax / 448`. The kernel rounds
# `x * (1 / scale)` to E4M3. Three cases need care:
#
# 1. amax = 0: the scale is 1, not 0.
# 2. NaN and Inf pass through. A clipped NaN would become a plausible number. `magnitude_bits`
#    compares magnitudes as integers, where NaN is the largest, so the maximum keeps it.
# 3. A given scale may be too small: then values saturate at 448. Saturate before the cast.
#
# One program owns a row, as in [chapter 7](07-softmax-and-layernorm.py).


# %%
@triton.jit
def _quantize_rows_kernel(x, q, scale, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    bits = tl.zeros([BLOCK], tl.int32)
    for start in range(0, n, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(x + row * n + columns, mask=columns < n, other=0.0).to(tl.float32)
        bits = tl.maximum(bits, magnitude_bits(values))
    found = scale_of_amax(tl.max(bits, 0))
    tl.store(scale + row, found)
    inverse = tl.div_rn(1.0, found)
    for start in range(0, n, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(x + row * n + columns, mask=columns < n, other=0.0).to(tl.float32)
        tl.store(q + row * n + columns, quantize_dynamic(values, inverse), mask=columns < n)


def quantize_rows(x: torch.Tensor, block: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 codes of contiguous x [M, K] and a float32 scale [M, 1] per row."""
    q = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(x.shape[0], 1, device=x.device)
    if x.numel():
        _quantize_rows_kernel[(x.shape[0],)](x, q, scale, x.shape[1], BLOCK=block)
    return q, scale


# %% [markdown]
# ## The production version
#
# `quantize_fp8` gives the same codes, bit for bit.


# %%
def against_production(rows: int = 6, columns: int = 200) -> list[dict]:
    """Codes that differ from the package's, and the error, on ordinary and special rows."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)).to(book.DEVICE)
    special = x.clone()
    special[0], special[1, 3], special[2] = 0.0, float("nan"), special[2] * 1e-30
    found = []
    for name, values in (("randn", x), ("zero, NaN and tiny rows", special)):
        q, scale = quantize_rows(values)
        wanted, wanted_scale = quantize_fp8(values, strategy="token")
        different = int((q.view(torch.uint8) != wanted.view(torch.uint8)).sum())
        clean = values.isfinite().all(-1)
        back = dequantize_fp8(q[clean], scale[clean])
        found.append(
            {
                "rows": name,
                "codes that differ": different,
                "scales equal": torch.equal(scale.nan_to_num(-1.0), wanted_scale.nan_to_num(-1.0)),
                "relative RMS error": relative_error(values[clean], back),
            }
        )
    return found


if __name__ == "__main__":
    book.show(book.table(against_production(), book.here("6 x 200 float32")))

# %% [markdown]
# ## One scale for how many values?
#
# A scale per tensor follows its largest value: one outlier pushes all others down in the range. A
# scale per row (per token for activations, per output channel for weights) limits that to its row.
# In the table one value is many times larger than the others.


# %%
def outlier(
    rows: int = 16, columns: int = 256, factors: tuple[float, ...] = (1.0, 1e3, 1e5)
) -> list[dict]:
    """Error of the other rows, by strategy and by size of an outlier in one row."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(2))
    found = []
    for strategy in ("tensor", "token"):
        for factor in factors:
            spoilt = x.clone()
            spoilt[0, 0] = factor
            error = relative_error(spoilt[1:], fake_quantize(spoilt, strategy)[1:])
            row = {"scale per": strategy, "one value is": factor}
            found.append(row | {"error of other rows": error})
    return found


if __name__ == "__main__":
    book.show(book.table(outlier()))

# %% [markdown]
# E4M3 is a float: values keep their relative precision down to the smallest normal number. A
# moderate outlier costs little, where with integers it would cost the same bits to all. Beyond
# some powers of two the others become subnormal, then zero.
#
# ## An FP8 product
#
# Both factors carry an independent relative error, and errors of random sign average out over K
# like the products themselves: the relative error stays near that of one operand. It grows a
# little with K, because a longer row has a larger maximum. Hopper's FP8 tensor cores keep fewer
# bits of a partial sum than float32 has; [gemm](../gemm.md) says what the kernels do about it.


# %%
def product_error(lengths: tuple[int, ...] = (64, 256, 1024)) -> list[dict]:
    """Relative error of ``fp8_gemm`` by K."""
    rows = []
    for k in lengths:
        generator = torch.Generator().manual_seed(k)
        a = torch.randn(16, k, generator=generator).to(book.DEVICE)
        b = torch.randn(16, k, generator=generator).to(book.DEVICE).t()
        found = fp8_gemm(a, b, out_dtype=torch.float32)
        rows.append({"K": k, "relative error": relative_error(a.double() @ b.double(), found)})
    return rows


if __name__ == "__main__":
    book.show(book.table(product_error(), book.here("16 x K x 16 float32 in, FP8 operands")))

# %% [markdown]
# ## One H200


# %%
def h200_speed() -> list[dict]:
    """The FP8 product at 8192^2 and at 4096^2."""
    tflops = book.measured("summary.json", "kernels.gemm_8192.tflops")
    found = book.measured_rows("library-suite.json", "rows", operation="fp8_gemm", status="ok")
    rows = [{"product": "FP8, 8192^3", "TFLOP/s": tflops, "source": "kernels.json"}]
    for row in found:
        name = f"{row['implementation']}, {row['problem']}"
        file = "library-suite.json"
        rows.append({"product": name, "TFLOP/s": row["tflops"], "source": file})
    return rows


if __name__ == "__main__":
    note = "The row of pytorch is a bfloat16 product."
    book.show(book.table(h200_speed(), note, book.source("library-suite.json")))

# %% [markdown]
# ## Acceptance numbers
#
# The bar is the error: codes equal to the reference's. Speed of FP8 over bfloat16 at 4096^2 is
# stated.


# %%
def acceptance() -> list[book.Bar]:
    """FP8 against bfloat16 at 4096^2 on one H200."""
    wanted = {"operation": "fp8_gemm", "implementation": "oss_fused", "status": "ok"}
    rows = book.measured_rows("library-suite.json", "rows", **wanted)
    ratio = rows[0]["speedup"] if rows else None
    return [book.Bar("FP8 product over bfloat16, 4096^3", 1.0, ratio, "library-suite.json")]


if __name__ == "__main__":
    book.show(book.bars(acceptance()))

# %% [markdown]
# ## Questions
#
# **Why 448 and not 480?** E4M3 as PyTorch has it (`float8_e4m3fn`) uses the last code for NaN.
#
# **Why not integers (INT8)?** A float has its precision where the values are. Weights and
# activations are bell-shaped with tails.
#
# **Is a larger scale safer?** No. It wastes codes: half the range costs a bit only below the
# smallest normal value, but a scale that is 100 times too large makes small values subnormal.
#
# ## Exercises
#
# 1. Find the largest n for which adding ones in float16 still counts to n.
# 2. Quantise with a static scale that is half of what is needed. Which share of normal values
#    saturates?
# 3. Compare the error of E4M3 and E5M2 on values spread over 12 powers of two, one scale for all.
#
# Answers: [answers/13-mixed-precision.py](answers/13-mixed-precision.py).
#
# Next: [adapting to a chip](14-adapting-to-a-chip.py).
