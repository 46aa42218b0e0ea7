# SPDX-License-Identifier: MIT
"""Smoothing: the model stays what it was, and outliers of static inputs lose their harm."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM

from oss_fused.errors import SchemeError
from oss_fused.quant.formats import dequantize
from oss_fused.quant.recipe import make_recipe
from oss_fused.quant.record import load_record
from oss_fused.quant.scheme import FP8_DYNAMIC
from oss_fused.quant.smoothing import smooth_layer
from tests.quant.runs import Models, calibrate, changed, tensors, whole_model

IDS = torch.arange(40).view(2, 20) * 7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt-oss"])
def test_the_model_computes_what_it_did(models: Models, kind: str, dtype: torch.dtype) -> None:
    model = AutoModelForCausalLM.from_pretrained(models(kind), dtype=dtype).float()
    with torch.no_grad():
        # channels of very different size, so that there is something to move
        for layer in model.model.layers:
            layer.input_layernorm.weight.mul_(torch.logspace(-3, 3, 64, 2).to(dtype).float())
        before = copy.deepcopy(model.state_dict())
        expected = model(IDS).logits
        for index, layer in enumerate(model.model.layers):
            prefix = f"model.layers.{index}"
            schemes = {f"{prefix}.{name}": FP8_DYNAMIC for name, _ in layer.named_modules()}
            if kind == "gpt-oss":
                schemes = {name: s for name, s in schemes.items() if ".mlp." not in name}
            rescaled = smooth_layer(
                layer, prefix, schemes, 0.5, lambda: model(IDS), lambda _: dtype
            )
            assert len(rescaled) > 4
            for name, factors in rescaled.items():
                tensor = before[name]
                for factor in factors:
                    mantissa, _ = torch.frexp(factor)
                    assert (mantissa == 0.5).all()
                    tensor = tensor * factor
                assert torch.equal(tensor, model.state_dict()[name])
        moved = [n for n, t in model.state_dict().items() if not torch.equal(t, before[n])]
        assert len(moved) >= (8 if kind == "gpt-oss" else 14)
        for name in moved:
            tensor = model.state_dict()[name]
            if "layernorm" in name:
                assert torch.equal(tensor.to(dtype).float(), tensor)
        assert torch.equal(model(IDS).logits, expected)


def with_an_outlier(models: Models, tmp_path: Path) -> Path:
    """A model one of whose input channels is huge, and read with small weights."""
    before = tensors(models("llama"))
    state = {}
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        norm = before[f"{prefix}.input_layernorm.weight"].clone()
        norm[5] = 2.0**16
        state[f"{prefix}.input_layernorm.weight"] = norm
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = before[f"{prefix}.self_attn.{name}.weight"].clone()
            weight[:, 5] *= 2.0**-16
            state[f"{prefix}.self_attn.{name}.weight"] = weight
    source = changed(models, tmp_path, "llama")
    save_file({**before, **state}, source / "model.safetensors", metadata={"format": "pt"})
    return source


def test_outliers_of_static_inputs_lose_their_harm(
    models: Models, tmp_path: Path, text_file: Path
) -> None:
    source = with_an_outlier(models, tmp_path)
    settings = {"dataset": str(text_file), "scheme": "FP8_STATIC", "max_seq_length": 32}
    errors = {}
    for alpha in (None, 0.5):
        output = tmp_path / str(alpha)
        calibrate(source, output, smoothing=alpha, num_samples=4, **settings)
        errors[alpha] = {x.name: x.output_error for x in load_record(output).linears}
    for name in ("q_proj", "k_proj", "v_proj"):
        full = f"model.layers.0.self_attn.{name}"
        assert errors[None][full] > 0.15 and errors[0.5][full] < 0.05


def test_what_is_not_quantised_is_written_so_that_the_model_fits_together(
    models: Models, tmp_path: Path, text_file: Path
) -> None:
    source = models("qwen2")  # with biases
    calibrate(
        source,
        tmp_path / "out",
        targets=["re:.*o_proj", "re:.*down_proj"],
        smoothing=1.0,
        dataset=str(text_file),
        num_samples=2,
        max_seq_length=32,
        rounding="nearest",
    )
    before, after = tensors(source), tensors(tmp_path / "out")
    scales = {name: after.pop(name) for name in list(after) if name.endswith("_scale")}
    for name, scale in scales.items():
        weight = name.removesuffix("_scale")
        after[weight] = dequantize(after[weight], scale)
    for leaf in ("v_proj.weight", "v_proj.bias"):
        name = f"model.layers.0.self_attn.{leaf}"
        ratio = (before[name].float() / after[name].float()).view(32, -1)
        assert (ratio == ratio[:, :1]).all() and not (ratio == 1).all()
        assert (torch.frexp(ratio).mantissa == 0.5).all()
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(before[name], after[name])
    model = whole_model(source)
    with torch.no_grad():
        expected = model(IDS).logits
        model.load_state_dict({name: tensor.float() for name, tensor in after.items()})
        error = (model(IDS).logits - expected).norm() / expected.norm()
    assert error < 0.1  # that of E4M3


def test_smoothing_needs_data_and_no_search(text_file: Path) -> None:
    with pytest.raises(SchemeError, match="smoothing=0.5: looks at inputs"):
        make_recipe({"smoothing": 0.5})
    with pytest.raises(SchemeError, match="smoothing=0.5: not with accuracy_target"):
        make_recipe({"smoothing": 0.5, "dataset": str(text_file), "accuracy_target": 1.01})
    with pytest.raises(SchemeError, match="smoothing=2"):
        make_recipe({"smoothing": 2, "dataset": str(text_file)})


def attention_inputs(x: torch.Tensor, norm: torch.Tensor) -> tuple[nn.Module, list[nn.Linear]]:
    """A layer with a norm of gains ``norm`` and what reads it; the largest columns are v's."""
    torch.manual_seed(0)
    layer = nn.Module()
    layer.input_layernorm, layer.self_attn = nn.Module(), nn.Module()
    layer.input_layernorm.weight = nn.Parameter(norm.clone(), requires_grad=False)
    readers = [nn.Linear(x.shape[1], 4, bias=False).requires_grad_(False) for _ in range(3)]
    for name, reader in zip("qkv", readers):
        reader.weight.mul_(100 if name == "v" else 1)
        setattr(layer.self_attn, f"{name}_proj", reader)
    return layer, readers


def smooth(
    layer: nn.Module,
    readers: list[nn.Linear],
    parts: list[torch.Tensor],
    alpha: float,
    dtype: torch.dtype = torch.float32,
    kept: str = "",
) -> dict[str, list[torch.Tensor]]:
    names = [f"self_attn.{name}_proj" for name in "qkv"]
    schemes = {f"layer.{name}": None if name == kept else FP8_DYNAMIC for name in names}

    def run() -> None:
        for part in parts:
            for reader in readers:
                reader(part)

    return smooth_layer(layer, "layer", schemes, alpha, run, lambda _: dtype)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_alpha_says_which_of_inputs_and_weights_become_alike(alpha: float) -> None:
    x = torch.randn(64, 8) * torch.logspace(-4, 4, 8)
    layer, readers = attention_inputs(x, torch.ones(8))
    for reader in readers:
        reader.weight.mul_(torch.logspace(3, -3, 8)[torch.arange(8) * 5 % 8])
    # the largest inputs come first
    smooth(layer, readers, [x, 0.01 * x], alpha)
    columns = torch.stack([reader.weight.abs().amax(0) for reader in readers]).amax(0)
    peaks = (x * layer.input_layernorm.weight).abs().amax(0)
    alike, other = (peaks, columns) if alpha else (columns, peaks)
    assert ((alike.log2()).abs() <= 0.5001).all() and other.log2().abs().max() > 4
    assert not any(reader._forward_pre_hooks for reader in readers)


def test_factors_have_a_limit_and_dead_channels_none() -> None:
    x = torch.ones(4, 3) * torch.tensor([2.0**40, 2.0**-40, 0.0])
    layer, readers = attention_inputs(x, torch.ones(3))
    smooth(layer, readers, [x], 1.0)
    assert layer.input_layernorm.weight.tolist() == [2.0**-24, 2.0**24, 1.0]


def test_what_the_dtype_would_round_is_not_moved() -> None:
    x = torch.full((4, 2), 2.0**8)
    # the first gain, 2**-18, has no eighth less than 2**-24 in float16
    layer, readers = attention_inputs(x, torch.tensor([2.0**-18, 1.0]))
    smooth(layer, readers, [x], 1.0, torch.float16)
    assert layer.input_layernorm.weight.tolist() == [2.0**-18, 2.0**-8]


def test_an_input_that_an_exact_linear_reads_too_stays() -> None:
    x = torch.randn(16, 8) * torch.logspace(-4, 4, 8)
    layer, readers = attention_inputs(x, torch.ones(8))
    assert smooth(layer, readers, [x], 0.5, kept="self_attn.k_proj") == {}
