# SPDX-License-Identifier: MIT
"""Which vLLM and which GPU this package serves with, and the errors for all others."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import logging
import multiprocessing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import oss_fused
from oss_fused import envs
from oss_fused.errors import BackendUnavailableError, SchemeError, UnsupportedDeviceError
from oss_fused.plugin import hooks
from oss_fused.plugin.hooks_read import READ
from oss_fused.plugin.signatures import Package, missing_arguments, takes

# the releases with which the tests ran; CONTRIBUTING.md says how the next one is taken in
TESTED_VLLM = ("0.32.0", "0.33.0")
# FP8 tensor cores: Ada (8.9), Hopper (9.0) and later
MIN_CAPABILITY = 89
# load formats of vLLM's ShardedStateLoader
_SHARDED = ("sharded_state", "runai_streamer_sharded")

# Python's own, which needs nothing of vLLM
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HookResult:
    """One hook of vLLM: its path, its signature or kind, and what is wrong with it, if anything."""

    path: str
    found: str
    problem: str = ""


def vllm_package() -> Package:
    """The sources of the installed vLLM.

    Raises:
        BackendUnavailableError: it is not installed.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise BackendUnavailableError(
            f"vllm is not installed; expected vllm {' or '.join(TESTED_VLLM)}: pip install "
            f"vllm=={TESTED_VLLM[0]}"
        )
    return Package(Path(spec.submodule_search_locations[0]), "vllm")


def check_hooks(vllm: Package) -> list[HookResult]:
    """Compare every listed hook with the sources of ``vllm``; imports nothing of it."""
    ours = Package(Path(oss_fused.__file__).parent, "oss_fused")
    results = [_check_call(vllm, path, call) for path, call in hooks.CALLED.items()]
    pairs = list(hooks.REPLACED.items())
    for (theirs, mine), names in hooks.OVERRIDDEN.items():
        pairs += [(f"{theirs}.{name}", f"{mine}.{name}") for name in names.split()]
    for theirs, mine in pairs:
        results.append(_check_override(vllm, theirs, ours, mine, theirs in hooks.REPLACED))
    for path, names in READ.items():
        members = [f"{path}.{name}" for name in names.split()]
        for member in members if path in hooks.CALLED else [path, *members]:
            found = vllm.find(member)
            results.append(
                HookResult(member, "missing", "is missing")
                if found is None
                else HookResult(member, type(found.node).__name__)
            )
    return results


def _check_call(vllm: Package, path: str, call: str) -> HookResult:
    signature = vllm.signature(path)
    if signature is None:
        return HookResult(path, "missing", "is missing")
    if not takes(signature, call):
        return HookResult(path, str(signature), f"takes {signature}; expected to take ({call})")
    return HookResult(path, str(signature))


def _check_override(
    vllm: Package, path: str, ours: Package, mine: str, gets_original: bool
) -> HookResult:
    theirs, taken = vllm.signature(path), ours.signature(mine)
    if theirs is None or taken is None:
        return HookResult(path, "missing", "is missing")
    given = list(theirs.parameters.values())
    if gets_original:
        taken = taken.replace(parameters=list(taken.parameters.values())[1:])
        method = vllm.find(path)
        if method is not None and method.owner:
            taken = taken.replace(parameters=list(taken.parameters.values())[1:])
    missing = missing_arguments(taken, theirs.replace(parameters=given))
    problem = f"has {', '.join(missing)}, which {mine} lacks" if missing else ""
    return HookResult(path, str(theirs), problem)


def check_vllm() -> None:
    """Refuse a vLLM that lacks a hook, or has one with another signature.

    A release in TESTED_VLLM was compared when it was tested, and is not compared at each start.

    Raises:
        BackendUnavailableError: vLLM is missing, or a hook is; names the first one.
    """
    package = vllm_package()
    version = importlib.metadata.version("vllm")
    if version.split("+")[0] in TESTED_VLLM:
        return
    results = check_hooks(package)
    wrong = [result for result in results if result.problem]
    tested = " or ".join(TESTED_VLLM)
    if wrong:
        more = f" ({len(wrong) - 1} more: scripts/doctor.py --hooks)" if wrong[1:] else ""
        raise BackendUnavailableError(
            f"vllm=={version}: {wrong[0].path} {wrong[0].problem}{more}; install vllm {tested}, or "
            f"an oss_fused for your vllm, or set VLLM_PLUGINS to leave oss_fused out"
        )
    if multiprocessing.parent_process() is None:
        logger.warning(
            "oss_fused was not tested with vllm==%s, but all %d hooks that it uses are there; "
            "tested: %s",
            version,
            len(results),
            tested,
        )


def check_settings() -> None:
    """Refuse an environment variable with a value that it cannot have; warn of those that moved.

    Raises:
        SchemeError: names the variable, its value and what was expected.
    """
    try:
        envs.snapshot()
    except ValueError as error:
        raise SchemeError(str(error)) from None
    _warn_of_moved_variables()


@functools.cache
def _warn_of_moved_variables() -> None:
    if text := envs.moved():
        logger.warning("oss_fused: %s", text)


def check_load_format(vllm_config: Any) -> None:
    """Refuse files that hold the state of vLLM's layers, rank by rank, as they were saved.

    Their loader writes past the checks of our layers, and over weights of another form.

    Raises:
        SchemeError: names the load format.
    """
    chosen = vllm_config.load_config.load_format
    if chosen in _SHARDED:
        raise SchemeError(
            f"--load-format {chosen}: quantization oss_fp8 does not support it; expected auto, or "
            f"another format of whole checkpoints"
        )


def check_device() -> None:
    """Refuse a GPU without FP8 tensor cores.

    Raises:
        UnsupportedDeviceError: the GPU is older than capability 8.9, or not NVIDIA's.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return
    if not current_platform.is_cuda():
        raise UnsupportedDeviceError(
            f"platform={current_platform.device_name!r}: quantization oss_fp8 runs on NVIDIA GPUs "
            f"and, for tests, on CPUs; serve this model without --quantization oss_fp8"
        )
    capability = current_platform.get_device_capability()
    if capability is not None and capability.to_int() < MIN_CAPABILITY:
        raise UnsupportedDeviceError(
            f"GPU {current_platform.get_device_name()!r} has compute capability "
            f"{capability.as_version_str()}: quantization oss_fp8 needs 8.9 or later (Ada, Hopper, "
            f"Blackwell) for FP8 tensor cores; serve the unquantised model on this GPU instead"
        )
