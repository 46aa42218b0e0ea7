# SPDX-License-Identifier: MIT
"""Linear layers whose few rows of activations have two levels, forced on a CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from torch import nn
from torch.nn import Parameter
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from oss_fused.kernels import launch
from oss_fused.kernels.op import get_kernel
from oss_fused.layers.vllm import linear
from oss_fused.layers.vllm.decoder import norm_for
from oss_fused.plugin.config import OssFp8Config
from oss_fused.quant.scheme import FP8_DYNAMIC, FP8_STATIC, W8A16
from oss_fused.quant.settings import OnlineOptions, online, with_options

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM's platform is a GPU here")
N, K, BF16 = 48, 256, torch.bfloat16
# the default
TWO_LEVELS = {"linear_activations": "bf16"}


@pytest.fixture(autouse=True, scope="module")
def _vllm_operations():
    from vllm.platforms import current_platform

    current_platform.import_kernels()


def module_of(kind, weight):
    layer = kind.__new__(kind)
    nn.Module.__init__(layer)
    layer.weight = weight
    return layer


def made(kind=RowParallelLinear, scheme=FP8_DYNAMIC, **options):
    """A loaded layer whose weights were quantised while it loaded."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(N, K, generator=draw).to(BF16)
    layer = module_of(kind, Parameter(weight, requires_grad=False))
    layer.logical_widths = [N]
    if scheme.needs_data:
        layer.input_scale = Parameter(torch.ones(1), requires_grad=False)
    config = OssFp8Config(with_options(online(OnlineOptions()), options))
    layer.quant_method = config._linear_method(scheme, "layer")
    layer.quant_method.dtype = BF16
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def exact_product(x):
    """Of bf16 activations and the layers' weight as FP8 holds it."""
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(0)).to(BF16)
    codes, scale = get_kernel("torch", "quantize_fp8")(weight, None, "channel")
    return x.double() @ (codes.double() * scale.double()).t()


def rows_of(tokens, seed=1):
    x = torch.randn(tokens, K, generator=torch.Generator().manual_seed(seed))
    x[:, ::90] *= 40
    return x.to(BF16)


def compare(tokens, run, expected):
    """``run`` of a layer with two levels of up to 8 rows, and of one without."""
    one_level, both = made(QKVParallelLinear), made(QKVParallelLinear)
    both.quant_method.bf16_rows = 8
    found, without = run(both), run(one_level)
    if tokens > 8:
        assert torch.equal(found, without)
    else:
        error, of_one = (x.double() - expected for x in (found, without))
        assert error.norm() < 0.005 * expected.norm()
        assert error.norm() * 3 < of_one.norm()


def test_a_cpus_layer_has_one_level():
    assert made(**TWO_LEVELS).quant_method.bf16_rows == 0


@pytest.mark.parametrize(
    ("kind", "scheme", "options", "rows"),
    [
        (RowParallelLinear, FP8_DYNAMIC, {}, 8),
        (RowParallelLinear, FP8_DYNAMIC, TWO_LEVELS, 8),
        (QKVParallelLinear, FP8_DYNAMIC, TWO_LEVELS, 8),
        (QKVParallelLinear, FP8_DYNAMIC, {"linear_activations": "fp8"}, 0),
        (QKVParallelLinear, FP8_STATIC, TWO_LEVELS, 0),
        (RowParallelLinear, W8A16, TWO_LEVELS, 0),
    ],
)
def test_rows_of_two_levels_where_hopper_kernels_run(kind, scheme, options, rows, monkeypatch):
    monkeypatch.setattr(linear, "_takes_levels", lambda layer: True)
    layer = made(kind, scheme, **options)
    assert layer.quant_method.bf16_rows == linear.bf16_rows_of(layer) == rows


def test_layers_of_the_monitors_policy_have_one_level(monkeypatch):
    monkeypatch.setattr(linear, "_takes_levels", lambda layer: True)
    layer = made(**TWO_LEVELS)
    method = layer.quant_method
    method.bits16_inputs, method.bf16_rows = True, 0
    method._advertise(layer)
    assert method.bf16_rows == 0


class OnGpu(torch.Tensor):
    """A CPU's tensor that says otherwise."""

    is_cuda = True


@pytest.mark.parametrize(
    ("kind", "columns", "hopper", "takes"),
    [
        (RowParallelLinear, 64, True, True),
        (QKVParallelLinear, 64, True, True),
        (ParallelLMHead, 64, True, True),
        # gate_up_proj
        (MergedColumnParallelLinear, 64, True, False),
        (RowParallelLinear, 72, True, False),
        (RowParallelLinear, 64, False, False),
    ],
)
def test_which_layers_take_two_levels(kind, columns, hopper, takes, monkeypatch):
    monkeypatch.setattr(launch, "runs_gluon", lambda device: hopper)
    weight = torch.empty(16, columns)
    assert linear._takes_levels(module_of(kind, weight.as_subclass(OnGpu))) is takes
    assert not linear._takes_levels(module_of(kind, weight))


def test_other_readers_have_one_level():
    assert linear.bf16_rows_of(nn.Linear(2, 2)) == 0
    assert linear.bf16_rows_of(SimpleNamespace(quant_method=SimpleNamespace(bf16_rows=8))) == 0


@pytest.mark.parametrize("tokens", [1, 8, 9])
def test_a_layer_that_quantises_its_input(tokens):
    x = rows_of(tokens)
    compare(tokens, lambda layer: layer.quant_method.apply(layer, x), exact_product(x))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("tokens", [1, 8, 9])
def test_a_norm_hands_both_levels_to_its_reader(tokens, first):
    x, residual = rows_of(tokens), None if first else rows_of(tokens, seed=2)
    gain = torch.rand(K, generator=torch.Generator().manual_seed(3)).to(BF16)
    norm = SimpleNamespace(weight=gain, variance_epsilon=1e-5)
    _, _, added, normed, _ = get_kernel("torch", "add_rms_norm_quant")(
        x, residual, gain, 1e-5, None
    )

    def run(layer):
        activation, hidden = norm_for(norm, layer, x, residual)
        assert torch.equal(hidden, added)
        return layer.quant_method.apply(layer, activation)

    compare(tokens, run, exact_product(normed))


def test_a_weak_reference_keeps_both_levels(monkeypatch):
    """vLLM's CUDA graphs in pieces take one of each argument; its function needs a GPU."""
    monkeypatch.setattr("vllm.utils.torch_utils.weak_ref_tensor", lambda tensor: tensor.detach())
    layer = made(QKVParallelLinear)
    layer.quant_method.bf16_rows = 8
    norm = SimpleNamespace(weight=torch.ones(K, dtype=BF16), variance_epsilon=1e-5)
    activation, _ = norm_for(norm, layer, rows_of(3), None)
    weak = activation.weak_ref()
    assert type(weak) is linear.LevelledActivation
    assert weak.levels.data_ptr() == activation.levels.data_ptr()
    apply = layer.quant_method.apply
    assert torch.equal(apply(layer, weak), apply(layer, activation))
