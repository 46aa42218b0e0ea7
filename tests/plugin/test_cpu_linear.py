# SPDX-License-Identifier: MIT
"""FP8 linear layers on a CPU: two bytes per weight, every code as it is, the twin's result."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm")

from oss_fused.errors import CheckpointError
from oss_fused.kernels.gemm import packed
from oss_fused.kernels.gemm.reference import bf16_product
from oss_fused.kernels.op import get_kernel
from oss_fused.layers.vllm import linear
from tests.plugin.conftest import build, calibrate, edit, tensors_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM's platform is a GPU here")
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16


@pytest.fixture(autouse=True, scope="module")
def _vllm_operations():
    from vllm.platforms import current_platform

    current_platform.import_kernels()


@pytest.fixture(params=[False, True], ids=["dense", "packed"])
def packs(request, monkeypatch):
    """Weights in rows, and in the order of bf16 instructions where this CPU has them."""
    if request.param and not packed.HAS_INSTRUCTIONS:
        pytest.skip("this CPU has no bf16 instructions")
    monkeypatch.setattr(packed, "available", lambda: request.param)
    return request.param


def finite_codes(n, k):
    return (torch.arange(n * k) % 0x7F).to(torch.uint8).view(FP8).view(n, k)


def dense(weight):
    """Rows of a weight in either form: its product with the identity, which rounds nothing."""
    return bf16_product(torch.eye(weight.shape[1], dtype=BF16), weight).t()


@pytest.mark.parametrize(("n", "k"), [(48, 64), (208, 64), (200, 64), (48, 40), (16, 4096)])
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


def test_what_is_packed(monkeypatch):
    """Shapes that gain, of bf16 models: a packed product takes no other activations."""
    monkeypatch.setattr(packed, "available", lambda: True)
    monkeypatch.setattr(packed, "pack", lambda weight: "packed")
    for n, k in ((16, 32), (960, 576), (9600, 3072)):
        assert linear._numbers(torch.zeros(n, k, dtype=FP8), BF16) == "packed"
        dense = linear._numbers(torch.zeros(n, k, dtype=FP8), torch.float16)
        assert dense.dtype == BF16 and dense.shape == (n, k)
    for n, k in ((24, 32), (16, 48), (16, 4096), (0, 32), (16, 0)):
        assert linear._numbers(torch.zeros(n, k, dtype=FP8), BF16).dtype == BF16


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


def bytes_of(model):
    """What layers hold: tensors under any name, and what vLLM packs out of their sight."""
    held = {}
    for module in model.modules():
        for value in [*vars(module).values(), *module._parameters.values()]:
            if isinstance(value, torch.Tensor):
                held[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
            # what a processor's product holds: a packed matrix, or a handler, whose matrix is in
            # memory of its own
            if callable(value) and getattr(value, "__closure__", None):
                cells = [cell.cell_contents for cell in value.__closure__]
                for tensor in (c for c in cells if isinstance(c, torch.Tensor)):
                    storage = tensor.untyped_storage()
                    held[storage.data_ptr()] = storage.nbytes()
                handlers = [c for c in cells if hasattr(c, "handler_tensor")]
                held |= {id(h): 2 * h.n * h.k for h in handlers}
    return sum(held.values())


def scales_of(model):
    """Bytes that bf16 models do not have, four per row."""
    return sum(m.weight_scale.nbytes for m in model.modules() if hasattr(m, "weight_scale"))


def test_a_served_model_holds_no_more_than_bf16s_and_new_codes_after_a_load(tmp_path, engine):
    """Refused codes leave none behind either."""
    plain = build(tmp_path / "bf16", "llama")
    folders = [build(tmp_path / name, "llama", initializer_range=0.05) for name in ("a", "b")]
    matrices = {name: t for name, t in tensors_of(folders[1]).items() if t.dim() == 2}
    edit(folders[1], {name: matrix.flip(0) for name, matrix in matrices.items()})
    tensors = [tensors_of(calibrate(folder)) for folder in folders]
    bytes_of_bf16 = bytes_of(engine(plain).model)
    served = engine(folders[0])
    name = "model.layers.0.mlp.down_proj"

    def check(which):
        layer = served.model.get_submodule(name)
        assert layer.weight.dtype == (packed.PACKED if packed.HAS_INSTRUCTIONS else BF16)
        assert torch.equal(dense(layer.weight).float(), tensors[which][f"{name}.weight"].float())
        assert bytes_of(served.model) - scales_of(served.model) <= bytes_of_bf16

    def load(new):
        served.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(new.items())})

    check(0)
    load(tensors[1])
    check(1)
    bad = tensors[0][f"{name}.weight_scale"].clone().fill_(float("nan"))
    with pytest.raises(CheckpointError, match=r"down_proj.weight_scale"):
        load(tensors[0] | {f"{name}.weight_scale": bad})
    check(1)
