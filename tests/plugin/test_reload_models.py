# SPDX-License-Identifier: MIT
"""Which tensors a model must get, over all calls of one load; models of stubs, no engine."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.utils import process_weights_after_loading

from oss_fused.errors import CheckpointError, UnsupportedModelError
from oss_fused.layers.vllm import reload
from oss_fused.plugin.models import _BeforeLayers, _OssModel

CONFIG = SimpleNamespace(
    model_config=SimpleNamespace(
        dtype=torch.bfloat16, quantization="oss_fp8", word_embeddings_untied_by_checkpoint=False
    )
)


@pytest.fixture(autouse=True)
def _config(monkeypatch):
    monkeypatch.setattr(reload, "get_current_vllm_config", lambda: CONFIG)
    monkeypatch.setattr(reload, "set_current_vllm_config", contextlib.nullcontext)
    reload.install()


class Language(nn.Module):
    """vLLM's class of a language model."""

    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList()
        self.first, self.second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)

    def load_weights(self, weights):
        names = set()
        for name, tensor in weights:
            parameter = self.get_parameter(name)
            loader = getattr(parameter, "weight_loader", None)
            if loader is None:
                parameter.data.copy_(tensor)
            else:
                loader(parameter, tensor)
            names.add(name)
        return names


class OssLanguage(_OssModel, Language):
    """Ours."""

    def __init__(self):
        super().__init__(vllm_config=SimpleNamespace(quant_config=None))
        self._is_oss_fp8 = True
        self.quant_method = _BeforeLayers()


class Scale(reload.CheckedMethod):
    """A CheckedMethod of one layer."""

    prefix = "language.first"


class Multimodal(nn.Module):
    """vLLM's class of a multimodal model: names of one part may come in several groups."""

    def __init__(self):
        super().__init__()
        self.vision, self.language = nn.Linear(2, 2, bias=False), OssLanguage()
        self.language.first.quant_method = Scale()

    def load_weights(self, weights):
        names = set()
        for name, tensor in weights:
            part, _, rest = name.partition(".")
            if part == "vision":
                loader = getattr(self.vision.weight, "weight_loader", None)
                if loader is None:
                    self.vision.weight.data.copy_(tensor)
                else:
                    loader(self.vision.weight, tensor)
                names.add(name)
            else:
                loaded = self.language.load_weights([(rest, tensor)])
                names |= {f"language.{n}" for n in loaded}
        return names


def weights(value):
    return {
        "language.first.weight": torch.full((2, 2), value),
        "vision.weight": torch.full((2, 2), value),
        "language.second.weight": torch.full((2, 2), value),
        "language.second.bias": torch.full((2,), value),
    }


def start(tensors):
    """Load a multimodal model as vLLM does."""
    model = Multimodal()
    layerwise.record_metadata_for_reloading(model)
    # vLLM builds the inner model first, in the same way
    reload._record(lambda _: None, model.language)
    reload._record(lambda _: None, model)
    if tensors is not None:
        model.load_weights(tensors.items())
    process_weights_after_loading(model, CONFIG.model_config, torch.device("cpu"))
    return model.eval()


def holds(model, value):
    return all(bool((p == value).all()) for p in model.parameters())


def test_groups_of_names_are_one_load():
    assert holds(start(weights(1.0)), 1.0)


@pytest.mark.parametrize("name", ["vision.weight", "language.second.bias"])
def test_a_tensor_missing_from_all_groups_is_refused(name):
    tensors = weights(1.0)
    del tensors[name]
    with pytest.raises(CheckpointError, match=f"has no '{name}'; expected"):
        start(tensors)


def test_weights_that_come_past_the_loader():
    # --load-format dummy
    model = start(None)
    model.load_weights(weights(2.0).items())
    assert holds(model, 2.0)


def test_a_multimodal_model_that_serves():
    model = start(weights(1.0))
    addresses = [p.data_ptr() for p in model.parameters()]
    model.load_weights(weights=weights(2.0).items())
    assert holds(model, 2.0)
    for name in ("language.first.weight", "language.second.bias", "vision.weight"):
        tensors = weights(3.0)
        del tensors[name]
        with pytest.raises(CheckpointError, match=f"weights are as before: .*has no '{name}'"):
            model.load_weights(tensors.items())
        assert holds(model, 2.0)
    assert [p.data_ptr() for p in model.parameters()] == addresses
    assert not reload._sessions


def test_a_load_that_was_never_finished_is_undone():
    model = start(weights(1.0))
    layerwise.initialize_layerwise_reload(model)
    model.load_weights(list(weights(2.0).items())[:2])
    assert any(p.is_meta for p in model.parameters())
    model.load_weights(list(weights(2.0).items())[:2])
    engine = SimpleNamespace(model=model)
    reload._reset_target(lambda _: None, engine)
    assert holds(model, 1.0) and not reload._sessions
    layerwise.initialize_layerwise_reload(model)
    layerwise.initialize_layerwise_reload(model)
    model.load_weights(weights(4.0).items())
    layerwise.finalize_layerwise_reload(model, CONFIG.model_config)
    assert holds(model, 4.0)


def test_kernels_that_keep_weights_elsewhere_are_refused():
    model = start(weights(1.0))
    layer = model.language.first
    kept = layer.weight
    del layer.weight
    layer.weight = kept.detach().t()
    with pytest.raises(UnsupportedModelError, match=r"'language.first': .* keep 'weight'"):
        model.load_weights(weights(2.0).items())
    assert holds(model, 1.0)


def test_another_rank_refuses(monkeypatch):
    group = SimpleNamespace(world_size=2, cpu_group="cpu")
    alone = SimpleNamespace(world_size=1, cpu_group=None)
    monkeypatch.setattr(reload.parallel_state, "model_parallel_is_initialized", lambda: True)
    monkeypatch.setattr(reload.parallel_state, "get_tp_group", lambda: group)
    monkeypatch.setattr(reload.parallel_state, "get_pp_group", lambda: alone)
    votes, theirs = [], 0

    def all_reduce(flag, op, group):
        assert op == torch.distributed.ReduceOp.MAX and group == "cpu"
        votes.append(flag.item())
        flag.fill_(max(theirs, flag.item()))

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    model = start(weights(1.0))
    model.load_weights(weights(2.0).items())
    theirs = 1
    with pytest.raises(CheckpointError, match="another rank refused"):
        model.load_weights(weights(3.0).items())
    with pytest.raises(CheckpointError, match="has no"):
        model.load_weights(list(weights(3.0).items())[:1])
    # each rank says what became of its own weights, once a load
    assert holds(model, 2.0) and votes == [0, 0, 1]
