# SPDX-License-Identifier: MIT
# %% [markdown]
# # 7. Softmax and LayerNorm
#
# **Goal.** Write row operations that do not overflow, in two passes and in one, and know how many
# times each form reads its row.

# %%
import book
import torch
import triton
import triton.language as tl

from oss_fused.bench.accuracy import check_accuracy
from oss_fused.kernels.checks import FLOAT_DTYPES, as_rows, check_dtype
from oss_fused.kernels.numerics import round_to

# %% [markdown]
# ## Why the maximum is subtracted
#
# `e^x` overflows float32 above 88, and bfloat16 inputs reach further. Softmax does not change when
# a constant is added to a row. With the row's maximum subtracted, the largest exponent is 0: no
# overflow, and the sum is at least 1.


# %%
def naive(x: torch.Tensor) -> torch.Tensor:
    """``e^x / sum(e^x)`` without the maximum, to see it fail."""
    weights = x.exp()
    return weights / weights.sum(-1, keepdim=True)


# %% [markdown]
# ## Two passes over tiles
#
# A program owns a row of any length. The first loop finds the maximum, the second the sum, the
# third writes. A row is read three times. The block need not hold the row.


# %%
@triton.jit
def _row_tile(x, start, n, BLOCK: tl.constexpr):
    columns = start + tl.arange(0, BLOCK)
    values = tl.load(x + columns, mask=columns < n, other=float("-inf"))
    return values.to(tl.float32), columns


@triton.jit
def _softmax_two_pass_kernel(x, out, stride, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x += row * stride
    out += row * n
    best = float("-inf")
    for start in range(0, n, BLOCK):
        values, _ = _row_tile(x, start, n, BLOCK)
        best = tl.maximum(best, tl.max(values, 0))
    total = 0.0
    for start in range(0, n, BLOCK):
        values, _ = _row_tile(x, start, n, BLOCK)
        total += tl.sum(tl.exp(values - best), 0)
    for start in range(0, n, BLOCK):
        values, columns = _row_tile(x, start, n, BLOCK)
        result = tl.exp(values - best) / total
        tl.store(out + columns, round_to(result, out.dtype.element_ty), mask=columns < n)


# %% [markdown]
# ## Online: one pass for maximum and sum
#
# Milakov and Gimelshein (2018) keep a running maximum m and a running sum l. When a tile raises the
# maximum from m to m', the old sum is worth `l * e^(m - m')`. So one loop finds both, and a row is
# read twice. [Flash attention](09-attention.py) is this trick with a matrix behind it.


# %%
@triton.jit
def _softmax_online_kernel(x, out, stride, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x += row * stride
    out += row * n
    best = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    for start in range(0, n, BLOCK):
        values, _ = _row_tile(x, start, n, BLOCK)
        new_best = tl.maximum(best, tl.max(values, 0))
        # a row that is -inf so far: any finite number keeps e^(x - best) at 0
        safe = tl.where(new_best == float("-inf"), 0.0, new_best)
        total = total * tl.exp(best - safe) + tl.sum(tl.exp(values - safe), 0)
        best = new_best
    for start in range(0, n, BLOCK):
        values, columns = _row_tile(x, start, n, BLOCK)
        result = tl.exp(values - best) / total
        tl.store(out + columns, round_to(result, out.dtype.element_ty), mask=columns < n)


def softmax(x: torch.Tensor, online: bool = False, block: int = 256) -> torch.Tensor:
    """Softmax over the last dimension of x [..., N], one program per row.

    Raises:
        UnsupportedDtypeError: x is not floating.
    """
    check_dtype("x", x, FLOAT_DTYPES)
    rows = as_rows(x)
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        kernel = _softmax_online_kernel if online else _softmax_two_pass_kernel
        kernel[(rows.shape[0],)](rows, out, rows.stride(0), rows.shape[1], BLOCK=block)
    return out.view(x.shape)


def softmax_rows(n: int = 700, block: int = 256) -> list[dict]:
    """Errors of all forms on ordinary and on large logits."""
    x = torch.randn(4, n, generator=torch.Generator().manual_seed(0)).to(book.DEVICE)
    rows = []
    for label, scaled in (("randn", x), ("50 randn", 50 * x)):
        wanted = torch.softmax(scaled.double(), -1)
        forms = {
            "no maximum": (naive(scaled), "-"),
            "two-pass": (softmax(scaled, False, block), 3),
            "online": (softmax(scaled, True, block), 2),
        }
        for name, (found, reads) in forms.items():
            worst = float((found.double() - wanted).abs().max())
            row = {"logits": label, "form": name, "reads of a row": reads, "largest error": worst}
            rows.append(row | {"finite": bool(found.isfinite().all())})
    return rows


if __name__ == "__main__":
    book.show(book.table(softmax_rows(), book.here("4 x 700 float32")))

# %% [markdown]
# ## LayerNorm
#
# `(x - mean) / sqrt(var + eps) * weight + bias` per row. The variance in two passes: the mean
# first, then the mean of squared distances. `mean(x^2) - mean(x)^2` needs one pass and is wrong
# where the mean is large against the spread: two large numbers cancel.
#
# Welford's form has one pass and does not cancel: it keeps count, mean and the sum of squared
# distances M2, and merges a tile into them.


# %%
@triton.jit
def _layer_norm_kernel(
    x, weight, bias, out, stride, n, eps, WELFORD: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    x += row * stride
    out += row * n
    lane = tl.arange(0, BLOCK)
    mean = 0.0
    squares = 0.0
    if WELFORD:
        for start in range(0, n, BLOCK):
            inside = start + lane < n
            values = tl.load(x + start + lane, mask=inside, other=0.0).to(tl.float32)
            count = tl.minimum(n - start, BLOCK).to(tl.float32)
            tile_mean = tl.sum(values, 0) / count
            apart = tl.where(inside, values - tile_mean, 0.0)
            delta = tile_mean - mean
            seen = start + count
            mean += delta * count / seen
            squares += tl.sum(apart * apart, 0) + delta * delta * start * count / seen
    else:
        for start in range(0, n, BLOCK):
            values = tl.load(x + start + lane, mask=start + lane < n, other=0.0)
            mean += tl.sum(values.to(tl.float32), 0)
        mean = mean / n
        for start in range(0, n, BLOCK):
            inside = start + lane < n
            values = tl.load(x + start + lane, mask=inside, other=0.0).to(tl.float32)
            apart = tl.where(inside, values - mean, 0.0)
            squares += tl.sum(apart * apart, 0)
    scale = 1.0 / tl.sqrt(squares / n + eps)
    for start in range(0, n, BLOCK):
        inside = start + lane < n
        values = tl.load(x + start + lane, mask=inside, other=0.0).to(tl.float32)
        gain = tl.load(weight + start + lane, mask=inside, other=0.0).to(tl.float32)
        shift = tl.load(bias + start + lane, mask=inside, other=0.0).to(tl.float32)
        result = (values - mean) * scale * gain + shift
        tl.store(out + start + lane, round_to(result, out.dtype.element_ty), mask=inside)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float = 1e-5,
    welford: bool = False,
    block: int = 256,
) -> torch.Tensor:
    """LayerNorm of x [..., H] with weight and bias [H]; population variance, float32 sums.

    Raises:
        UnsupportedDtypeError: x is not floating.
    """
    check_dtype("x", x, FLOAT_DTYPES)
    rows = as_rows(x)
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        _layer_norm_kernel[(rows.shape[0],)](
            rows,
            weight,
            bias,
            out,
            rows.stride(0),
            rows.shape[1],
            eps,
            WELFORD=welford,
            BLOCK=block,
        )
    return out.view(x.shape)


# %% [markdown]
# In a masked tile the lanes beyond the row must add nothing to the squares: after the mean is
# subtracted, a masked 0 is no longer 0. Hence the `tl.where`.
#
# The table has rows with a mean of 0 and of 10000. The form that cancels is PyTorch arithmetic.


# %%
def layer_norm_rows(n: int = 500, block: int = 128) -> list[dict]:
    """Errors of three forms of the variance."""
    generator = torch.Generator().manual_seed(1)
    spread = torch.randn(3, n, generator=generator).to(book.DEVICE)
    one, zero = torch.ones(n, device=book.DEVICE), torch.zeros(n, device=book.DEVICE)
    rows = []
    for mean in (0.0, 1e4):
        x = spread + mean
        wanted = torch.nn.functional.layer_norm(x.double(), (n,))
        variance = (x * x).mean(-1, keepdim=True) - x.mean(-1, keepdim=True) ** 2
        forms = {
            "E[x^2] - E[x]^2": (x - x.mean(-1, keepdim=True)) / (variance + 1e-5).abs().sqrt(),
            "two-pass": layer_norm(x, one, zero, block=block),
            "Welford": layer_norm(x, one, zero, welford=True, block=block),
        }
        for name, found in forms.items():
            error = float((found.double() - wanted).abs().max())
            rows.append({"mean of a row": mean, "variance": name, "largest error": error})
    return rows


if __name__ == "__main__":
    book.show(book.table(layer_norm_rows(), book.here("3 x 500 float32")))

# %% [markdown]
# ## Time
#
# Softmax moves 2 values of a row's dtype per element if the row stays in registers or in L2
# between the passes: one read, one written. The bar is a share of copy bandwidth.


# %%
def speed(shape: tuple[int, int] = (4, 1024), block: int = 512) -> list[dict]:
    """Times of both softmax forms here, and of PyTorch's."""
    x = torch.randn(shape, device=book.DEVICE)
    calls = {
        "two-pass": lambda: softmax(x, False, block),
        "online": lambda: softmax(x, True, block),
        "pytorch": lambda: torch.softmax(x, -1),
    }
    rows = []
    for name, call in calls.items():
        ms, spread, _ = book.timed(call)
        rows.append({"softmax": name, "ms": ms, "RSD": book.percent(spread)})
    return rows


def h200_rows() -> list[dict]:
    """Softmax and LayerNorm of the package on one H200, squares of bfloat16."""
    rows = []
    for operation in ("softmax", "layer_norm"):
        for size in (1024, 2048, 4096, 8192):
            found = book.measured_rows(
                "operators-rows.json",
                "rows",
                operation=operation,
                implementation="oss_fused",
                size=size,
            )
            row = found[0] if found else {}
            rows.append(
                {
                    "operation": operation,
                    "size": f"{size}^2",
                    "p50, us": row.get("us"),
                    "p90, us": row.get("p90_us"),
                    "p99, us": row.get("p99_us"),
                    "GB/s": row.get("gbps"),
                    "FLOP per byte": row.get("intensity"),
                    "of a copy": book.percent(row.get("share")),
                    "over eager": row.get("speedup"),
                }
            )
    return rows


if __name__ == "__main__":
    book.show(book.table(speed(), book.here("4 x 1024 float32", True)))
    book.show(book.table(h200_rows(), book.source("operators-rows.json")))

# %% [markdown]
# ## The production version
#
# `oss_fused.softmax` keeps a row of up to 32768 values in registers and reads it once; longer rows
# use the loops above. A program takes several short rows. `oss_fused.layer_norm` has both
# variances, and a form with dropout in the same kernel.


# %%
def against_production(n: int = 300) -> list[dict]:
    """Errors of this chapter's functions and of the package's, on the same rows."""
    import oss_fused

    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, n, generator=generator).to(book.DEVICE)
    weight = torch.randn(n, generator=generator).to(book.DEVICE)
    bias = torch.randn(n, generator=generator).to(book.DEVICE)
    soft = torch.softmax(x.double(), -1)
    norm = torch.nn.functional.layer_norm(x.double(), (n,), weight.double(), bias.double())
    pairs = {
        "softmax, chapter": (softmax(x), soft),
        "softmax, oss_fused": (oss_fused.softmax(x), soft),
        "softmax online, oss_fused": (oss_fused.softmax(x, method="online"), soft),
        "layer_norm, chapter": (layer_norm(x, weight, bias), norm),
        "layer_norm, oss_fused": (oss_fused.layer_norm(x, weight, bias), norm),
    }
    rows = []
    for name, (found, wanted) in pairs.items():
        result = check_accuracy(found, wanted)
        error = result.metrics.max_absolute
        rows.append({"version": name, "largest error": error, "accepted": result.passed})
    return rows


if __name__ == "__main__":
    book.show(book.table(against_production(), book.here("2 x 300 float32")))

# %% [markdown]
# ## Acceptance numbers


# %%
def acceptance() -> list[book.Bar]:
    """Softmax and LayerNorm against a copy, from 4096^2 on, and against eager PyTorch."""
    found = []
    for operation in ("softmax", "layer_norm"):
        share = book.measured("summary.json", f"operators.{operation}.bandwidth_min")
        found.append(
            book.Bar(f"{operation} of a copy, from 4096^2 on", 0.9, share, "operators-rows.json")
        )
        ratio = book.measured("summary.json", f"operators.{operation}.speedup_eager_min")
        found.append(book.Bar(f"{operation} over eager PyTorch", 1.0, ratio, "operators-rows.json"))
    return found


if __name__ == "__main__":
    book.show(book.bars(acceptance()))

# %% [markdown]
# ## Questions
#
# **A row is nothing but -Inf. What is its softmax?** NaN, as in PyTorch. Attention wants 0 there,
# and its kernel says so.
#
# **Is online faster?** It reads a long row once less. For a row in registers both read it once, and
# two-pass does fewer exponentials.
#
# **Why not compute the sum in bfloat16?** After 256 terms of similar size, the next one is rounded
# away.
#
# ## Exercises
#
# 1. Write log-softmax, `x - max - log(sum)`, and show that the log of softmax is worse at -200.
# 2. Merge the statistics (count, mean, M2) of two halves of a row by Welford's formula.
# 3. For which row lengths does a block of 256 read at least a fifth of its lanes beyond the row?
#
# Answers: [answers/07-softmax-and-layernorm.py](answers/07-softmax-and-layernorm.py).
#
# Next: [convolution](08-convolution.py).
