# SPDX-License-Identifier: MIT
"""Shared set-up of the tests: interpreter mode without a GPU, skipping of gpu tests."""

from __future__ import annotations

import os

import hypothesis
import pytest
import torch

from tests.interpreter import spare_lookups

# selections by subject, for whoever names one; the whole suite runs their tests where they live
collect_ignore = ["test_rmsnorm_rope.py", "test_fp8_gemm.py"]

HAS_GPU = torch.cuda.is_available()

if not HAS_GPU:
    # read by triton when it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")
    spare_lookups()
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
# huge pages: engines in processes of their own fill a KV cache of a GiB with zeros
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

# here, before pytest reads --hypothesis-profile: a profile loaded later would win over the flag
hypothesis.settings.register_profile("dev", max_examples=20, deadline=None, derandomize=True)
hypothesis.settings.register_profile("ci", max_examples=300, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


# first: pytest selects by -m in the same hook
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_GPU:
        for item in items:
            # an operator's test runs on the GPU there
            if "device" in getattr(item, "fixturenames", ()):
                item.add_marker("gpu")
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture
def device() -> torch.device:
    """The GPU where there is one, else the CPU (Triton kernels then run under the interpreter)."""
    return torch.device("cuda" if HAS_GPU else "cpu")
