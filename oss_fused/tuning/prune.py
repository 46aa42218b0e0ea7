# SPDX-License-Identifier: MIT
"""Which configs cannot work, or cannot be good, on a device and for a problem size.

Estimates err on the side of keeping a config: the compiler has the last word. Parameters that an
operation does not have are simply not looked at, so one set of rules serves every space.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oss_fused.tuning.device import DeviceDescription
from oss_fused.tuning.space import Config

# below this share of the output inside tiles, most of the work is on padding
_MIN_TILE_USE = 0.25
_SMALLEST_TILE = 16


@dataclass(frozen=True)
class Resources:
    """Estimated needs of one program."""

    shared_memory_bytes: int
    registers_per_thread: int
    threads: int


def estimate_resources(
    config: Config, element_bytes: int, accumulators: int = 1, warp_size: int = 32
) -> Resources:
    """Shared memory of the operand tiles in flight, and registers that hold the accumulators.

    Args:
        config: BLOCK_M, BLOCK_N, BLOCK_K, or BLOCK_SIZE, in either case; num_warps; num_stages.
        element_bytes: size of an operand's element.
        accumulators: fp32 output tiles kept at once (2 for a gated MLP).
        warp_size: threads of a warp.
    """
    config = _capitals(config)
    threads = config.get("num_warps", 4) * warp_size
    stages = config.get("num_stages", 1)
    if "BLOCK_M" in config and "BLOCK_N" in config:
        m, n, k = config["BLOCK_M"], config["BLOCK_N"], config.get("BLOCK_K", _SMALLEST_TILE)
        # one stage is loaded straight into registers
        buffered = stages if stages > 1 else 0
        shared = buffered * (m + n * accumulators) * k * element_bytes
        live = accumulators * m * n
    else:
        shared = 0
        live = config.get("BLOCK_SIZE", 0)
    return Resources(shared, -(-live // threads), threads)


def reason_to_skip(
    config: Config,
    device: DeviceDescription | None,
    problem_size: Sequence[int] = (),
    element_bytes: int = 2,
    accumulators: int = 1,
) -> str | None:
    """Why ``config`` need not be tried, or None.

    Args:
        config: the config.
        device: None skips the rules about the device.
        problem_size: (M, N, K) for a tiled product; others are not judged by size.
        element_bytes: size of an operand's element.
        accumulators: fp32 output tiles kept at once.
    """
    warp = device.warp_size if device else 32
    need = estimate_resources(config, element_bytes, accumulators, warp)
    if device:
        if need.shared_memory_bytes > device.shared_memory_per_block:
            return (
                f"shared memory {need.shared_memory_bytes} B above "
                f"{device.shared_memory_per_block} B"
            )
        if need.registers_per_thread > device.registers_per_thread:
            return (
                f"registers {need.registers_per_thread} per thread above "
                f"{device.registers_per_thread}"
            )
        if need.registers_per_thread * need.threads > device.registers_per_sm:
            return f"registers of {need.threads} threads above {device.registers_per_sm} per SM"
    if len(problem_size) == 3 and "BLOCK_M" in _capitals(config):
        return _badly_sized(_capitals(config), problem_size)
    return None


def _capitals(config: Config) -> Config:
    """Names of blocks as a kernel has them; launchers and tile tables write them small."""
    return {
        name.upper() if name.startswith("block_") else name: value for name, value in config.items()
    }


def _badly_sized(config: Config, problem_size: Sequence[int]) -> str | None:
    for name, size in zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), problem_size, strict=True):
        block = config.get(name, _SMALLEST_TILE)
        if block > _SMALLEST_TILE and size < block * _MIN_TILE_USE:
            return f"{name}={block} is mostly padding for a size of {size}"
    return None
