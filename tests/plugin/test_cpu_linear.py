# SPDX-License-Identifier: MIT
"""FP8 linear layers on a CPU: two bytes per weight, every code as it is, the twin's result."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm")

from oss_fused.kernels.op import get_kernel
from oss_fused.layers.vllm import linear

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM's platform is a GPU here")
FP8 = torch.float8_e4m3fn


def finite_codes(n, k):
    return (torch.arange(n * k) % 0x7F).to(torch.uint8).view(FP8).view(n, k)


@pytest.mark.parametrize(("n", "k"), [(48, 64), (200, 64)])
def test_unpacked_weights_take_two_bytes_and_hold_every_code(n, k):
    codes = finite_codes(n, k)
    numbers = linear._unpacked(codes)
    assert numbers.shape == codes.shape and numbers.element_size() == 2
    assert numbers.untyped_storage().nbytes() == 2 * codes.numel()
    assert torch.equal(numbers.float(), codes.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weight_only_layers_keep_their_activations(dtype):
    """float16 activations do not fit into bf16: 1 + 2**-9 would be lost."""
    codes, scale = get_kernel("torch", "quantize_fp8")(torch.randn(48, 64), None, "channel")
    x = (1 + torch.randn(5, 64) * 2**-9).to(dtype)
    bias = torch.randn(48).to(dtype)
    served = linear._weight_only_linear(x, linear._unpacked(codes), scale, bias, True)
    exact = x.double() @ (codes.double() * scale).t() + bias.double()
    assert served.dtype == dtype
    # a sum rounded to the activations' dtype, scaled, and rounded again
    error = (served.double() - exact).norm() / exact.norm()
    assert error < 2 * torch.finfo(dtype).eps


def test_a_layer_calls_the_operation_without_the_dispatcher(monkeypatch):
    """Traced or on a GPU it is the operator; here the kernel, seen by the monitor as ever."""
    from oss_fused.kernels import op

    seen = []
    monkeypatch.setattr(op, "_observer", lambda name, args: seen.append((name, len(args))))
    monkeypatch.setattr(op, "_kernel", lambda backend, name: lambda *args: (backend, name))
    assert op.direct("fp8_linear")(torch.zeros(1, 4), None) == ("cpu", "fp8_linear")
    assert op.direct("moe_route")(torch.zeros(1, 4), 2, True) == ("torch", "moe_route")
    assert seen == [("fp8_linear", 2), ("moe_route", 3)]
