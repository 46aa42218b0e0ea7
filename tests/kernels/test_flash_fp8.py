# SPDX-License-Identifier: MIT
"""FP8 operands of attention, which the kernel itself dequantises, against the twin."""

import pytest
import torch

from oss_fused.kernels.flash_attention import forward as forward_kernel
from oss_fused.quant.attention_fp8 import AttentionFP8
from oss_fused.quant.formats import E4M3, E5M2
from tests.kernels.test_flash_attention import (
    TOLERANCE,
    assert_near,
    forward,
    operands,
    random_mask,
)

FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)

# sizes, options, operands in FP8, dtype of the others
CASES = {
    "window": ({"n": 45, "m": 45}, {"window_left": 17, "window_right": 3}, "v", torch.bfloat16),
    "window of keys and values": ({"n": 30}, {"window_left": 9}, "kv", torch.float16),
    "dropout and mask": ({"heads": 2, "n": 20, "m": 40}, {"dropout_p": 0.3}, "v", torch.float16),
    "grouped, padded heads": ({"heads": 4, "kv": 2, "n": 9, "d": 20, "dv": 40}, {}, "qkv", None),
    "wide heads": ({"n": 9, "m": 33, "d": 144, "dv": 136}, {"causal": True}, "qkv", None),
    "float32 beside": ({"n": 7, "m": 33, "d": 64, "dv": 64}, {"causal": True}, "v", torch.float32),
    "one key": ({"n": 5, "m": 1}, {}, "qkv", None),
}


def quantised(tensors, fmt, kind, dtype):
    codes, scales = [], {}
    for name, t in zip("qkv", tensors):
        if name in kind:
            scale = t.abs().amax((0, 1, 2)) / fmt.max
            codes.append((t / scale).to(fmt.dtype))
            scales[f"{name}_scale"] = scale
        else:
            codes.append(t.to(dtype))
    return codes, scales


def assert_equal_to_the_twin(codes, options):
    want, got = (forward(backend, codes, **options) for backend in ("torch", "triton"))
    dtype = want[0].dtype
    assert got[0].dtype == dtype
    # products with codes have bfloat16's precision; the interpreter's of v have float32's
    coarse = "k_scale" in options or codes[2].is_cuda
    tolerance = TOLERANCE[torch.bfloat16 if coarse else dtype]
    for ours, theirs in zip(got, want):
        assert_near(ours, theirs, tolerance)


@FORMATS
@pytest.mark.parametrize("case", CASES)
def test_options(case, fmt, device):
    shape, options, kind, dtype = CASES[case]
    if device.type == "cuda" and case != "one key":
        # several tiles of keys
        shape = {**shape, "n": 8 * shape["n"], "m": 8 * shape.get("m", 70)}
    tensors = operands(**shape, device=device)
    codes, scales = quantised(tensors, fmt, kind, dtype)
    if "dropout_p" in options:
        mask = random_mask(tensors[0].shape[2], tensors[1].shape[2], device)
        options = {**options, "mask": mask}
    assert_equal_to_the_twin(codes, {**options, **scales})


@FORMATS
@pytest.mark.parametrize("mode", ["tensor", "channel", "group"])
@pytest.mark.parametrize("qk", [False, True])
def test_scale_modes(mode, qk, fmt, device):
    tensors = [t.bfloat16() for t in operands(n=33, m=50, d=32, dv=32, device=device)]
    found = AttentionFP8(mode, quantize_qk=qk, fmt=fmt).quantize(*tensors, 0.0)
    scales = {"q_scale": found.q_scale, "k_scale": found.k_scale, "v_scale": found.v_scale}
    assert found.v.dtype == fmt.dtype and (found.q.dtype == fmt.dtype) == qk
    scales = {name: scale for name, scale in scales.items() if scale is not None}
    assert_equal_to_the_twin([found.q, found.k, found.v], scales)


@FORMATS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_code_is_exact(fmt, dtype, device):
    """One key has all weight: the result is its value."""
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(fmt.dtype).view(1, 2, 1, 128)
    q, k = (torch.ones(1, 2, 1, 16, dtype=dtype, device=device) for _ in "qk")
    ones = torch.ones(128, device=device)
    out = forward("triton", (q, k, codes), v_scale=ones)[0]
    torch.testing.assert_close(out.float(), codes.float(), rtol=0, atol=0, equal_nan=True)


@FORMATS
def test_a_code_of_nan_stays_in_its_column(fmt, device):
    codes, scales = quantised(operands(n=40, m=70, device=device), fmt, "qkv", None)
    codes[2].view(torch.uint8)[0, 0, 50, 3] = 0x7F
    out = forward("triton", codes, **scales)[0]
    assert out[..., 3].isnan().all() and out.isnan().sum() == 40


def test_fp8_values_are_not_copied(device):
    if device.type != "cuda":
        pytest.skip("counts a GPU's memory")
    tensors = operands(heads=4, kv=4, n=2048, m=2048, d=128, dv=128, device=device)
    codes, scales = quantised(tensors, E4M3, "v", torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, row_max, row_sum = forward("triton", codes, **scales)
    held = sum(t.numel() * t.element_size() for t in (out, row_max, row_sum))
    assert torch.cuda.max_memory_allocated() - before <= held + 2**20


def test_tiles_of_codes_are_half_as_long(monkeypatch):
    monkeypatch.setattr(forward_kernel, "shared_memory", lambda device: 227 * 1024)
    arguments = torch.device("cuda"), torch.bfloat16, 128, 128
    assert forward_kernel._tiles(*arguments).block_n == 128
    assert forward_kernel._tiles(*arguments, codes=True) == (128, 64, 8, 3)
