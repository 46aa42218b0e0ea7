# SPDX-License-Identifier: MIT
"""Layers that the monitor switches to 16-bit activations while the server runs, with stubs."""

from __future__ import annotations

import contextlib
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
    from oss_fused.plugin.monitor import recapture, watch

    model = torch.nn.ModuleList([linear_layer("a"), linear_layer("b")])
    model.do_not_compile = False
    model.head_graphs, model.run_head = HeadGraphs(), torch.zeros_like
    model.head_graphs._graphs = {1: "a graph of the head as it was"}
    for layer in model:
        layer._input_quant_key = "static"
        layer.input_scale = 0.01 if static else None
    watcher = watch.Monitor(1000, rank=0, policy=policy, fallback="now")
    watcher.watch(model)
    watcher.serving = True
    monkeypatch.setattr(watch, "_monitor", watcher)

    # what needs a GPU
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(recapture, "end_failed_capture", lambda pool: None)
    mode = cudagraph_utils.CUDAGraphMode

    class Manager:
        """Records every size as one graph, and sizes above 8 in pieces."""

        def __init__(self):
            self.graphs, self.recorded, self.memory = {}, [], 99
            self.cudagraph_mode = mode.FULL_AND_PIECEWISE
            self._capture_descs = {mode.FULL: [step(2), step(8)], mode.PIECEWISE: [step(16)]}
            self.vllm_config = SimpleNamespace(lora_config=None)

        def dispatch(self, num_reqs, num_tokens):
            return step(num_tokens)

        def capture(self, model, *, buffers):
            assert self.recorded == [] or self.cudagraph_mode == mode.FULL, "not compiled"
            for each in self._capture_descs[mode.FULL]:
                self.recorded.append((each.num_tokens, buffers))
                if each.num_tokens > self.memory:
                    raise self.error("no memory")
                with torch.cuda.graph("new", "pool", stream="vLLM's"):
                    self.graphs[each] = [layer.quant_method.bits16_inputs for layer in model]

    def step(tokens):
        return cudagraph_utils.BatchExecutionDescriptor(
            mode.FULL if tokens <= 8 else mode.PIECEWISE, tokens, tokens
        )

    @contextlib.contextmanager
    def graph(new, pool, stream=None, capture_error_mode="global"):
        modes.append(capture_error_mode)
        yield

    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(cudagraph_utils, "ModelCudaGraphManager", Manager)
    watch._sample_outside_graphs()
    manager = Manager()
    manager.modes = modes
    manager.capture(model, buffers="buffers")
    manager.recorded.clear()
    manager.replays = lambda tokens: (
        manager.graphs.get(chosen)
        if (chosen := manager.dispatch(1, tokens)).cg_mode == mode.FULL
        else chosen.cg_mode.name
    )
    return watcher, model, manager


SATURATED = np.array([[4.5, 4.5], [1.0, 1.0]], np.float32)


def test_a_switch_records_new_graphs_and_survives_a_reload(policy, monkeypatch):
    watcher, model, manager = switching_monitor(policy, monkeypatch)
    watcher.statistics.add(np.ones((2, 2), np.float32), [2, 2])
    watcher.end_step()
    assert manager.replays(2) == [False, False] == [x.quant_method.bits16_inputs for x in model]
    assert manager.replays(16) == "PIECEWISE"
    watcher.statistics.add(SATURATED, [2, 2])
    assert model.head_graphs._graphs
    assert manager.replays(2) == [False, False] and not model.do_not_compile, (
        "the step under way ends as it began"
    )
    watcher.end_step()
    watcher.end_step()
    assert model.do_not_compile and not model.head_graphs._graphs
    assert [layer.quant_method.bits16_inputs for layer in model] == [True, False]
    assert [hasattr(layer, "_input_quant_key") for layer in model] == [False, True]

    assert manager.replays(2) == [True, False]
    assert manager.recorded == [(2, "buffers")], "one graph at a time, and that with its arguments"
    assert manager.replays(2) and manager.replays(8) == [True, False]
    assert manager.replays(16) == "NONE", "its pieces are compiled"
    assert manager.recorded == [(2, "buffers"), (8, "buffers")]
    assert manager.modes == ["global"] * 2 + ["thread_local"] * 2
    assert manager.cudagraph_mode.name == "FULL_AND_PIECEWISE" and len(manager._capture_descs) == 2
    watcher.sampling = True
    assert manager.replays(2) == "NONE", "a sample runs outside graphs as before"
    watcher.sampling = False

    watcher.watch(model)
    assert watcher.statistics.switched == watcher.statistics.bits16 == 1
    assert manager.replays(2) and len(manager.recorded) == 2
    watcher.statistics.add(SATURATED[::-1], [2, 2])
    watcher.end_step()
    assert manager.replays(2) == [True, True], "a second switch begins again"
    assert manager.replays(16) == "NONE"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, AssertionError])
def test_a_graph_that_cannot_be_recorded_costs_speed_only(error, policy, monkeypatch):
    watcher, _, manager = switching_monitor(policy, monkeypatch)
    manager.error = error
    watcher.statistics.add(SATURATED, [2, 2])
    watcher.end_step()
    manager.memory = 4
    assert manager.replays(2) == [True, False]
    assert manager.replays(8) == manager.replays(8) == manager.replays(1) == "NONE"
    assert manager.replays(2) == [True, False], "what was recorded is replayed on"
    assert [tokens for tokens, _ in manager.recorded] == [2, 8]


def test_with_adapters_no_graph_is_recorded(policy, monkeypatch):
    watcher, _, manager = switching_monitor(policy, monkeypatch)
    manager.vllm_config.lora_config = "adapters"
    watcher.statistics.add(SATURATED, [2, 2])
    watcher.end_step()
    assert manager.replays(2) == "NONE" and not manager.recorded


def test_the_head_is_recorded_again_with_its_sizes(monkeypatch):
    from oss_fused.layers.vllm import lm_head

    monkeypatch.setattr(lm_head, "recording", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    graphs = lm_head.HeadGraphs()
    graphs.renew(torch.zeros_like)
    assert not graphs._graphs
    graphs.capture(torch.zeros_like, [4, 1, 999], torch.empty(0, 3))
    graphs.forget()
    graphs.renew(torch.ones_like)
    assert graphs._graphs.keys() == {1, 2, 3, 4}
    assert graphs(torch.zeros_like, torch.zeros(3, 3)).tolist() == torch.ones(3, 3).tolist()


def test_only_what_16_bits_cure_is_switched(policy, monkeypatch):
    """NaN comes from elsewhere, and a scale per token fits an outlier."""
    watcher, model, manager = switching_monitor(policy, monkeypatch, static=False)
    rows = np.array([[float("nan"), 1.0], [1.0, 1.0]], np.float32)
    watcher.statistics.add(rows, [2, 2])
    watcher.statistics.add(100 * np.ones((2, 2), np.float32), [2, 2])
    watcher.end_step()
    assert set(bits16_layers(policy)) == {"a", "b"}
    assert manager.replays(2) == [False, False] == [x.quant_method.bits16_inputs for x in model]
    assert manager.replays(16) == "PIECEWISE" and not manager.recorded
