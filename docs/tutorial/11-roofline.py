# SPDX-License-Identifier: MIT
# %% [markdown]
# # 11. The roofline
#
# **Goal.** Place a kernel under the two limits of a device, name what holds it up, and choose the
# next change by that.
#
# A kernel does F FLOPs and must move B bytes. Its intensity is I = F / B. With bandwidth W and
# peak P it reaches at most `min(P, I * W)` (Williams, Waterman and Patterson 2009). Left of the
# corner P / W memory is the roof, right of it arithmetic.

# %%
import book
import torch

from oss_fused.bench.charts import roofline
from oss_fused.bench.problems import AttentionInput, ConvolutionInput
from oss_fused.bench.roofline import REMEDIES, Ceilings, analyse, measure_ceilings
from oss_fused.specs import FP8GEMMInput, GatedMLPInput, RMSNormRoPEInput

# %% [markdown]
# ## Intensity comes from shapes
#
# FLOPs and bytes of an ideal kernel follow from the shapes: each input is read once, each output
# written once. No measurement is needed to know on which side of the corner a problem lies.


# %%
# an example of roofs, not a device
EXAMPLE = Ceilings("example", 4000.0, {"bfloat16": 800.0, "float8_e4m3fn": 1600.0})


def intensities(ceilings: Ceilings = EXAMPLE) -> list[dict]:
    """Intensity of problems of this tutorial, and the roof of each."""
    bf16, fp8 = "bfloat16", "float8_e4m3fn"
    problems = {
        "RMSNorm + RoPE 8192 x 4096": (RMSNormRoPEInput(1, 8192, 4096), bf16),
        "gated MLP, 64 rows": (GatedMLPInput(1, 64, 4096, 11264), bf16),
        "gated MLP, 8192 rows": (GatedMLPInput(1, 8192, 4096, 11264), bf16),
        "FP8 product, 1 row": (FP8GEMMInput(1, 4096, 4096), fp8),
        "FP8 product, 4096 rows": (FP8GEMMInput(4096, 4096, 4096), fp8),
        "attention, N 4096": (AttentionInput(1, 32, 4096, 64), bf16),
        "3x3 convolution, 256 channels": (ConvolutionInput(32, 256, 256, 14), bf16),
    }
    rows = []
    for name, (problem, dtype) in problems.items():
        intensity = problem.flops / problem.num_bytes
        peak, slope = ceilings.tflops[dtype], intensity * ceilings.bandwidth_gbps * 1e-3
        row = {"problem": name, "FLOPs per byte": intensity, "roof, TFLOP/s": min(peak, slope)}
        rows.append(row | {"limit": "memory" if slope < peak else "arithmetic"})
    return rows


def h200_ceilings() -> Ceilings | None:
    """Roofs that were measured on one H200."""
    found = book.measured("library-suite.json", "ceilings")
    return Ceilings(**found) if found else None


if __name__ == "__main__":
    ceilings = h200_ceilings()
    if ceilings is None:
        book.show(book.table(intensities(), "Roofs: an example, not a device."))
    else:
        book.show(book.table(intensities(ceilings), book.source("library-suite.json")))

# %% [markdown]
# One row times a weight matrix: every weight is read for two FLOPs. That is decode, and why FP8
# weights make decode faster: not by faster arithmetic, but by half the bytes.
#
# ## Roofs are measured
#
# Bandwidth is that of a large copy, peak that of the vendor's square matrix product. A kernel that
# reaches 95 % of such a roof is done, whatever the datasheet says.


# %%
def ceilings_here() -> list[dict]:
    """Roofs of this machine."""
    found = measure_ceilings(book.DEVICE, (torch.float32,))
    row = {"device": found.device, "GB/s": found.bandwidth_gbps}
    return [row | {f"{name} TFLOP/s": value for name, value in found.tflops.items()}]


if __name__ == "__main__":
    book.show(book.table(ceilings_here(), book.here("copy of 16 MiB, 512^2 product", True)))

# %% [markdown]
# ## A measured kernel under its roof
#
# `analyse` takes time, FLOPs and bytes. It returns the share of the roof and a class: memory
# bandwidth, arithmetic, latency (far below both), or launch (too short to matter). Each class has
# two remedies, and each remedy names the measurement that shows whether it worked.


# %%
def h200_points() -> list[dict]:
    """The package's kernels of the suite under the roofs of one H200."""
    ceilings = h200_ceilings()
    rows = book.measured_rows("library-suite.json", "rows", implementation="oss_fused", status="ok")
    if ceilings is None or not rows:
        return [{"kernel": None}]
    found = []
    for row in rows:
        flops = row["tflops"] * 1e12 * row["latency_ms"] * 1e-3
        nbytes = row["bandwidth_gbps"] * 1e9 * row["latency_ms"] * 1e-3
        dtype = "float8_e4m3fn" if row["operation"] == "fp8_gemm" else "bfloat16"
        name = f"{row['operation']} {row['problem']}"
        point = analyse(name, row["latency_ms"], round(flops), round(nbytes), dtype, ceilings)
        found.append(
            {
                "kernel": row["operation"],
                "problem": row["problem"],
                "FLOPs per byte": point.intensity,
                "TFLOP/s": point.tflops,
                "of its roof": book.percent(point.share_of_roof),
                "limit": point.bottleneck.value,
            }
        )
    return found


def remedies() -> list[dict]:
    """What to do about each limit, and what shows whether it worked."""
    return [
        {
            "limit": kind.value,
            "remedy": found.partition("; verify")[0],
            "verify": found.partition("; verify ")[2],
        }
        for kind, both in REMEDIES.items()
        for found in both
    ]


def h200_chart() -> bytes | None:
    """The same as a chart; None where nothing was measured."""
    ceilings, rows = h200_ceilings(), h200_points()
    if ceilings is None or "TFLOP/s" not in rows[0]:
        return None
    points = [(r["kernel"], r["problem"], r["FLOPs per byte"], r["TFLOP/s"]) for r in rows]
    return roofline(points, ceilings.bandwidth_gbps, ceilings.tflops)


if __name__ == "__main__":
    book.show(book.table(h200_points(), book.source("library-suite.json")))
    book.show(book.table(remedies()))
    if chart := h200_chart():
        book.show_plot("roofline", chart)

# %% [markdown]
# ## Less bandwidth
#
# Left of the corner speed is `I * W`. On a device with 30 % less bandwidth, a kernel that is bound
# by bandwidth cannot exceed 70 % of its speed, whatever its tiles are. Right of the corner it can
# keep all of its speed. An H100 is such a device beside an H200: the same multiprocessors, less
# bandwidth.


# %%
def less_bandwidth(
    share: float = 0.7, bandwidth: float = 4000.0, peak: float = 800.0
) -> list[dict]:
    """The largest share of its speed that a kernel can keep, by intensity."""
    rows = []
    for intensity in (1, 50, 140, 200, 400):
        before = min(peak, intensity * bandwidth * 1e-3)
        after = min(peak, intensity * bandwidth * share * 1e-3)
        rows.append({"FLOPs per byte": intensity, "keeps at most": book.percent(after / before)})
    return rows


if __name__ == "__main__":
    note = "Arithmetic: 30 % less bandwidth, corner at 200 FLOPs per byte before."
    book.show(book.table(less_bandwidth(), note))


# %% [markdown]
# ## The production version
#
# `BenchmarkSuite` measures the ceilings, places each row and writes report and chart ([the suite's
# report](../results/h200/library-suite.md), [all kernels](../results/h200/kernels.md)).


# %%
def acceptance() -> list[book.Bar]:
    """Kernels that memory limits, as a share of a copy."""
    norm = book.measured("summary.json", "kernels.norm_quant.bandwidth_min")
    rope = book.measured("summary.json", "kernels.rmsnorm_rope.bandwidth_min")
    return [
        book.Bar("norm and quantise, of a copy, smallest", 0.85, norm, "kernels.json"),
        book.Bar("RMSNorm + RoPE, of a copy, smallest", 0.85, rope, "kernels.json"),
    ]


if __name__ == "__main__":
    book.show(book.bars(acceptance()))

# %% [markdown]
# A "NOT met" stands as it is. The smallest sizes are the shortest kernels, where launch and tail
# take a share ([kernels](../kernels.md)).
#
# ## Questions
#
# **My kernel is at 40 % of both roofs.** Then neither limits it: latency. More loads in flight:
# stages, warps, smaller tiles, split K.
#
# **It is above the memory roof!** Its input lay in L2. Rotate inputs larger than L2, as the suite
# does.
#
# **Do I count bytes that are read twice?** No. Bytes are those of an ideal kernel. Reading twice
# then shows as a lower share, which is what you want to see.
#
# ## Exercises
#
# 1. For which number of rows does `x @ w` with w [4096, 4096] in bfloat16 reach 200 FLOPs per byte?
# 2. A kernel takes 100 us, moves 300 MB and does 10 GFLOP. Where is it under the roofs of the H200?
# 3. Two kernels of intensity 0.25 are fused and the bytes halve. What is the best speed-up?
#
# Answers: [answers/11-roofline.py](answers/11-roofline.py).
#
# Next: [epilogue patterns](12-epilogue-patterns.py).
