# SPDX-License-Identifier: MIT
"""Auto-tuning as a decorator: a function that takes a config finds its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from oss_fused.tuning.lookup import shape_of
from oss_fused.tuning.space import Config, ConfigSpace
from oss_fused.tuning.tuner import TritonAutoTuner


def autotune(
    config_space: ConfigSpace | Mapping[str, Sequence[int]],
    problem_size: Callable[..., Any],
    **options: Any,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a kernel function search its config at the first call for a problem.

    The config comes from the cache where it is known. Later calls look it up in memory, by the
    problem, the dtypes of the tensors and the device of the first. A served model must not wait for
    a search: call the function for its problems before.

    Args:
        config_space: as TritonAutoTuner takes it.
        problem_size: called with the kernel's arguments; returns sizes, or a data class of specs.
        **options: further arguments of TritonAutoTuner.

    Returns:
        A decorator. The function then takes the kernel's arguments without the config; its
        attributes are ``tuner`` and ``best_config``, which takes the same arguments.
    """

    def decorate(kernel_fn: Callable[..., Any]) -> Callable[..., Any]:
        tuner = TritonAutoTuner(kernel_fn, config_space, **options)
        known: dict[Any, Config] = {}

        def best_config(*args: Any) -> Config:
            problem = problem_size(*args)
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
            device = tensors[0].device if tensors else torch.device("cpu")
            key = (shape_of(problem), tuple(tensor.dtype for tensor in tensors), device)
            if key not in known:
                found = tuner.tune(*args, problem_size=problem, device=device)
                known[key] = found.best_config
            return known[key]

        @functools.wraps(kernel_fn)
        def tuned(*args: Any) -> Any:
            return kernel_fn(*args, **best_config(*args))

        tuned.tuner, tuned.best_config = tuner, best_config  # type: ignore[attr-defined]
        return tuned

    return decorate
