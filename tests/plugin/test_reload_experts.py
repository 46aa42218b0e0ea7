# SPDX-License-Identifier: MIT
"""Experts of every rank, loaded and reloaded into memory that holds anything; no engine."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")
from vllm.model_executor.model_loader.reload import layerwise, meta

from oss_fused.errors import CheckpointError
from oss_fused.layers.vllm import reload
from oss_fused.layers.vllm.experts import fp8 as experts
from oss_fused.layers.vllm.experts import mxfp4 as experts_mxfp4
from tests.plugin import test_experts_parallel as parallel

INNER = 160


@pytest.fixture(params=[0x00, 0xFF], autouse=True)
def _poisoned(request, monkeypatch):
    real = meta.materialize_meta_tensor

    def materialize(tensor):
        new = real(tensor)
        new.untyped_storage().fill_(request.param)
        return new

    monkeypatch.setattr(meta, "materialize_meta_tensor", materialize)
    monkeypatch.setattr(parallel, "INNER", INNER)
    for module in (experts, experts_mxfp4):
        monkeypatch.setattr(module, "max_routed_tokens", lambda moe: 16)
    config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16))
    monkeypatch.setattr(reload, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(reload, "set_current_vllm_config", contextlib.nullcontext)
    reload.install()


class Model(nn.Module):
    """One layer of experts, as vLLM loads it."""

    def __init__(self, method, rank, ranks):
        super().__init__()
        self.layer = parallel.Layer(rank, ranks, by_expert=False)
        self.layer.quant_method = method
        # whole blocks for the ranks, as maybe_roundup_sizes has it
        inner = -(-INNER // 32 // ranks) * 32
        method.create_weights(self.layer, parallel.EXPERTS, parallel.HIDDEN, inner, torch.bfloat16)

    def load_weights(self, weights):
        names = set()
        for name, tensor in weights:
            expert, _, kind = name.rpartition(".")
            parameter = getattr(self.layer, kind)
            parameter.weight_loader(
                parameter,
                tensor,
                weight_name=f"e.{kind}",
                expert_id=int(expert) if expert else None,
            )
            names.add(kind)
        return names


def serve(kind, rank, ranks, tensors):
    """A model that has its first weights."""
    moe = SimpleNamespace(
        has_bias=True, in_dtype=torch.bfloat16, moe_parallel_config=None, is_lora_enabled=False
    )
    if kind == "fp8":
        method = experts.OssFp8MoEMethod(moe, "e")
    else:
        method = experts_mxfp4.OssMxfp4MoEMethod(moe, "e")
        # packed as on a GPU
        method.on_cpu = kind == "reference"
    model = Model(method, rank, ranks)
    layerwise.record_metadata_for_reloading(model)
    reload._record(lambda model: None, model)
    model.load_weights(tensors)
    method.process_weights_after_loading(model.layer)
    return model.eval()


def checkpoint(kind, seed=5):
    torch.manual_seed(seed)
    layout = "fp8" if kind == "fp8" else "mxfp4"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "manual_seed", lambda _: None)
        tensors = parallel.checkpoint(layout)
    return [(kind if e is None else f"{e}.{kind}", tensor) for kind, e, tensor in tensors]


def state(model):
    return {name: parameter.clone() for name, parameter in model.named_parameters()}


def same(model, expected):
    # as bytes: -0 is not 0
    return all(
        torch.equal(parameter.view(torch.uint8), expected[name].view(torch.uint8))
        for name, parameter in model.named_parameters()
    )


def run(model):
    torch.manual_seed(9)
    x = torch.randn(7, parallel.HIDDEN).bfloat16()
    logits = 3 * torch.randn(7, parallel.EXPERTS).bfloat16()
    method = model.layer.quant_method
    return method.apply_monolithic(model.layer, x, logits).float()


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", ["kernels", "reference"])
def test_a_reload_is_a_first_load_on_every_rank(kind, ranks):
    old, new = checkpoint(kind, 1), checkpoint(kind, 2)
    total = 0
    for rank in range(ranks):
        model = serve(kind, rank, ranks, old)
        before = state(model)
        model.load_weights(new)
        assert same(model, state(serve(kind, rank, ranks, new)))
        # of five blocks, the last of four ranks has none
        assert same(model, before) == (rank == 3)
        if kind == "reference":
            total += run(model)
    if kind == "reference":
        whole = run(serve(kind, 0, 1, new))
        assert ((total - whole).norm() / whole.norm()).item() < 0.01


@pytest.mark.parametrize("kind", ["kernels", "reference", "fp8"])
def test_what_is_missing_is_refused_and_the_old_weights_serve(kind):
    tensors = checkpoint(kind)
    model = serve(kind, 0, 1, tensors)
    before, addresses = state(model), [p.data_ptr() for p in model.parameters()]
    names = {name for name, _ in tensors if name.startswith("2.") or "." not in name}
    for left_out in sorted(names):
        with pytest.raises(CheckpointError, match=f"{left_out.split('.')[-1]}' is missing"):
            model.load_weights([(n, t) for n, t in tensors if n != left_out])
        assert same(model, before), left_out
        assert [p.data_ptr() for p in model.parameters()] == addresses


def test_a_checkpoint_without_a_tensor_is_refused_at_the_first_load():
    tensors = [(n, t) for n, t in checkpoint("fp8") if n != "3.w2_weight"]
    with pytest.raises(CheckpointError, match=r"'e.3.w2_weight' is missing"):
        serve("fp8", 0, 1, tensors)


@pytest.mark.parametrize("kind", ["reference", "fp8"])
def test_a_first_load_without_any_tensor_of_a_layer_is_refused(kind):
    with pytest.raises(CheckpointError, match=r"the checkpoint has no 'e.w13_weight'"):
        serve(kind, 0, 1, [])


def test_padding_is_written_at_the_first_load():
    # as vLLM's create_weights leaves memory where it does not fill it
    from oss_fused.layers.vllm.experts.loader import ExpertsLoader

    layer = parallel.Layer(1, 2, by_expert=False)
    parameter = nn.Parameter(
        torch.full((parallel.EXPERTS, parallel.HIDDEN, 3), 0xFF, dtype=torch.uint8),
        requires_grad=False,
    )
    scale = torch.full((parallel.EXPERTS, parallel.HIDDEN, INNER // 32), 120, dtype=torch.uint8)
    ExpertsLoader(layer, "mxfp4").load(parameter, scale, "e.w2_weight_scale")
    # five blocks over two ranks: three and two
    assert parameter.data[..., :2].eq(120).all() and not parameter.data[..., 2:].any()
