# SPDX-License-Identifier: MIT
"""Which vLLM and which GPU this package serves with, and the errors for all others."""

from __future__ import annotations

import functools
import importlib.metadata
import logging

from oss_fused import envs
from oss_fused.errors import BackendUnavailableError, SchemeError, UnsupportedDeviceError

# the release whose extension points plugin/ was written for and run with
SUPPORTED_VLLM = "0.32"
# FP8 tensor cores: Ada (8.9), Hopper (9.0) and later
MIN_CAPABILITY = 89

# Python's own, which needs nothing of vLLM
logger = logging.getLogger(__name__)


def check_vllm() -> None:
    """Refuse a vLLM whose extension points may differ.

    Raises:
        BackendUnavailableError: vLLM is missing, or of another release.
    """
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        raise BackendUnavailableError(
            f"vllm is not installed; expected vllm {SUPPORTED_VLLM}.*: pip install "
            f"'vllm=={SUPPORTED_VLLM}.*'"
        ) from None
    if version.split("+")[0].split(".")[:2] != SUPPORTED_VLLM.split("."):
        raise BackendUnavailableError(
            f"vllm=={version}: oss_fused works with vllm {SUPPORTED_VLLM}.*; install that, or an "
            f"oss_fused for your vllm, or set VLLM_PLUGINS to leave oss_fused out"
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
