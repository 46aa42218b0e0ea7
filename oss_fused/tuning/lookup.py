# SPDX-License-Identifier: MIT
"""Keys of tuning results, and the lookup of a tuned config."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from oss_fused.errors import SchemeError, ShapeMismatchError
from oss_fused.kernels.checks import check_device
from oss_fused.tuning.cache import CacheKey, TuningCache
from oss_fused.tuning.device import DeviceDescription
from oss_fused.tuning.identity import kernel_identity
from oss_fused.tuning.objective import Objective
from oss_fused.tuning.space import Config


def shape_of(problem_size: Any) -> tuple[int, ...]:
    """The sizes of a tuple, or of a data class of specs.py.

    Raises:
        ShapeMismatchError: neither.
    """
    shape = getattr(problem_size, "shape", problem_size)
    if not isinstance(shape, tuple | list) or not all(isinstance(s, int) and s >= 0 for s in shape):
        raise ShapeMismatchError(
            f"problem_size={problem_size!r}: expected a tuple of sizes or a data class of specs"
        )
    return tuple(shape)


def cache_key(
    operation: str,
    problem_size: Any,
    dtypes: Sequence[torch.dtype],
    device: str | torch.device,
    description: DeviceDescription | None = None,
    *,
    kernel: str,
    objective: str,
) -> CacheKey:
    """The key of a result: a given description stands for the device it simulates."""
    if description is not None:
        name = description.name
    else:
        found = check_device(device)
        name = torch.cuda.get_device_name(found) if found.type == "cuda" else found.type
    listed = ",".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    shape = shape_of(problem_size)
    return CacheKey(operation, shape, listed, name, kernel=kernel, objective=objective)


def get_cached_config(
    operation: str,
    problem_size: Any,
    dtype: torch.dtype | Sequence[torch.dtype] = torch.bfloat16,
    device: str | torch.device = "cuda:0",
    cache: TuningCache | None = None,
    *,
    kernel_fn: Callable[..., Any] | None = None,
    objective: Objective | None = None,
) -> Config | None:
    """The tuned config of exactly this problem on this device, or None.

    What is not given, the cache must leave no doubt about: entries that differ in the kernel, or
    in the dtypes of further tensors, are refused rather than chosen from.

    Args:
        operation: the tuner's ``operation``.
        problem_size: sizes, or a data class of specs.py.
        dtype: dtype of the first tensor, or those of all.
        device: the device tuned on.
        cache: default: the user's cache file.
        kernel_fn: the kernel tuned; an entry of another version of its source does not count.
        objective: what was minimised; default: latency.

    Raises:
        SchemeError: several entries fit.
        BackendUnavailableError: ``device`` is a GPU and none is usable here.
        UnsupportedDeviceError: no such device.
        ShapeMismatchError: ``problem_size`` is not a tuple of sizes.
    """
    cache = cache or TuningCache()
    dtypes = [dtype] if isinstance(dtype, torch.dtype) else list(dtype)
    kernel = kernel_identity(kernel_fn) if kernel_fn is not None else ""
    wanted = cache_key(
        operation,
        problem_size,
        dtypes,
        device,
        kernel=kernel,
        objective=str(objective or Objective()),
    )

    def fits(key: CacheKey) -> bool:
        same = replace(key, kernel=kernel) if kernel_fn is None else key
        if isinstance(dtype, torch.dtype):
            same = replace(same, dtype=same.dtype.split(",")[0])
        return same == wanted

    found = [entry for entry in cache.entries().values() if fits(entry.key)]
    if len(found) > 1:
        names = "; ".join(f"{e.key.kernel} of {e.key.dtype}" for e in found)
        raise SchemeError(
            f"operation={operation!r}: {len(found)} tuned entries fit ({names}); "
            "expected kernel_fn and the dtypes of all tensors"
        )
    return dict(found[0].config) if found else None
