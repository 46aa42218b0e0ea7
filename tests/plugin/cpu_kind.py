# SPDX-License-Identifier: MIT
"""Tell vLLM that this CPU has AMX and AVX512-BF16, or that it has not.

vLLM asks torch, at the time it chooses a kernel. Layers that oss_fp8 leaves alone (attention,
unquantised matrices and experts) keep kernels that run on any CPU: a processor without AMX dies of
its instructions. Kernels for what oss_fp8 quantises are chosen as on the processor that is told of;
that none of them runs is what the tests show.
"""

from __future__ import annotations

import pytest
import torch

QUESTIONS = ("_is_amx_tile_supported", "_is_amx_fp16_supported", "_is_avx512_bf16_supported")


def tell_vllm(monkeypatch: pytest.MonkeyPatch, amx: bool) -> None:
    """Make vLLM believe in ``amx`` until the test ends."""
    from vllm.model_executor.kernels.linear.scaled_mm import cpu as scaled_mm
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    from vllm.v1.attention.backends import cpu_attn

    for name in QUESTIONS:
        monkeypatch.setattr(torch.cpu, name, lambda: amx)
    if not amx:
        return
    for module in (utils, scaled_mm):
        monkeypatch.setattr(module, "check_cpu_sgl_kernel", lambda n, k, dtype: False)
    plain = cpu_moe.X86CPUUnquantizedExperts
    monkeypatch.setattr(plain, "_supports_current_device", staticmethod(lambda: False))
    isa_of = cpu_attn._get_attn_isa

    def without_amx(*args: object, **options: object) -> str:
        isa = isa_of(*args, **options)
        return "vec" if isa == "amx" else isa

    monkeypatch.setattr(cpu_attn, "_get_attn_isa", without_amx)


def skip_without_fp8_cache() -> None:
    """Skip a test where vLLM has no FP8 KV cache: on a CPU without AVX-512 and AMX."""
    cpu = torch.cpu
    if torch.cuda.is_available() or cpu._is_avx512_supported() or cpu._is_amx_tile_supported():
        return
    pytest.skip("vLLM's FP8 KV cache on a CPU needs AVX-512 or AMX")


@pytest.fixture(params=[False, True], ids=["plain", "amx"])
def amx(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both kinds of CPU, one after the other."""
    tell_vllm(monkeypatch, request.param)
    return request.param
