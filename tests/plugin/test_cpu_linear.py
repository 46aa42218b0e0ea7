# SPDX-License-Identifier: MIT
"""FP8 linear layers on a CPU: two bytes per weight, every code as it is, the twin's result."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm")

from oss_fused.kernels.gemm import packed
from oss_fused.kernels.gemm.reference import bf16_product
from oss_fused.kernels.op import get_kernel
from oss_fused.layers.vllm import linear

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM's platform is a GPU here")
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16


@pytest.fixture(autouse=True, scope="module")
def _vllm_operations():
    from vllm.platforms import current_platform

    current_platform.import_kernels()


@pytest.fixture(params=[False, True], ids=["dense", "packed"])
def packs(request, monkeypatch):
    """Weights in rows, and in the order of bf16 instructions where this CPU has them."""
    if request.param and not packed.available():
        pytest.skip("this CPU has no bf16 instructions")
    monkeypatch.setattr(packed, "available", lambda: request.param)
    return request.param


def finite_codes(n, k):
    return (torch.arange(n * k) % 0x7F).to(torch.uint8).view(FP8).view(n, k)


def dense(weight):
    """Rows of a weight in either form: its product with the identity, which rounds nothing."""
    return bf16_product(torch.eye(weight.shape[1], dtype=BF16), weight).t()


@pytest.mark.parametrize(("n", "k"), [(48, 64), (208, 64), (200, 64), (48, 40)])
def test_weights_take_two_bytes_and_hold_every_code(n, k, packs):
    codes = finite_codes(n, k)
    numbers = linear._numbers(codes, BF16)
    assert numbers.dtype == (packed.PACKED if packs and packed.fits(n, k) else BF16)
    assert numbers.shape == codes.shape and numbers.element_size() == 2
    assert numbers.untyped_storage().nbytes() == 2 * codes.numel()
    assert torch.equal(dense(numbers).float(), codes.float())


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_weight_only_layers_keep_their_activations(dtype, packs):
    """float16 activations do not fit into bf16: 1 + 2**-9 would be lost."""
    codes, scale = get_kernel("torch", "quantize_fp8")(torch.randn(48, 64), None, "channel")
    x = (1 + torch.randn(5, 64) * 2**-9).to(dtype)
    bias = torch.randn(48).to(dtype)
    weight = linear._numbers(codes, dtype)
    served = linear._weight_only_linear(x, weight, scale, bias, True)
    exact = x.double() @ (codes.double() * scale).t() + bias.double()
    assert served.dtype == dtype
    # a sum rounded to the activations' dtype, scaled, and rounded again
    error = (served.double() - exact).norm() / exact.norm()
    assert error < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("way", ["absent", "another signature", "another result"])
def test_without_vllms_operations_layers_work_as_before_and_say_so_once(way, monkeypatch, caplog):
    def unpacked(out, a, b, bias, is_vnni):
        out.copy_(a @ b.t())

    real = torch.ops._C

    class Operations:
        if way != "absent":
            convert_weight_packed = staticmethod(lambda weight: weight.flip(0))
            weight_packed_linear = staticmethod(
                unpacked if way == "another result" else lambda out, a, b: None
            )

        def __getattr__(self, name):
            if name in ("convert_weight_packed", "weight_packed_linear"):
                raise AttributeError(name)
            return getattr(real, name)

    monkeypatch.setattr(torch.ops, "_C", Operations())
    monkeypatch.setattr(packed, "HAS_INSTRUCTIONS", True)
    packed._is_right.cache_clear()
    said = []
    monkeypatch.setattr(linear.logger, "warning_once", said.append)
    try:
        numbers = linear._numbers(finite_codes(48, 64), BF16)
    finally:
        packed._is_right.cache_clear()
    assert numbers.dtype == BF16 and torch.equal(numbers.float(), finite_codes(48, 64).float())
    assert len(said) == 1 and "no product of packed bf16 weights" in said[0]


def test_a_layer_calls_the_operation_without_the_dispatcher(monkeypatch):
    """Traced or on a GPU it is the operator; here the kernel, seen by the monitor as ever."""
    from oss_fused.kernels import op

    seen = []
    monkeypatch.setattr(op, "_observer", lambda name, args: seen.append((name, len(args))))
    monkeypatch.setattr(op, "_kernel", lambda backend, name: lambda *args: (backend, name))
    assert op.direct("fp8_linear")(torch.zeros(1, 4), None) == ("cpu", "fp8_linear")
    assert op.direct("moe_route")(torch.zeros(1, 4), 2, True) == ("torch", "moe_route")
    assert seen == [("fp8_linear", 2), ("moe_route", 3)]
