# SPDX-License-Identifier: MIT
"""Casts, moves, copies and loads of modules: codes and scales stay what they are."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from oss_fused.errors import NumericalOverflowError, OssFusedError, UnsupportedDtypeError
from oss_fused.kernels import op as registry
from oss_fused.layers import FP8Linear, FusedGatedMLP, FusedRMSNorm, patch_model

FP8 = torch.float8_e4m3fn
CASTS = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "float": lambda m: m.float(),
    "double": lambda m: m.double(),
    "to": lambda m: m.to(torch.bfloat16),
    "to device and dtype": lambda m: m.to("cpu", torch.float16),
    "there and back": lambda m: m.half().to(torch.float32),
    "type": lambda m: m.type(torch.float16),
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "inside a model": lambda m: nn.Sequential(m).half()[0],
}


def linear(static=False, **options):
    scale = torch.tensor([0.01]) if static else None
    return FP8Linear.from_linear(nn.Linear(64, 24), scale, **options)


def gated():
    projections = [nn.Linear(64, 24, bias=False) for _ in range(2)]
    return FusedGatedMLP.from_linears(*projections, "silu", fp8=True)


MODULES = {"linear": linear, "static linear": lambda: linear(static=True), "gated MLP": gated}


def held(module):
    """Codes and scales of a module, as one can compare them."""
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {
        name: (t.view(torch.uint8) if t.dtype == FP8 else t).clone()
        for name, t in state.items()
        if t.dtype == FP8 or name.endswith("scale")
    }


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("grad", [False, True])
def test_a_cast_touches_neither_codes_nor_scales(kind, cast, grad):
    torch.manual_seed(0)
    module = MODULES[kind]()
    if getattr(module, "bias", None) is not None:
        # what a narrow bias holds, so that results can be compared
        module.bias.data = module.bias.data.bfloat16().float().half().float()
    x = torch.randn(3, 64)
    with torch.set_grad_enabled(grad):
        before, expected = held(module), module(x)
        module = CASTS[cast](module)
        after = held(module)
        assert before.keys() == after.keys()
        for name, tensor in before.items():
            assert after[name].dtype == tensor.dtype and torch.equal(after[name], tensor), name
        if cast == "double" and kind != "gated MLP":
            # the bias followed the cast, and there are no products in float64
            with pytest.raises(UnsupportedDtypeError, match=r"bias\.dtype=torch\.float64"):
                module(x)
        else:
            torch.testing.assert_close(module(x), expected, rtol=0, atol=1e-5)
            for dtype in (torch.float16, torch.bfloat16):
                out = module(x.to(dtype))
                assert out.dtype == dtype
                assert (out.float() - expected).norm() / expected.norm() < 0.05


@pytest.mark.parametrize("kind", MODULES)
def test_meta_and_back_by_a_strict_load(kind):
    module = MODULES[kind]()
    x, state = torch.randn(3, 64), copy.deepcopy(module.state_dict())
    with torch.no_grad():
        expected = module(x)
        for assign in (False, True):
            module = module.to("meta").half()
            assert all(t.is_meta for t in module.state_dict().values())
            assert module(x.to("meta")).shape == expected.shape
            if not assign:
                module = module.to_empty(device="cpu")
            module.load_state_dict(state, strict=True, assign=assign)
            torch.testing.assert_close(module.float()(x), expected, rtol=1e-2, atol=1e-2)


def test_a_norm_is_whole_after_to_empty():
    """Its constants are in no checkpoint."""
    norm = FusedRMSNorm(nn.Parameter(torch.rand(64) + 0.5), 1e-5)
    x, state = torch.randn(3, 64), copy.deepcopy(norm.state_dict())
    expected = norm(x)
    norm = norm.to("meta").to_empty(device="cpu")
    norm.load_state_dict(state)
    torch.testing.assert_close(norm(x), expected)


def test_a_saved_module_holds_the_codes_once():
    module = FP8Linear(256, 256, bias=False)
    with torch.no_grad():
        module(torch.randn(1, 256))  # unpacks them
    file = io.BytesIO()
    torch.save(module, file)
    assert file.tell() < 1.5 * 256 * 256


def test_new_weights_at_an_old_address_are_seen():
    """The allocator hands out the address of freed codes again."""
    module, x = linear(), torch.randn(2, 64)
    memory = module.weight.view(torch.uint8).numpy().copy()
    with torch.no_grad():
        module.weight = torch.from_numpy(memory).view(FP8)
        before = module(x)
        memory ^= 128
        module.weight = torch.from_numpy(memory).view(FP8)
        torch.testing.assert_close(module(x) - module.bias, module.bias - before)


@pytest.mark.parametrize("kind", MODULES)
def test_a_state_dict_of_wide_weights_is_refused(kind):
    module = MODULES[kind]()
    codes = module._codes[0]
    state = {**module.state_dict(), codes: getattr(module, codes).float().bfloat16()}
    with pytest.raises(UnsupportedDtypeError, match=rf"{codes}\.dtype=torch\.bfloat16"):
        module.load_state_dict(state)


def test_codes_are_no_weights_of_a_wide_gated_mlp():
    with pytest.raises(UnsupportedDtypeError, match=r"gate_weight\.dtype=torch\.float8_e4m3fn"):
        FusedGatedMLP(64, 24).load_state_dict(gated().state_dict(), strict=False)


@pytest.mark.parametrize("cast", ["deepcopy", "pickle"])
def test_a_copy_of_a_wide_gated_mlp_trains_on(cast):
    module = FusedGatedMLP(64, 24)
    made = CASTS[cast](module)
    for name, weight in module.named_parameters():
        twin = getattr(made, name)
        assert torch.equal(twin, weight) and twin.requires_grad, name


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("quantize_inputs", [True, False])
def test_codes_are_unpacked_once_on_a_cpu(monkeypatch, backend, quantize_inputs):
    """By every backend that can multiply what was unpacked."""
    monkeypatch.setenv("OSS_FUSED_BACKEND", backend)
    registry.default_backend.cache_clear()
    try:
        module, x = linear(quantize_inputs=quantize_inputs), torch.randn(2, 64)
        with torch.no_grad():
            module(x)
            unpacked = module._unpacked[2]
            module(x)
        assert unpacked.dtype == torch.float32 and module._unpacked[2] is unpacked
    finally:
        monkeypatch.undo()
        registry.default_backend.cache_clear()


def test_codes_that_are_changed_in_place_are_seen():
    module, x = linear(), torch.randn(2, 64)
    with torch.no_grad():
        before = module(x)
        module.weight.copy_((-module.weight.float()).to(FP8))
        torch.testing.assert_close(module(x) - module.bias, module.bias - before)


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_state_dict_of_unusable_scales_is_refused(kind, bad):
    module = MODULES[kind]()
    for name in module._scales:
        scale = getattr(module, name)
        if scale is not None:
            state = {**module.state_dict(), name: torch.full_like(scale, bad)}
            with pytest.raises(NumericalOverflowError, match=rf"{name}\[0\]="):
                module.load_state_dict(state)
            with pytest.raises(UnsupportedDtypeError, match=rf"{name}\.dtype"):
                module.load_state_dict({**module.state_dict(), name: scale.bfloat16()})


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan")])
def test_a_scale_is_checked_when_it_is_given_and_when_it_is_set(bad):
    with pytest.raises(NumericalOverflowError, match=r"input_scale\[0\]"):
        FP8Linear.from_linear(nn.Linear(8, 8), torch.tensor([bad]))
    for name in ("input_scale", "weight_scale"):
        module = linear(static=True)
        setattr(module, name, torch.full_like(getattr(module, name), bad))
        with pytest.raises(NumericalOverflowError, match=rf"{name}\[0\]"):
            module(torch.ones(2, 64))


def tiny_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grad", [False, True])
def test_a_patched_llama_is_cast_like_any_other(dtype, grad):
    model, tokens = tiny_llama(), torch.arange(8).view(1, -1)
    with torch.set_grad_enabled(grad):
        patch_model(model)
        before = model(tokens).logits
        after = copy.deepcopy(model).to(dtype)(tokens).logits
    assert after.dtype == dtype and after.requires_grad == grad
    # one code moves where a cast activation lies beside a tie: far below what FP8 costs itself
    assert (after.float() - before).norm() / before.norm() < 0.05


@pytest.mark.parametrize("on_overflow", ["adjust", "saturate"])
@pytest.mark.parametrize("size", [1.0, 30.0])
def test_a_static_scale_means_the_same_with_and_without_grad(on_overflow, size):
    torch.manual_seed(0)
    module = linear(static=True, on_overflow=on_overflow)
    x = torch.cat((torch.randn(3, 64), size * torch.randn(2, 64)))
    exact = nn.functional.linear(x, module.weight.float() * module.weight_scale, module.bias)
    with torch.no_grad():
        without = module(x)
    with_grad = module(x.clone().requires_grad_())
    assert with_grad.requires_grad and torch.equal(with_grad.detach(), without)
    error = (without - exact).norm() / exact.norm()
    saturates = size > 1 and on_overflow == "saturate"
    assert (error > 0.5) if saturates else (error < 0.05)
    # rows that fit are not touched by those that do not
    assert torch.equal(module(x[:3]).detach(), without[:3])


@pytest.mark.parametrize("grad", [False, True])
def test_overflow_of_a_static_scale_is_refused_where_asked(grad):
    module = linear(static=True, on_overflow="raise")
    x = torch.full((2, 64), 4.0, requires_grad=grad)
    module(x)
    with pytest.raises(NumericalOverflowError, match="too small"), torch.set_grad_enabled(grad):
        module(10 * x)


def test_gradients_pass_an_fp8_gated_mlp():
    module = gated()
    x = torch.randn(3, 64, requires_grad=True)
    module(x).sum().backward()
    gate, up = (
        (getattr(module, f"{n}_weight").float() * getattr(module, f"{n}_scale")).t()
        for n in ("gate", "up")
    )
    wide = x.detach().clone().requires_grad_()
    (nn.functional.silu(wide @ gate) * (wide @ up)).sum().backward()
    torch.testing.assert_close(x.grad, wide.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton is not interpreted beside a GPU")
def test_a_layer_runs_on_the_backend_that_was_asked_for(monkeypatch):
    """Triton's kernels on a CPU (interpreted) take codes, not their float32 copies."""
    module, x = linear(), torch.randn(2, 64)
    with torch.no_grad():
        expected = module(x)
        monkeypatch.setenv("OSS_FUSED_BACKEND", "triton")
        registry.default_backend.cache_clear()
        try:
            torch.testing.assert_close(module(x), expected, rtol=1e-4, atol=1e-4)
        finally:
            monkeypatch.undo()
            registry.default_backend.cache_clear()


def test_a_module_made_in_inference_mode_runs():
    with torch.inference_mode():
        module, x = linear(static=True), torch.randn(2, 64)
        assert torch.equal(module(x), module(x))


def test_wrong_dtypes_are_named():
    for module in (FP8Linear(8, 8), FusedGatedMLP(8, 8)):
        with pytest.raises(OssFusedError, match="dtype"):
            module.double()(torch.randn(2, 8).double())
