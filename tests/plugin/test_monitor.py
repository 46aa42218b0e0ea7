# SPDX-License-Identifier: MIT
"""The monitor: what it counts, how it says so, and what the next start does about it."""

from __future__ import annotations

import fcntl
import json
import logging
import multiprocessing
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from oss_fused.errors import SchemeError
from oss_fused.plugin.monitor.metrics import (
    Collector,
    LayerFigures,
    share_folder,
    write_figures,
)
from oss_fused.plugin.monitor.policy import add_layers, bits16_layers
from oss_fused.quant.settings import ServingOptions
from tests.plugin.conftest import GRAPHS, build, calibrate


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("OSS_FUSED_MONITOR_DIR", str(tmp_path / "figures"))
    return tmp_path


@pytest.fixture
def policy(folder) -> str:
    return str(folder / "policy.json")


TOTALS = {"bits16": 0, "switched": 0, "scale_updates": 0}


def metrics() -> dict[tuple[str, str], float]:
    """(metric, layer) -> value of what the collector gives."""
    return {
        (sample.name, sample.labels.get("layer", "")): sample.value
        for family in Collector().collect()
        for sample in family.samples
    }


def test_statistics(policy, caplog, monkeypatch):
    from oss_fused.plugin.monitor import statistics as monitor

    monkeypatch.setattr(monitor.logger, "propagate", True, raising=False)
    caplog.set_level(logging.WARNING)
    caplog.clear()
    limits = [float("inf"), 4.0, 1.0]
    statistics = monitor.Statistics(["a", "b", "unseen"], limits, rank=0, policy=policy)
    calm = np.array([[1.0, 2.0], [1.0, 3.0], [0.0, 0.0]], np.float32)
    statistics.add(calm, [2, 2, 0])
    assert not bits16_layers(policy) and not caplog.records
    odd = np.array([[float("nan"), 20.0], [float("inf"), 4.0], [0.0, 0.0]], np.float32)
    statistics.fp8_only = {"b"}
    statistics.add(odd, [2, 2, 0])
    assert set(bits16_layers(policy)) == {"a"}
    statistics.fp8_only = set()
    statistics.add(odd, [2, 2, 0])
    seen = metrics()
    assert seen["oss_fused:monitor_samples_total", ""] == 3
    assert seen["oss_fused:monitored_tokens_total", "a"] == 6
    assert seen["oss_fused:nonfinite_tokens_total", "a"] == 2
    assert seen["oss_fused:nonfinite_tokens_total", "b"] == 2
    assert seen["oss_fused:saturated_tokens_total", "b"] == 2
    drops = [seen["oss_fused:accuracy_drops_total", name] for name in "ab"]
    assert drops == [2, 2], "the calm sample has none"
    assert seen["oss_fused:amax_outliers_total", "a"] == 1  # then it is the usual
    assert seen["oss_fused:activation_amax", "a"] == 20
    assert set(bits16_layers(policy)) == {"a", "b"}
    kinds = [record.getMessage().split(" at ")[0] for record in caplog.records]
    assert kinds == [f"oss_fused monitor: {k}" for k in ("NaN or Inf", "saturation", "outliers")]


def test_tokens_far_below_a_static_scale_are_a_fault_of_their_own(policy):
    """Zeros are exact; a scale per token fits every token."""
    from oss_fused.plugin.monitor.statistics import UNDERFLOW, Statistics

    low = 0.9 * UNDERFLOW
    statistics = Statistics(["static", "dynamic"], [1.0, float("inf")], 0, policy=policy)
    statistics.add(np.array([[1.1 * UNDERFLOW, 0.0], [low, 0.0]], np.float32), [2, 2])
    assert not bits16_layers(policy) and not statistics.saturating
    statistics.add(np.array([[0.5, low], [low, low]], np.float32), [2, 2])
    assert "1 of 2 tokens lie below 0.0001221 of the limit 1" in bits16_layers(policy)["static"]
    assert statistics.saturating.keys() == {"static"}, "16-bit activations cure it"
    seen = metrics()
    assert seen["oss_fused:underflowing_tokens_total", "static"] == 1
    assert seen["oss_fused:accuracy_drops_total", "static"] == 1
    assert seen["oss_fused:accuracy_drops_total", "dynamic"] == 0


def test_the_first_layer_with_nan_is_where_to_look(policy):
    from oss_fused.plugin.monitor.statistics import Statistics

    statistics = Statistics(["a", "b", "c"], [float("inf")] * 3, 0, policy=policy)
    # what lies behind the count is of an earlier sample
    statistics.add(np.array([[1.0, np.nan], [1.0, 1.0], [1.0, 1.0]], np.float32), [1, 2, 2])
    assert not bits16_layers(policy)
    statistics.add(np.array([[1.0], [np.nan], [np.nan]], np.float32), [1, 1, 1])
    assert bits16_layers(policy).keys() == {"b"}


@pytest.mark.parametrize(("kind", "value"), [("reach", 2.0), ("lie below", 1e-6)])
def test_one_token_of_a_hundred_is_no_fault(kind, value, policy):
    from oss_fused.plugin.monitor.statistics import Statistics

    statistics = Statistics(["a"], [1.0], 0, policy=policy)
    row = np.full((1, 100), 0.5, np.float32)
    row[0, 0] = value
    statistics.add(row, [100])
    assert not bits16_layers(policy)
    row[0, 1] = value
    statistics.add(row, [100])
    assert f"2 of 100 tokens {kind}" in bits16_layers(policy)["a"]


def test_what_the_limit_of_underflow_costs():
    from oss_fused.plugin.monitor.statistics import UNDERFLOW

    torch.manual_seed(0)
    x = torch.randn(64, 4096)
    x /= x.abs().amax(-1, keepdim=True)

    def error(amax):
        scale = torch.tensor([1 / 448])
        q, _ = torch.ops.oss_fused.quantize_fp8(x * amax, scale, "tensor")
        return float((q.float() * scale - x * amax).norm() / (x * amax).norm())

    assert 0.04 < error(UNDERFLOW) < 0.07
    assert error(UNDERFLOW / 4) > 0.12 and error(1.0) < 0.03


def test_scales_that_a_reload_changes_are_counted(folder):
    from oss_fused.plugin.monitor.watch import Monitor

    model = torch.nn.ModuleList([linear_layer("a"), linear_layer("b"), linear_layer("c")])
    for layer, scale in zip(model, (0.01, 0.02, None)):
        layer.input_scale = scale
    watcher = Monitor(1000, rank=0)
    watcher.watch(model)
    watcher.watch(model)
    assert watcher.statistics.scale_updates == 0
    model[1].input_scale = 0.03
    watcher.watch(model)
    model[0].input_scale = 0.5
    watcher.watch(model)
    watcher.statistics.add(np.ones((3, 1), np.float32), [1, 1, 1])
    assert metrics()["oss_fused:scale_updates_total", ""] == 2


def test_a_layer_in_a_wrapper_is_one_layer(folder):
    from vllm.lora.layers import BaseLayerWithLoRA

    from oss_fused.plugin.monitor.fallback import _quantising
    from oss_fused.plugin.monitor.watch import Monitor

    wrapper = BaseLayerWithLoRA()
    wrapper.base_layer = linear_layer("a")
    assert wrapper.quant_method is wrapper.base_layer.quant_method
    model = torch.nn.ModuleList([wrapper, linear_layer("b")])
    watcher = Monitor(1000, rank=0)
    watcher.watch(model)
    assert len(watcher.statistics.limits) == 2
    assert sorted(watcher._index.values()) == [0, 1]
    assert _quantising(model, {"a"}) == {"a": wrapper.base_layer}


def test_policy_file(folder, policy):
    assert bits16_layers(policy) == {}
    add_layers(policy, {"x": "first"})
    add_layers(policy, {"x": "second", "y": "third"})
    assert bits16_layers(policy) == {"x": "first", "y": "third"}
    written = Path(policy).stat().st_ino
    add_layers(policy, {"x": "fourth"})
    assert Path(policy).stat().st_ino == written, "it says so already"
    ours = "oss_fused.monitor_policy"
    for other in ({"kind": "other", "layers": {}}, {"kind": ours, "layers": ["x"]}, []):
        Path(policy).write_text(json.dumps(other))
        with pytest.raises(SchemeError, match="monitor_policy="):
            bits16_layers(policy)


def test_policy_changes_the_compile_key(policy):
    from oss_fused.plugin.fingerprint import fingerprint

    options = ServingOptions(monitor_policy=policy)
    before = fingerprint(options)
    add_layers(policy, {"x": "why"})
    assert fingerprint(options) != before
    assert fingerprint(ServingOptions()) == before


def test_figures_need_a_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("OSS_FUSED_MONITOR_DIR", raising=False)
    with pytest.raises(SchemeError, match="OSS_FUSED_MONITOR_DIR is not set"):
        write_figures(0, 1, {}, TOTALS)
    assert list(Collector().collect()) == [], "other collectors of the process answer on"
    monkeypatch.setenv("OSS_FUSED_MONITOR_DIR", str(tmp_path))
    write_figures(0, 1, {}, TOTALS)
    share_folder()
    assert list(Collector().collect()) == [], "figures of a server that has ended"


def test_what_nothing_feeds_is_absent(folder):
    """Layers that no step has reached, saturation without a static scale, amax of NaN alone."""
    from oss_fused.plugin.monitor import watch as monitor

    limits = [float("inf"), 4.0, float("inf")]
    statistics = monitor.Statistics(["dynamic", "static", "unseen"], limits, rank=0)
    assert metrics() == {}
    row = np.array([[float("nan")], [1.0], [0.0]], np.float32)
    statistics.add(row, [1, 1, 0])
    seen = metrics()
    assert {layer for _, layer in seen} == {"dynamic", "static", ""}
    assert seen["oss_fused:saturated_tokens_total", "static"] == 0
    assert seen["oss_fused:underflowing_tokens_total", "static"] == 0
    assert ("oss_fused:underflowing_tokens_total", "dynamic") not in seen
    assert ("oss_fused:saturated_tokens_total", "dynamic") not in seen
    assert ("oss_fused:activation_amax", "dynamic") not in seen
    assert seen["oss_fused:activation_amax", "static"] == 1


def test_figures_of_an_ended_server_are_absent(folder):
    """Of a folder that the user named, with more ranks than the server has now."""
    write_figures(7, 1, {"a": LayerFigures(tokens=5)}, TOTALS)
    (folder / "figures/rank8.json").symlink_to(folder / "gone")
    theirs = folder / "figures/ranking.json"
    theirs.write_text("of the user")
    assert metrics()["oss_fused:monitored_tokens_total", "a"] == 5
    share_folder()
    assert metrics() == {}
    assert theirs.read_text() == "of the user"


def test_layers_by_policy_are_those_of_the_start(policy):
    from oss_fused.plugin.monitor.watch import Monitor

    add_layers(policy, {"early": "why", "of another model": "why"})
    watcher = Monitor(1, rank=0, policy=policy)
    add_layers(policy, {"late": "why"})
    layers = torch.nn.ModuleList()
    for name in ("early", "late", "other"):
        layers.append(linear_layer(name))
    watcher.watch(layers)
    assert watcher.statistics.bits16 == 1


def linear_layer(name):
    """A module as the monitor finds it."""
    from oss_fused.layers.vllm.linear import OssFp8LinearMethod
    from oss_fused.quant.scheme import FP8_DYNAMIC

    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
    layer.quant_method = OssFp8LinearMethod(FP8_DYNAMIC, True, name)
    return layer


def _add_some(policy: str, worker: int) -> None:
    for number in range(20):
        add_layers(policy, {f"{worker}.{number}": "why"})


def test_ranks_add_to_the_policy_at_once(folder, policy):
    """None fails, none loses what another wrote, and every reader finds a whole file."""
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_add_some, args=(policy, rank)) for rank in range(4)]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        bits16_layers(policy)
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert len(bits16_layers(policy)) == 80
    assert {path.name for path in folder.iterdir()} == {"policy.json", "policy.json.lock"}


def test_an_addition_waits_for_another(policy):
    """Two that read before either writes would lose a layer."""
    adding = threading.Thread(target=add_layers, args=(policy, {"late": "why"}))
    with open(f"{policy}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        adding.start()
        adding.join(0.5)
        assert adding.is_alive() and not bits16_layers(policy)
    adding.join(30)
    assert not adding.is_alive() and bits16_layers(policy) == {"late": "why"}


def test_a_stopped_monitor_leaves_no_thread(folder):
    from oss_fused.plugin.monitor.watch import Monitor

    def alive() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "oss-fused-monitor"}

    before = alive()
    watcher = Monitor(1, rank=0)
    for _ in range(2):
        watcher.start()
        watcher.start()
        (thread,) = alive() - before
        watcher.stop()
        thread.join(timeout=10)
        assert not thread.is_alive()
    watcher.stop()
    assert watcher._queue.empty()


@pytest.mark.serve
def test_saturating_layer_is_served_in_16_bits_at_the_next_start(folder, policy, engine):
    options = {"oss_fused": {"monitor_every": 2, "monitor_policy": policy}}
    # inputs reach 448 * 0.0005 = 0.2 easily
    model = calibrate(build(folder / "m", "llama"), inputs="tensor", input_scale=0.0005)
    served = engine(model, additional_config=dict(options))
    first = served.generate()
    served.generate()
    deadline = time.monotonic() + 20
    while not bits16_layers(policy) and time.monotonic() < deadline:
        time.sleep(0.1)
    layers = bits16_layers(policy)
    assert "model.layers.0.self_attn.qkv_proj" in layers and "reach the limit" in str(layers)
    seen = metrics()
    assert seen["oss_fused:saturated_tokens_total", "model.layers.1.mlp.gate_up_proj"] > 0

    again = engine(model, additional_config=dict(options))
    assert again.generate() != first
    layer = again.model.model.layers[0].self_attn.qkv_proj
    assert layer.quant_method.bits16_inputs and not hasattr(layer, "_input_quant_key")


def switch_and_restart(folder, policy, engine, **flags):
    """First, switched and restarted output of a model whose static scales saturate."""
    options = {"oss_fused": {"monitor_every": 2, "monitor_policy": policy}}
    now = {"oss_fused": options["oss_fused"] | {"monitor_fallback": "now"}}
    # inputs reach 448 * 0.0005 = 0.2 easily
    model = calibrate(build(folder / "m", "llama"), inputs="tensor", input_scale=0.0005)
    served = engine(model, additional_config=now, **flags)
    layer = served.model.model.layers[0].self_attn.qkv_proj
    first = served.generate()
    deadline = time.monotonic() + 20
    while not layer.quant_method.bits16_inputs and time.monotonic() < deadline:
        served.generate()
    assert layer.quant_method.bits16_inputs and not hasattr(layer, "_input_quant_key")
    # the next sample tells
    while metrics().get(("oss_fused:switched_layers", ""), 0) < 8 and time.monotonic() < deadline:
        served.generate()
    after = served.generate()
    seen = metrics()
    assert seen["oss_fused:switched_layers", ""] == seen["oss_fused:exact_input_layers", ""] == 8
    assert len(bits16_layers(policy)) == 8
    if flags:
        manager = served.runner.cudagraph_manager
        assert manager.oss_recapture._switched == 8 and manager.graphs, "recorded again"
    return first, after, engine(model, additional_config=options, **flags).generate()


@pytest.mark.serve
def test_saturating_layers_go_on_in_16_bits_without_a_restart(folder, policy, engine):
    """From the switch on the server gives what a start with those layers in the policy gives."""
    first, after, restarted = switch_and_restart(folder, policy, engine)
    assert after == restarted != first


@pytest.mark.gpu
def test_saturating_layers_leave_cuda_graphs_for_new_ones(folder, policy, engine, compiled):
    first, after, restarted = switch_and_restart(folder, policy, engine, **GRAPHS)
    assert after[0] == restarted[0] != first[0]


@pytest.mark.serve
def test_output_is_the_same_with_the_monitor(folder, policy, engine):
    model = calibrate(build(folder / "m", "gpt_oss"), experts="mxfp4", ignore=())
    plain = engine(model).generate()
    options = {"oss_fused": {"monitor_every": 1, "monitor_policy": policy}}
    assert engine(model, additional_config=options).generate() == plain
    assert not bits16_layers(policy)
