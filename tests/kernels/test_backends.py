# SPDX-License-Identifier: MIT
"""Every backend that runs here computes what backend "torch" computes, for every operation.

On a CPU that is Triton's interpreter; on a GPU also cuBLASLt's and vLLM's compiled operations and
TileLang, where they are installed.
"""

from __future__ import annotations

import sys

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map_only

from oss_fused.bench.runner import KernelRunner, shared_operations
from oss_fused.errors import BackendUnavailableError, OssFusedError, ShapeMismatchError
from oss_fused.kernels import op, vllm_ops
from oss_fused.kernels.op import OPERATIONS, _kernel, available_backends, get_kernel

FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16


def randn(*shape, dtype=BF16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weight(n, k):
    return get_kernel("torch", "quantize_fp8")(randn(n, k, seed=1), None, "channel")


def norm_rope():
    angles = torch.outer(torch.arange(5.0), torch.arange(16.0) / 7).repeat(1, 2)
    tables = (angles.cos().to(BF16), angles.sin().to(BF16))
    return (randn(2, 5, 256), 1 + 0.1 * randn(256, seed=1), *tables, 1e-6)


def rope_kv():
    # 4 heads of q and 2 of k and v, 64 values each
    cache = torch.randn(9, 64, generator=torch.Generator().manual_seed(2)).clamp(-1, 1).to(BF16)
    slots = torch.tensor([5, -1, 0])
    caches = [torch.zeros(2, 16, 2, 64, dtype=BF16) for _ in range(2)]
    rest = (None, None, None, None, 1e-6)
    return (randn(3, 8 * 64), torch.tensor([3, 1, 8]), cache, 4, True, *caches, slots, *rest)


def gemm(scales, bias=None):
    q, q_scale = get_kernel("torch", "quantize_fp8")(randn(20, 64), None, "token")
    w, w_scale = weight(48, 64)
    if scales == "tensor":
        q_scale, w_scale = q_scale[:1].view(1), w_scale[:1].view(1)
    return (q, w, q_scale, w_scale, bias, BF16)


def linear(static):
    w, w_scale = weight(48, 64)
    return (randn(20, 64), w, w_scale, torch.tensor([0.02]) if static else None, randn(48, seed=3))


def mlp(on, activation="silu"):
    pair = (0.1 * randn(48, 64, seed=1), 0.1 * randn(48, 64, seed=2))
    return (randn(2, 5, 64), *pair, None, None, activation, on)


def attention():
    tensors = (randn(1, 2, 40, 16), randn(1, 1, 40, 16, seed=1), randn(1, 1, 40, 16, seed=2))
    extras = (None, randn(2, seed=3), torch.tensor([0.5, 0.1]), *[None] * 4)
    return (*tensors, *extras, 0.25, True, -1, -1, 0.0, 0)


SCALE = torch.tensor([0.02])
# operation -> arguments; results that are FP8 codes with a scale are compared dequantised
CASES = {
    "act_mul_quant": [(randn(7, 128), "silu", None), (randn(7, 128), "gelu", SCALE)],
    "add_rms_norm_quant": [
        (randn(7, 128), residual, 1 + 0.1 * randn(128, seed=2), 1e-5, scale, write)
        for residual in (None, randn(7, 128, seed=1))
        for scale in (None, SCALE)
        for write in (True, False)
    ],
    "dequantize_fp8": [(*weight(7, 64), torch.float32)],
    "fp8_gemm": [gemm("rows"), gemm("tensor"), gemm("rows", randn(48, seed=3))],
    "fp8_linear": [linear(False), linear(True)],
    "conv2d": [
        (randn(2, 5, 6, 7), randn(9, 5, 3, 3, seed=1), None, [1, 1], [1, 1], [1, 1], False, method)
        for method in ("implicit", "direct")
    ],
    "flash_attention": [attention()],
    "gated_mlp_backward": [
        (randn(2, 5, 48, seed=4), *mlp(on)[:3], activation, on)
        for on in ("up", "gate")
        for activation in ("silu", "gelu", "gelu_tanh")
    ],
    "gated_mlp": [mlp("up"), mlp("gate"), mlp("up", "gelu"), mlp("gate", "gelu_tanh")],
    "layer_norm": [(randn(5, 70), randn(70, seed=1), randn(70, seed=2), 1e-5, "welford")],
    "layer_norm_stats": [(randn(5, 70), "welford")],
    "layer_norm_dropout": [(randn(5, 70), None, None, 1e-5, 0.5, 1 << 40)],
    "quantize_fp8": [
        (randn(7, 64), scale, strategy)
        for scale, strategy in ((None, "tensor"), (None, "token"), (SCALE, "tensor"))
    ]
    + [(randn(7, 64), torch.full((7, 1), 0.02), "token")],
    "quantize_fp8_adjusted": [
        (randn(7, 64), scale)
        for scale in (SCALE, torch.tensor([1e-4]), torch.linspace(1e-4, 0.02, 7).view(7, 1))
    ],
    "rmsnorm_rope": [norm_rope()],
    "rmsnorm_rope_backward": [(randn(2, 5, 256, seed=4), *norm_rope())],
    "rope_kv": [rope_kv()],
    "softmax": [(randn(5, 70), "online")],
    "weight_only_linear": [
        (randn(rows, 64), *weight(48, 64), bias)
        for rows in (1, 2, 20)
        for bias in (None, randn(48, seed=3))
    ],
}
# codes are a grid of 3 mantissa bits: where a sum lands beside a tie the neighbour is as right
TOLERANCE = {FP8: 0.02, BF16: 6e-3, torch.float32: 1e-5}


def on(device, args):
    def move(a):
        if isinstance(a, list):
            return [move(each) for each in a]
        return a.to(device).clone() if isinstance(a, torch.Tensor) else a

    return [move(a) for a in args]


def values(result):
    """Results as comparable tensors: codes followed by their scale become what they stand for."""
    found = [result] if isinstance(result, torch.Tensor) else list(result or ())
    if found and found[0].dtype == FP8 and len(found) > 1:
        wide = found[0].float() * found[1].float()
        return [(wide, FP8), *((t, t.dtype) for t in found[2:])]
    return [(t, t.dtype) for t in found]


PAIRS = [
    pytest.param(operation, backend, case, id=f"{operation}-{backend}-{number}")
    for operation, backends in shared_operations().items()
    for backend in backends
    for number, case in enumerate(
        [OPERATIONS[operation].contract.example(), *CASES.get(operation, [])]
    )
    if backend != "torch"
]


@pytest.mark.parametrize(("operation", "backend", "case"), PAIRS)
def test_backends_agree(operation, backend, case, device):
    if operation == "all_reduce" and device.type != "cpu":
        pytest.skip("its reference reads addresses of a CPU; test_all_reduce.py has GPUs")
    ours, theirs = on(device, case), on(device, case)
    actual = values(KernelRunner(backend).run(operation, *ours))
    expected = values(get_kernel("torch", operation)(*theirs))
    # what an operation writes into its arguments is a result, too
    actual += [(t, t.dtype) for t in ours if isinstance(t, torch.Tensor)]
    expected += [(t, t.dtype) for t in theirs if isinstance(t, torch.Tensor)]
    for (got, kind), (want, _) in zip(actual, expected, strict=True):
        assert got.shape == want.shape and got.dtype == want.dtype
        if want.numel():
            error = (got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-9)
            assert error <= TOLERANCE.get(kind, 0.0), f"relative error {error}"


# sizes that are 0 where there is nothing to do
ROWS = ("...", "B", "M", "N", "R", "T")
EMPTY = [
    pytest.param(operation, dim, backend, id=f"{operation}-{dim}-{backend}")
    for operation, backends in shared_operations().items()
    for dim, size in OPERATIONS[operation].contract.sizes.items()
    # rows of caches and tables have to hold what the positions of the example name
    if dim == "..." or (isinstance(size, int) and dim.isalpha() and dim[0].isupper() and dim != "P")
    for backend in sorted({"torch", *backends} & {"torch", "triton", "cpu"})
]


@pytest.mark.parametrize(("operation", "dim", "backend"), EMPTY)
def test_a_size_of_zero_is_empty_or_refused(operation, dim, backend, device):
    """Results are as empty as the fake's, or an argument is named."""
    if device.type == "cuda" and dim not in ROWS:
        pytest.skip("rows of width 0 are tried under the interpreter only")
    contract = OPERATIONS[operation].contract
    args = on(device, contract.example(**{dim: (0,) if dim == "..." else 0}))
    try:
        found = get_kernel(backend, operation)(*args)
    except OssFusedError:
        return
    with FakeTensorMode() as mode:
        fakes = tree_map_only(torch.Tensor, mode.from_tensor, args)
        wanted = getattr(torch.ops.oss_fused, operation)(*fakes)
    found, wanted = ([r] if isinstance(r, torch.Tensor) else list(r or ()) for r in (found, wanted))
    assert [t.shape for t in found] == [t.shape for t in wanted]


@pytest.mark.parametrize("backend", [b for b in available_backends() if b != "torch"])
def test_a_pipeline_agrees(backend, device):
    """Norm and rotation, gated MLP, FP8 product: errors do not build up from one to the next."""
    if backend in ("cpu", "cuda", "nvcc"):
        pytest.skip("has no gated MLP of its own")
    x, *rest = on(device, norm_rope())
    gate, up = (0.1 * randn(96, 256, seed=s).to(device) for s in (1, 2))
    down, down_scale = (t.to(device) for t in weight(48, 96))
    results = []
    for runner in (KernelRunner("torch"), KernelRunner(backend)):
        y = runner.run("rmsnorm_rope", x, *rest)
        y = runner.run("gated_mlp", y, gate, up, None, None, "silu", "gate")
        q, scale = get_kernel("torch", "quantize_fp8")(y.view(-1, 96), None, "token")
        results.append(runner.run("fp8_gemm", q, down, scale, down_scale, None, BF16).double())
    expected, actual = results
    assert (actual - expected).norm() / expected.norm() < 0.02


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("cuda", "NVIDIA GPU"),
        ("tilelang", "pip install tilelang"),
        ("nvcc", "python -m oss_fused.kernels.compiled"),
    ],
)
def test_a_missing_backend_says_how_to_get_it(backend, words):
    assert backend not in available_backends()
    with pytest.raises(BackendUnavailableError, match=words):
        get_kernel(backend, "fp8_gemm")


def test_missing_vllm_operations_say_how_to_get_them(monkeypatch):
    monkeypatch.setattr(op, "available_backends", lambda: ["torch", "cuda"])
    monkeypatch.setattr(vllm_ops, "library_file", lambda: None)
    # with a GPU an earlier test has imported it
    monkeypatch.delitem(sys.modules, "oss_fused.kernels.rope.cuda", raising=False)
    for cache in (vllm_ops.vllm_ops, get_kernel, _kernel):
        cache.cache_clear()
    with pytest.raises(BackendUnavailableError, match="pip install vllm"):
        get_kernel("cuda", "rope_kv")
    # cuBLASLt's product needs no vLLM, and names what it cannot do
    args = gemm("rows")
    with pytest.raises(ShapeMismatchError, match="multiples of 16"):
        get_kernel("cuda", "fp8_gemm")(args[0], args[1][:8], args[2], args[3][:8], None, BF16)
    for cache in (vllm_ops.vllm_ops, get_kernel, _kernel):
        cache.cache_clear()


def test_only_the_reference_compiles():
    args = on("cpu", norm_rope())
    with pytest.raises(ValueError, match="backend='triton'"):
        KernelRunner("triton", compiled=True)
    assert KernelRunner("torch", compiled=True).compiled
    assert KernelRunner("torch").run("rmsnorm_rope", *args).shape == args[0].shape
