# SPDX-License-Identifier: MIT
"""Layers that the monitor switches to 16-bit activations while the server runs, with stubs."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from oss_fused.errors import SchemeError
from oss_fused.plugin.monitor.policy import bits16_layers
from tests.plugin.test_monitor import linear_layer


@pytest.fixture
def policy(tmp_path, monkeypatch) -> str:
    monkeypatch.setenv("OSS_FUSED_MONITOR_DIR", str(tmp_path / "figures"))
    return str(tmp_path / "policy.json")


class Ranks:
    """vLLM's configuration, as far as a switch depends on it."""

    def __init__(self, world_size=1, data_parallel_size=1, v2=True):
        self.parallel_config = SimpleNamespace(
            world_size=world_size, data_parallel_size=data_parallel_size
        )
        self.use_v2_model_runner = v2


def test_a_switch_needs_one_rank_and_a_runner_that_leaves_its_graphs(monkeypatch):
    from oss_fused.plugin.monitor.fallback import check_fallback

    check_fallback(Ranks(v2=False))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_fallback(Ranks())
    for ranks in (Ranks(world_size=2), Ranks(data_parallel_size=2)):
        with pytest.raises(SchemeError, match="'now' with 2 ranks: expected one rank"):
            check_fallback(ranks)
    with pytest.raises(SchemeError, match="'now' with vLLM's V1 model runner: expected the V2"):
        check_fallback(Ranks(v2=False))


def switching_monitor(policy, monkeypatch, static=True):
    """A monitor that watches two layers, "a" and "b", and a step's graph choice."""
    from vllm.v1.worker.gpu import cudagraph_utils

    from oss_fused.layers.vllm.lm_head import HeadGraphs
    from oss_fused.plugin.monitor import watch

    model = torch.nn.ModuleList([linear_layer("a"), linear_layer("b")])
    model.do_not_compile = False
    model.head_graphs = HeadGraphs()
    model.head_graphs._graphs = {1: "a graph of the head as it was"}
    for layer in model:
        layer._input_quant_key = "static"
        layer.input_scale = 0.01 if static else None
    watcher = watch.Monitor(1000, rank=0, policy=policy, fallback="now")
    watcher.watch(model)
    watcher.serving = True
    monkeypatch.setattr(watch, "_monitor", watcher)

    class Manager:
        def dispatch(self, num_reqs, num_tokens):
            return SimpleNamespace(cg_mode="full", num_active_loras=0, num_ubatches=1)

    monkeypatch.setattr(cudagraph_utils, "ModelCudaGraphManager", Manager)
    watch._sample_outside_graphs()
    none = cudagraph_utils.CUDAGraphMode.NONE
    return watcher, model, lambda: Manager().dispatch(1, 1).cg_mode == none


SATURATED = np.array([[4.5, 4.5], [1.0, 1.0]], np.float32)


def test_a_switch_leaves_the_graphs_and_survives_a_reload(policy, monkeypatch):
    watcher, model, outside = switching_monitor(policy, monkeypatch)
    watcher.statistics.add(np.ones((2, 2), np.float32), [2, 2])
    watcher.end_step()
    assert not outside() and not model[0].quant_method.bits16_inputs
    watcher.statistics.add(SATURATED, [2, 2])
    assert model.head_graphs._graphs
    assert not outside() and not model.do_not_compile, "the step under way ends as it began"
    watcher.end_step()
    watcher.end_step()
    assert outside() and model.do_not_compile and not model.head_graphs._graphs
    assert [layer.quant_method.bits16_inputs for layer in model] == [True, False]
    assert [hasattr(layer, "_input_quant_key") for layer in model] == [False, True]
    watcher.watch(model)
    assert outside() and watcher.statistics.switched == watcher.statistics.bits16 == 1


def test_only_what_16_bits_cure_is_switched(policy, monkeypatch):
    """NaN comes from elsewhere, and a scale per token fits an outlier."""
    watcher, model, outside = switching_monitor(policy, monkeypatch, static=False)
    rows = np.array([[float("nan"), 1.0], [1.0, 1.0]], np.float32)
    watcher.statistics.add(rows, [2, 2])
    watcher.statistics.add(100 * np.ones((2, 2), np.float32), [2, 2])
    watcher.end_step()
    assert set(bits16_layers(policy)) == {"a", "b"}
    assert not outside() and not any(layer.quant_method.bits16_inputs for layer in model)
