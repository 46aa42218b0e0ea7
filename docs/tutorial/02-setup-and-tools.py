# SPDX-License-Identifier: MIT
# %% [markdown]
# # 2. Set-up and tools
#
# **Goal.** Have an environment that you can describe in a result file, and know which tool answers
# which question.
#
# `make setup` builds `.venv` from a complete lock: every package with its version. `make test` runs
# the tests. Both need Linux, Python 3.11 to 3.14 and `make`; see the [README](../../README.md).
#
# ## The machine, as a result file describes it

# %%
import functools

import book
import torch

from oss_fused.bench.statistics import collect
from oss_fused.bench.timing import time_calls
from oss_fused.environment import fingerprint


# %%
def environment() -> list[dict]:
    """What decides a time: device, driver, versions, commit."""
    found = fingerprint()
    gpus = [f"{gpu['name']}, driver {gpu['driver_version']}" for gpu in found["gpus"]]
    rows = [
        {"property": "GPU", "value": "; ".join(gpus) or "none: Triton's interpreter"},
        {"property": "CPU", "value": f"{found['cpu']}, {found['cpu_count']} cores"},
        {"property": "memory, GiB", "value": found["memory_gib"]},
        {"property": "python", "value": found["python"]},
        {"property": "commit", "value": found["commit"] or "unknown"},
    ]
    versions = {name: version for name, version in found["versions"].items() if version}
    return rows + [{"property": name, "value": version} for name, version in versions.items()]


if __name__ == "__main__":
    book.show(book.table(environment()))

# %% [markdown]
# Every result file of this repository holds these values. A time without them cannot be repeated.
#
# ## Which tool for which question
#
# | question | tool | command |
# |---|---|---|
# | is the result right? | `check_accuracy` | [chapter 5](05-elementwise-and-reduction.py) |
# | does it read outside its tensors? | compute-sanitizer | `compute-sanitizer python run.py` |
# | what does the kernel do, line by line? | interpreter | `TRITON_INTERPRET=1 python run.py` |
# | how long does one kernel take? | CUDA graphs, `BenchmarkSuite` | [measuring](../measuring.md) |
# | which operator takes the time? | torch.profiler | below |
# | does the GPU wait for the host? | Nsight Systems | `nsys profile -o trace python run.py` |
# | why is one kernel slow? | Nsight Compute | `ncu --set full -k regex:matmul python run.py` |
# | what did the compiler make? | Triton's dumps | `TRITON_KERNEL_DUMP=1 python run.py` |
#
# ## torch.profiler
#
# It lists operators with calls and time. On a GPU add `ProfilerActivity.CUDA`: then kernels have
# rows of their own, and a row of the host beside a gap of the device shows a launch-bound program.


# %%
def profile(size: int = 256, calls: int = 5) -> list[dict]:
    """The operators that ``calls`` of an eager linear layer with SiLU run."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if book.GPU:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    x = torch.randn(size, size, device=book.DEVICE)
    bias = torch.randn(size, device=book.DEVICE)
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(calls):
            torch.nn.functional.silu(x @ x + bias)
    wanted = ("aten::mm", "aten::add", "aten::silu")
    found = {event.key: event for event in profiler.key_averages() if event.key in wanted}
    return [
        {
            "operator": name,
            "calls": found[name].count,
            "host us per call": found[name].self_cpu_time_total / found[name].count,
        }
        for name in wanted
    ]


if __name__ == "__main__":
    book.show(book.table(profile(), book.here("256^2 float32")))

# %% [markdown]
# Three rows for one line of Python: three kernels, and the result crosses memory between them.
# [Chapter 12](12-epilogue-patterns.py) makes one of them.
#
# ## Nsight Systems: the time line
#
# ```
# nsys profile --trace=cuda,nvtx,osrt --cuda-graph-trace=node -o trace python run.py
# nsys stats --report cuda_gpu_kern_sum trace.nsys-rep
# ```
#
# Look for white space between kernels. Where the device waits, faster kernels help nobody: launch
# fewer of them, or record them in a CUDA graph.
#
# ## Nsight Compute: one kernel
#
# ```
# ncu --set full --kernel-name regex:_matmul --launch-skip 3 -c 1 -o report python run.py
# ncu --import report.ncu-rep --page details
# ```
#
# | metric | says | act when |
# |---|---|---|
# | `dram__throughput.avg.pct_of_peak_sustained_elapsed` | use of DRAM | high: move fewer bytes |
# | `sm__inst_executed_pipe_tensor` | tensor core instructions | 0 in a product: no tensor cores |
# | `lts__t_sector_hit_rate.pct` | L2 hits | low in a product: order of tiles |
# | `launch__registers_per_thread` | registers | near 255, with local memory: spills |
# | `launch__occupancy_limit_registers` | programs that fit by registers | small: smaller tiles |
# | `l1tex__data_bank_conflicts_pipe_lsu` | shared memory conflicts | many: layout of a tile |
# | `smsp__average_warps_issue_stalled_long_scoreboard` | waits for memory | more stages, warps |
#
# `scripts/count_hardware.py` runs `ncu` on a program and names what holds each kernel up. Names of
# metrics differ between versions: `ncu --query-metrics` lists yours. Reading counters needs a
# permission that many clouds refuse; the roofline of [chapter 11](11-roofline.py) needs none.
#
# ## A time that you may state
#
# Twenty samples at least, the median, and a relative standard deviation (RSD) below 5 %. If samples
# scatter more, take more of them; if they still do, state no time.


# %%
def rsd(size: int = 1 << 16) -> list[dict]:
    """Median and RSD of an addition on this machine, in rounds of 20 samples."""
    x = torch.ones(size, device=book.DEVICE)
    sampler = functools.partial(time_calls, lambda: x + x, device=book.DEVICE)
    samples, found = collect(sampler)
    return [
        {
            "call": "x + x",
            "samples": len(samples),
            "median ms": found.p50,
            "RSD": book.percent(found.relative_std),
            "may be stated": found.stable,
        }
    ]


if __name__ == "__main__":
    book.show(book.table(rsd(), book.here("65536 float32")))


# %% [markdown]
# ## The production version
#
# `BenchmarkSuite` checks a result before it times it, rotates inputs so that none is found in L2,
# and writes the fingerprint. The chapters use its parts. Here are the rows of one H200 that it
# wrote.


# %%
def h200_suite() -> list[dict]:
    """Times of RMSNorm + RoPE, with their scatter."""
    file = "library-norm/library-suite.json"
    rows = book.measured_rows(file, "rows", operation="rmsnorm_rope", status="ok")
    names = ("problem", "implementation", "latency_ms", "relative_std", "bottleneck")
    return [{name: row[name] for name in names} for row in rows] or [{"rows": None}]


if __name__ == "__main__":
    book.show(book.table(h200_suite(), book.source("library-norm/library-suite.json")))


# %%
def acceptance() -> list[book.Bar]:
    """All times of the suite scatter little."""
    file = "library-norm/library-suite.json"
    rows = book.measured_rows(file, "rows", status="ok")
    spread = max((row["relative_std"] for row in rows), default=None)
    return [book.Bar("largest RSD of the suite's times", 0.05, spread, file, at_most=True)]


if __name__ == "__main__":
    book.show(book.bars(acceptance()))

# %% [markdown]
# ## Questions
#
# **`torch.cuda.is_available()` is False on a GPU machine.** The CPU build of PyTorch is installed.
# `make setup` chooses by `nvidia-smi`.
#
# **The interpreter ran my kernel, the compiler refuses it.** The interpreter is Python: it allows
# shapes that are no power of two and types that the compiler rejects. Compile on a GPU before you
# believe a kernel.
#
# **The first call takes a second.** It compiles. Warm up before you measure, and never compile
# while a request waits.
#
# ## Exercises
#
# 1. Write a function that returns the share of rows in a result file whose RSD exceeds a limit.
# 2. Profile `torch.softmax` and name the operator that does the work.
#
# Answers: [answers/02-setup-and-tools.py](answers/02-setup-and-tools.py).
#
# Next: [parallelism and memory](03-parallelism-and-memory.py).
