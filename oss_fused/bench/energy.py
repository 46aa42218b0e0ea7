# SPDX-License-Identifier: MIT
"""Energy of a call by NVML's counter, and the work done per joule."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from oss_fused.bench.timing import capture
from oss_fused.errors import BackendUnavailableError

# calls between two looks at the clock
_CALLS = 20
# the counter advances every 20 to 100 ms
_ENERGY_SECONDS = 0.5


def energy_per_call_mj(fn: Callable[[], Any], device: torch.device) -> float:
    """Millijoules of one call by NVML's energy counter, from calls that fill half a second.

    Replayed from a CUDA graph, so that a GPU which waits for the host is not counted in. Calls
    that no graph can hold are made one by one, and then it is.

    Raises:
        BackendUnavailableError: nvidia-ml-py is missing or the GPU has no such counter.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU") else f"GPU-{uuid}")
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except Exception as error:  # NVML raises a class per code, ImportError without the package
        raise BackendUnavailableError(
            f"energy: NVML's energy counter is not readable ({error}); install nvidia-ml-py, "
            "or measure without energy"
        ) from error
    fn()
    torch.cuda.synchronize(device)
    with torch.cuda.device(device):
        try:
            run = capture([fn] * _CALLS)[0].replay
        except RuntimeError:

            def run() -> None:
                for _ in range(_CALLS):
                    fn()

        before = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        calls, start = 0, time.perf_counter()
        while time.perf_counter() - start < _ENERGY_SECONDS:
            run()
            calls += _CALLS
            torch.cuda.synchronize(device)
    return (pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) - before) / calls


def gops_per_watt(flops: int, energy_mj: float) -> float:
    """1e9 operations per second and watt, which is per joule.

    Raises:
        ValueError: an energy that is not positive.
    """
    if not energy_mj > 0:
        raise ValueError(f"energy_mj={energy_mj}: expected a positive number")
    return flops / 1e9 / (energy_mj / 1e3)
