# SPDX-License-Identifier: MIT
"""A tiled product on a device that exists only as a description: a timer for the tuner.

The model counts what changes with a tile: operand re-reads, idle SMs of the last wave, occupancy
that hides latency, pipeline depth. It ranks configs on hardware one does not have; its
milliseconds are no measurement.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from oss_fused.bench.statistics import MIN_SAMPLES
from oss_fused.specs import FP8GEMMInput
from oss_fused.tuning.cache import TuningCache
from oss_fused.tuning.device import DeviceDescription
from oss_fused.tuning.prune import estimate_resources, reason_to_skip
from oss_fused.tuning.result import TuningResult
from oss_fused.tuning.space import FP8_GEMM_CONFIGS, Config
from oss_fused.tuning.tuner import TritonAutoTuner

# registers a thread needs beside its accumulators
_OTHER_REGISTERS = 40
# warps an SM needs in flight to hide latency
_WARPS_TO_HIDE_LATENCY = 8


def simulated_gemm_ms(
    description: DeviceDescription, problem: FP8GEMMInput, config: Config
) -> float:
    """Modelled latency of an FP8 GEMM with this tile.

    Raises:
        RuntimeError: the tile does not fit the device, in the words a compiler would use.
    """
    reason = reason_to_skip(config, description, (), 1)
    if reason:
        raise RuntimeError(f"out of resource: {reason}")
    m, n, k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    tiles = math.ceil(problem.m / m) * math.ceil(problem.n / n)
    need = estimate_resources(config, 1, warp_size=description.warp_size)
    registers = (need.registers_per_thread + _OTHER_REGISTERS) * need.threads
    resident = max(
        1,
        min(
            description.registers_per_sm // registers,
            description.max_threads_per_sm // need.threads,
            description.shared_memory_per_block // max(need.shared_memory_bytes, 1),
        ),
    )
    waves = math.ceil(tiles / (description.num_sms * resident))
    busy = tiles / (waves * description.num_sms * resident)
    warps = resident * config["num_warps"]
    hiding = min(1.0, warps * min(config["num_stages"], 3) / (3 * _WARPS_TO_HIDE_LATENCY))
    # a tensor core instruction is full from 64 rows by 64 columns on
    shape_use = min(1.0, m / 64) * min(1.0, n / 64)
    flops = 2 * tiles * m * n * math.ceil(problem.k / k) * k
    compute = flops / (description.peak_tflops["float8_e4m3fn"] * 1e12 * shape_use)
    # a group of row blocks shares its columns of b in L2
    group = max(1, min(config.get("GROUP_M", 1), math.ceil(problem.m / m)))
    read = tiles * problem.k * (m + n / group)
    traffic = read + problem.m * problem.n * problem.out_dtype.itemsize
    memory = traffic / (description.memory_bandwidth_gbps * 1e9)
    seconds = max(compute, memory) / (busy * hiding)
    return 1e3 * seconds + description.launch_overhead_us / 1e3


def tune_simulated(
    description: DeviceDescription,
    problem: FP8GEMMInput,
    cache: TuningCache | None = None,
    force: bool = False,
) -> TuningResult:
    """Run the real search over FP8_GEMM_CONFIGS against the model of ``description``."""
    now = 0.0

    def price(codes: torch.Tensor, **config: int) -> None:
        nonlocal now
        now = simulated_gemm_ms(description, problem, config)

    def timer(call: Callable[[], Any], repeats: int, device: torch.device) -> list[float]:
        call()
        return [now] * repeats

    tuner = TritonAutoTuner(
        price,
        FP8_GEMM_CONFIGS,
        warmup_runs=0,
        benchmark_runs=MIN_SAMPLES,
        operation="simulated_fp8_gemm",
        cache=cache,
        description=description,
        timer=timer,
    )
    codes = torch.empty(0, dtype=torch.float8_e4m3fn)
    return tuner.tune(codes, problem_size=problem, device="cpu", force=force)
