# SPDX-License-Identifier: MIT
# %% [markdown]
# # 3. Parallelism and memory
#
# **Goal.** Predict from a few numbers of a device whether a kernel can be fast: how many programs
# run at once, which bytes a load really moves, and how much must be in flight to hide latency.
#
# ## The machine
#
# A GPU has many multiprocessors (SMs). A launch makes a grid of programs. A program runs on one SM
# and never moves. An SM keeps several programs at once, as many as its registers and shared memory
# hold. A program has warps of 32 threads; a warp issues one instruction for all of its threads.
#
# | memory | who sees it | how far |
# |---|---|---|
# | registers | one thread | no wait |
# | shared memory | one program | tens of cycles |
# | L2 | all programs | hundreds of cycles |
# | DRAM (HBM) | all programs | about twice L2 |
#
# The package describes devices as data. The tuner uses these files, and so does this chapter.

# %%
import book
import torch
import triton
import triton.language as tl

from oss_fused.tuning.device import DeviceDescription, load_description
from oss_fused.tuning.prune import estimate_resources


# %%
def devices(names: tuple[str, ...] = ("a100", "h100", "h200", "low_bw")) -> list[dict]:
    """Nominal limits of some devices, and the FLOPs per byte where arithmetic becomes the limit."""
    return [
        {
            "device": name,
            "SMs": device.num_sms,
            "shared KiB": device.shared_memory_per_block // 1024,
            "L2 MiB": device.l2_bytes // 2**20,
            "GB/s": device.memory_bandwidth_gbps,
            "bf16 TFLOP/s": device.peak_tflops["bfloat16"],
            "FLOPs per byte": device.peak_tflops["bfloat16"] * 1e3 / device.memory_bandwidth_gbps,
        }
        for name in names
        if (device := load_description(name))
    ]


if __name__ == "__main__":
    book.show(book.table(devices(), "Nominal values of oss_fused/tuning/devices/*.json."))

# %% [markdown]
# The last column is the corner of the [roofline](11-roofline.py). An addition does far less than
# one FLOP per byte; a large matrix product does hundreds.
#
# ## What a load really moves
#
# Memory moves lines of 128 bytes (in sectors of 32). When the 32 threads of a warp read 32
# neighbours of float32, one line serves all: the load is coalesced. With a stride of 32 values
# each thread needs a line of its own, and 124 of 128 bytes are thrown away.
#
# The kernel below stores the offset that each thread uses. The function then counts lines.


# %%
@triton.jit
def _offsets_kernel(out, stride, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(out + lane, lane * stride)


def lines_per_warp(stride: int, element_bytes: int = 4) -> tuple[int, int]:
    """128-byte lines and 32-byte sectors that one warp touches at a stride in elements."""
    offsets = torch.empty(32, dtype=torch.int32, device=book.DEVICE)
    _offsets_kernel[(1,)](offsets, stride, BLOCK=32)
    places = offsets * element_bytes
    return len((places // 128).unique()), len((places // 32).unique())


def coalescing(strides: tuple[int, ...] = (0, 1, 2, 8, 32)) -> list[dict]:
    """Lines, sectors and the useful share of the moved bytes, by stride."""
    rows = []
    for stride in strides:
        lines, sectors = lines_per_warp(stride)
        useful = 128 if stride else 4
        rows.append(
            {
                "stride": stride,
                "lines": lines,
                "sectors": sectors,
                "useful bytes": book.percent(useful / (32 * sectors)),
            }
        )
    return rows


if __name__ == "__main__":
    book.show(book.table(coalescing(), book.here("a warp that reads float32")))

# %% [markdown]
# A matrix stored row by row is read well along its rows. If a kernel must walk along columns,
# either let neighbouring threads take neighbouring columns, or transpose a tile in shared memory.
# Stride 0 is a broadcast: one sector for all.
#
# ## How many programs are resident
#
# Registers and shared memory of an SM are shared by its programs. `estimate_resources` gives what
# a tile needs. Occupancy is no goal in itself: a matrix product with two programs per SM can be at
# its roof, because its pipeline hides latency.


# %%
def resident(device: DeviceDescription, config: dict[str, int], element_bytes: int = 2) -> int:
    """Programs of a tiled product that an SM can keep, by registers, threads and shared memory.

    Args:
        device: its limits.
        config: BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages.
        element_bytes: of an operand.
    """
    need = estimate_resources(config, element_bytes, warp_size=device.warp_size)
    return min(
        device.registers_per_sm // max(need.registers_per_thread * need.threads, 1),
        device.max_threads_per_sm // need.threads,
        device.shared_memory_per_block // max(need.shared_memory_bytes, 1),
    )


def residency(names: tuple[str, ...] = ("h200", "low_bw")) -> list[dict]:
    """Resident programs of three tiles on some devices."""
    tiles = [(64, 64, 32, 4, 2), (128, 128, 64, 4, 3), (128, 256, 64, 8, 3)]
    keys = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages")
    rows = []
    for tile in tiles:
        config = dict(zip(keys, tile))
        row = {"tile": "x".join(map(str, tile[:3])), "warps": tile[3], "stages": tile[4]}
        counts = {f"on {name}": resident(load_description(name), config) for name in names}
        rows.append(row | counts)
    return rows


if __name__ == "__main__":
    book.show(book.table(residency(), "0: the tile does not fit. Estimates; the compiler decides."))

# %% [markdown]
# ## How much must be in flight
#
# Little's law: bytes in flight = bandwidth x latency. With the nominal bandwidth of an H200 and a
# latency of 600 ns (an assumption, not measured here) each SM needs tens of KiB on their way at
# any time. A program that loads, waits and computes has too few. Pipeline stages and more warps
# fix that.


# %%
def in_flight(latency_ns: float = 600.0, names: tuple[str, ...] = ("h100", "h200")) -> list[dict]:
    """Bytes in flight per SM that full bandwidth needs."""
    rows = []
    for name in names:
        device = load_description(name)
        total = device.memory_bandwidth_gbps * latency_ns
        row = {"device": name, "latency ns": latency_ns, "MiB in all": total / 2**20}
        rows.append(row | {"KiB per SM": total / device.num_sms / 1024})
    return rows


if __name__ == "__main__":
    book.show(book.table(in_flight()))

# %% [markdown]
# ## One H200
#
# What a copy reaches of the nominal bandwidth. All shares of this tutorial are of the copy.


# %%
def h200_copy() -> list[dict]:
    """Copy bandwidth, nominal and measured."""
    nominal = load_description("h200").memory_bandwidth_gbps
    bytes_per_second = book.measured("kernels.json", "copy_bandwidth")
    copied = bytes_per_second and bytes_per_second * 1e-9
    share = book.percent(copied and copied / nominal)
    return [{"nominal GB/s": nominal, "copy GB/s": copied, "share": share}]


if __name__ == "__main__":
    book.show(book.table(h200_copy(), book.source("kernels.json")))

# %% [markdown]
# ## The production version
#
# `reason_to_skip` in `oss_fused/tuning/prune.py` is this chapter as a rule: the tuner compiles no
# config that cannot fit the device or is mostly padding for the problem.


# %%
def pruned(names: tuple[str, ...] = ("h200", "low_bw")) -> list[dict]:
    """How many configs of the FP8 GEMM are left for a device."""
    from oss_fused import FP8_GEMM_CONFIGS
    from oss_fused.tuning.prune import reason_to_skip

    rows = []
    for name in names:
        device = load_description(name)
        left = sum(reason_to_skip(config, device, (), 1) is None for config in FP8_GEMM_CONFIGS)
        rows.append({"device": name, "configs": len(FP8_GEMM_CONFIGS), "worth compiling": left})
    return rows


def acceptance() -> list[book.Bar]:
    """This chapter predicts; chapters that measure have the numbers."""
    return []


if __name__ == "__main__":
    book.show(book.table(pruned()))

# %% [markdown]
# ## Acceptance numbers
#
# None: this chapter predicts. Its statement for all others: a kernel that is bound by bandwidth
# runs, on a device with 30 % less bandwidth, at no more than 70 % of its speed.
#
# ## Questions
#
# **Does occupancy matter?** As a means. You need enough loads in flight. Stages of one program
# count as much as a second program.
#
# **Why are sectors and lines counted apart?** DRAM and L2 move sectors of 32 bytes; a cache line
# has four of them. A stride of 8 float32 touches every sector once: a quarter of the lines is
# useless to skip.
#
# **My load is coalesced and slow.** Look at alignment: a row that begins between lines costs a line
# more per warp.
#
# ## Exercises
#
# 1. Which useful share has a warp that reads bfloat16 at stride 2?
# 2. Find the largest square tile (BLOCK_K 64, 3 stages, 8 warps, bfloat16) that fits `low_bw`.
# 3. A kernel moves 1 GB and takes 0.5 ms on an H200 by the nominal bandwidth. Is that possible?
#
# Answers: [answers/03-parallelism-and-memory.py](answers/03-parallelism-and-memory.py).
#
# Next: [Triton's model](04-triton-model.py).
