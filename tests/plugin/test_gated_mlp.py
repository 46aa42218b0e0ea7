# SPDX-License-Identifier: MIT
"""Llama's MLP in decoder layers: one operator, the separate ones, or one with the next norm."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8DynamicTokenSym,
    kFp8StaticTensorSym,
)

from oss_fused.kernels.op import check_arguments, get_kernel
from oss_fused.layers.vllm import decoder, dense_mlp, linear, warmup
from oss_fused.layers.vllm.decoder import DENSE_LAYERS, OssMistralDecoderLayer
from oss_fused.layers.vllm.linear import OssFp8LinearMethod
from oss_fused.quant.scheme import FP8_DYNAMIC
from oss_fused.quant.settings import ServingOptions

TOKENS, HIDDEN, INNER = 5, 48, 32


class Projection:
    """What the decoder sees of a gate_up projection on a GPU."""

    def __init__(self, bias=None, method=OssFp8LinearMethod):
        draw = torch.Generator().manual_seed(0)
        weight = torch.randn(2 * INNER, HIDDEN, generator=draw)
        self.weight_scale = weight.abs().amax(1, keepdim=True) / 448
        self.codes = (weight / self.weight_scale).to(torch.float8_e4m3fn)
        self.weight = SimpleNamespace(is_cuda=True)
        self.bias, self.quant_method = bias, method.__new__(method)
        self.calls = self.joined = 0

    def __call__(self, x):
        self.calls += 1
        rows, scale = x.data.view(-1, HIDDEN), x.scale.view(-1, 1)
        out = torch.ops.oss_fused.fp8_gemm(
            rows, self.codes, scale, self.weight_scale, None, x.orig_dtype, True
        )
        return out.view(*x.orig_shape[:-1], -1), None


class Down:
    """The down projection behind it, of a rank of two."""

    input_is_parallel, skip_bias_add, reduce_results, return_bias = True, False, False, True
    tp_size = 2
    __call__ = RowParallelLinear.forward

    def __init__(self, method=OssFp8LinearMethod, rank=0):
        self.tp_rank = rank
        draw = torch.Generator().manual_seed(2)
        weight = torch.randn(HIDDEN, INNER, generator=draw)
        self.weight_scale = weight.abs().amax(1, keepdim=True) / 448
        self.weight = (weight / self.weight_scale).to(torch.float8_e4m3fn)
        self.quant_method = method(FP8_DYNAMIC, True, "down_proj")
        self.bias = torch.linspace(-1, 1, HIDDEN).bfloat16()


def run(projection, monkeypatch, down=None):
    key = kFp8DynamicTokenSym
    monkeypatch.setattr(dense_mlp, "get_input_quant_key", lambda layer: key)
    joined = torch.ops.oss_fused.mlp_fp8

    def mlp_fp8(codes, weight, *rest):
        assert weight is projection.weight
        projection.joined += 1
        return joined(codes, projection.codes, *rest)

    monkeypatch.setattr(linear, "_mlp_fp8", mlp_fp8)
    x = torch.randn(1, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    scale = x.float().abs().amax(2, keepdim=True) / 448
    quantised = QuantizedActivation(
        data=(x.float() / scale).to(torch.float8_e4m3fn),
        scale=scale,
        orig_dtype=x.dtype,
        orig_shape=x.shape,
        quant_key=key,
    )
    mlp = SimpleNamespace(
        gate_up_proj=projection,
        act_fn=SiluAndMul.__new__(SiluAndMul),
        down_proj=down or Down(),
    )
    return dense_mlp.gated_mlp(mlp, quantised)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_operator_gives_what_the_separate_ones_give(monkeypatch, rank):
    """Only the first rank adds the bias of the down projection."""
    joined, separate = Projection(), Projection(bias=torch.zeros(1))
    got, want = (run(one, monkeypatch, Down(rank=rank)) for one in (joined, separate))
    assert (joined.calls, joined.joined, separate.calls, separate.joined) == (0, 1, 1, 0)
    assert torch.equal(got, want)
    assert got.dtype == torch.bfloat16 and got.shape == (1, TOKENS, HIDDEN)


class Other(OssFp8LinearMethod):
    """A method that may change what it computes."""


def test_another_method_keeps_its_own_product(monkeypatch):
    projection = Projection(method=Other)
    run(projection, monkeypatch)
    assert (projection.calls, projection.joined) == (1, 0)
    projection = Projection()
    run(projection, monkeypatch, Down(Other))
    assert (projection.calls, projection.joined) == (1, 0)


class Norm(nn.Module):
    def __init__(self, seed):
        super().__init__()
        gain = torch.rand(HIDDEN, generator=torch.Generator().manual_seed(seed)) + 0.5
        self.weight = nn.Parameter(gain.bfloat16(), requires_grad=False)
        self.variance_epsilon = 1e-5

    def forward(self, x, residual):
        x = x + residual
        normed = torch.nn.functional.rms_norm(x.float(), (HIDDEN,), self.weight.float(), 1e-5)
        return normed.to(x.dtype), x


class Linear(nn.Module):
    """An FP8 projection, as a layer on a GPU sees it; it says which form its input had."""

    skip_bias_add = False

    def __init__(self, rows, columns, seed, ranks=1, key=kFp8DynamicTokenSym):
        super().__init__()
        weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
        codes, scale = get_kernel("torch", "quantize_fp8")(weight, None, "channel")
        self.weight, self.weight_scale = (nn.Parameter(t, False) for t in (codes, scale))
        self.bias, self.tp_rank, self.tp_size = None, 0, ranks
        self.quant_method = OssFp8LinearMethod(FP8_DYNAMIC, True, "projection")
        self._input_quant_key, self.input_scale = key, torch.tensor([0.01]).float()
        self.seen = []

    def forward(self, x):
        self.seen.append(type(x).__name__)
        if isinstance(x, QuantizedActivation) and x.quant_key == kFp8StaticTensorSym:
            return (x.data.float() * x.scale).bfloat16() @ self.numbers().t(), None
        return self.quant_method.apply(self, x, self.bias), None

    def numbers(self):
        return (self.weight.float() * self.weight_scale).bfloat16()


class Attention(nn.Module):
    def __init__(self, seed, key):
        super().__init__()
        self.qkv_proj = Linear(HIDDEN, HIDDEN, seed, key=key)

    def forward(self, positions, hidden_states):
        return self.qkv_proj(hidden_states)[0] / 8


def layer(seed, kind=DENSE_LAYERS[0], ranks=1, key=kFp8DynamicTokenSym):
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    made.ada_rms_norm_t_cond = None
    made.input_layernorm, made.post_attention_layernorm = Norm(seed), Norm(seed + 1)
    made.self_attn = Attention(seed + 2, key)
    made.mlp = nn.Module()
    made.mlp.gate_up_proj = Linear(2 * INNER, HIDDEN, seed + 3)
    made.mlp.down_proj = Linear(HIDDEN, INNER, seed + 4, ranks)
    made.mlp.act_fn = SiluAndMul.__new__(SiluAndMul)
    return made


CONFIG = SimpleNamespace(speculative_config=None)


def join(layers, config=CONFIG, options=None):
    model = SimpleNamespace(layers=nn.ModuleList(layers))
    dense_mlp.join_mlps(model, DENSE_LAYERS, config, options or ServingOptions())
    return layers


@pytest.fixture
def on_a_gpu(monkeypatch):
    """CPU tensors pass for a GPU's; what ``mlp_norm`` was called with."""
    ran = []

    operator = get_kernel("torch", "mlp_norm")

    def mlp_norm(*arguments):
        check_arguments("mlp_norm", *arguments)
        ran.append(arguments)
        return operator(*arguments)

    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.ops.oss_fused, "mlp_norm", mlp_norm)
    monkeypatch.setattr(linear, "_mlp_fp8", get_kernel("torch", "mlp_fp8"))
    monkeypatch.setattr(linear, "_fp8_gemm", get_kernel("torch", "fp8_gemm"))
    monkeypatch.setattr(decoder, "_add_rms_norm_quant", get_kernel("torch", "add_rms_norm_quant"))
    return ran


def through(layers, tokens=TOKENS):
    """The last layer's result and residual."""
    draw = torch.Generator().manual_seed(9)
    x, residual = (torch.randn(tokens, HIDDEN, generator=draw).bfloat16() for _ in range(2))
    for each in layers:
        x, residual = each.forward(torch.arange(tokens), x, residual)
    return x, residual


@pytest.mark.parametrize("kind", DENSE_LAYERS)
@pytest.mark.parametrize("key", [kFp8DynamicTokenSym, kFp8StaticTensorSym])
def test_a_layer_that_runs_the_next_norm_computes_the_same(kind, key, on_a_gpu):
    layers = [layer(10 * at, kind, key=key) for at in (1, 2, 3)]
    apart = through(layers)
    assert not on_a_gpu
    together = through(join(layers))
    assert len(on_a_gpu) == 2
    scales = [arguments[10] for arguments in on_a_gpu]
    static = key == kFp8StaticTensorSym
    following = [each.self_attn.qkv_proj.input_scale for each in layers[1:]]
    assert all(a is (b if static else None) for a, b in zip(scales, following, strict=True))
    assert layers[2].following is None and layers[0].following.norm is layers[1].input_layernorm
    for ours, theirs in zip(together, apart, strict=True):
        assert ours.dtype == torch.bfloat16 and torch.equal(ours, theirs)


def test_bias_and_levels_reach_the_operator(on_a_gpu):
    layers = join([layer(10), layer(20)])
    layers[0].mlp.down_proj.bias = torch.linspace(-1, 1, HIDDEN).bfloat16()
    layers[1].self_attn.qkv_proj.quant_method.bf16_rows = 8
    through(layers)
    (arguments,) = on_a_gpu
    assert arguments[6] is layers[0].mlp.down_proj.bias and arguments[12:] == (True, 8)
    layers[0].mlp.down_proj.skip_bias_add = True
    through(layers)
    assert on_a_gpu[1][6] is None


class Adapter(nn.Module):
    """vLLM's wrapper of a projection with LoRA, which takes its place in the layer."""

    requires_unquantized_input = True

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer, self.seen = base_layer, []

    def __getattr__(self, name):
        found = super().__getattr__
        return found(name) if name in ("base_layer", "seen") else getattr(self.base_layer, name)

    def forward(self, x):
        self.seen.append(type(x))
        return x @ self.base_layer.numbers().t(), None


def test_lora_on_attention_alone_gets_what_the_norm_wrote(on_a_gpu):
    layers = join([layer(10), layer(20), layer(30)])
    adapter = layers[1].self_attn.qkv_proj = Adapter(layers[1].self_attn.qkv_proj)
    through(layers)
    assert adapter.seen == [torch.Tensor]
    # the layer behind it has no adapter
    assert [arguments[8] for arguments in on_a_gpu] == [layers[2].input_layernorm.weight]


@pytest.mark.parametrize("offloaded", [0, 1])
def test_layers_that_vllm_offloads_keep_its_forward(offloaded, on_a_gpu):
    layers = [layer(10), layer(20), layer(30)]
    layers[offloaded].forward = layers[offloaded].forward
    join(layers)
    following = [each.following is not None for each in layers]
    assert following == ([False, True, False] if offloaded == 0 else [False, False, False])


@pytest.mark.parametrize("why", ["monitor", "draft model", "ranks", "act", "bias"])
def test_what_keeps_a_layer_and_the_next_norm_apart(why, on_a_gpu):
    layers = [layer(10, ranks=2 if why == "ranks" else 1), layer(20)]
    config = SimpleNamespace(speculative_config=object()) if why == "draft model" else CONFIG
    join(layers, config, ServingOptions(monitor_every=8) if why == "monitor" else None)
    if why == "act":
        layers[0].mlp.act_fn = nn.Softshrink()
        layers[0].mlp.down_proj = Linear(HIDDEN, 2 * INNER, 5)
    if why == "bias":
        layers[0].mlp.gate_up_proj.bias = torch.zeros(2 * INNER)
    assert layers[0].following is None or why not in ("monitor", "draft model")
    x, _ = through(layers[:1])
    assert isinstance(x, torch.Tensor) and not on_a_gpu


def test_layers_of_other_kinds_are_not_joined(on_a_gpu):
    one, other, last = layer(10), layer(20, OssMistralDecoderLayer), layer(30)
    join([nn.Identity(), one, other, last, nn.Identity()])
    assert one.following is other.following is last.following is None
    assert not dense_mlp.runs_next_norm(one, None)


@pytest.fixture
def loading():
    """vLLM's default dtype while it loads a bf16 model."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(before)


def test_warm_up_meets_each_bucket_of_split_sums(monkeypatch, on_a_gpu, loading):
    monkeypatch.setattr(warmup, "_done", set())
    monkeypatch.setattr(dense_mlp, "has_two_parts", lambda tokens, n, k: 32 < tokens <= 128)
    layers = join([layer(10), layer(20)])
    for limit, rows in ((16, [1]), (100, [1, 33, 65]), (100, [])):
        on_a_gpu.clear()
        dense_mlp.warm_mlp(layers[0], limit)
        assert [arguments[0].shape[0] for arguments in on_a_gpu] == rows
    # another form of the next layer's input is another kernel
    layers[1].self_attn.qkv_proj._input_quant_key = kFp8StaticTensorSym
    dense_mlp.warm_mlp(layers[0], 100)
    assert len(on_a_gpu) == 3
    on_a_gpu.clear()
    dense_mlp.warm_mlp(layers[1], 100)
    assert not on_a_gpu
