# SPDX-License-Identifier: MIT
"""Which layers take our decode attention; what it computes: tests/kernels/test_attention.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from oss_fused.layers.vllm import attention

pytestmark = pytest.mark.serve


@pytest.mark.parametrize(
    ("cache", "head_size", "max_model_len", "flash"),
    [
        ("auto", 128, 131072, False),
        ("fp8", 64, 131072, False),
        ("fp8", 128, 1024, False),
        ("fp8_e4m3", 128, 8192, True),
    ],
)
def test_large_fp8_heads_at_long_context_stay_in_flash_attention(
    cache, head_size, max_model_len, flash
):
    impl = SimpleNamespace(kv_cache_dtype=cache, head_size=head_size)
    assert attention._flash_is_faster(impl, max_model_len) is flash
