# SPDX-License-Identifier: MIT
"""What a server shows of itself: the monitor's figures, its options, its memory."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from oss_fused.plugin import build_info
from oss_fused.plugin.build_info import ServerCollector, register_collectors
from oss_fused.plugin.monitor.metrics import Collector, LayerFigures, write_figures
from oss_fused.quant.settings import ServingOptions
from tests.plugin.test_monitor import TOTALS


@pytest.fixture
def server(monkeypatch):
    """prepare_server of a new process; what it registers and shows."""
    from oss_fused.plugin import registration

    registered = []
    monkeypatch.setattr(registration, "_monitored", False)
    monkeypatch.setattr(build_info, "_options", None)
    monkeypatch.setattr(build_info, "register_collectors", lambda *more: registered.extend(more))
    # whatever share_folder sets is gone after the test
    monkeypatch.setenv("OSS_FUSED_MONITOR_DIR", "")

    def prepare(options, runner_type="generate", quantization="oss_fp8"):
        registration.prepare_server(
            SimpleNamespace(
                model_config=SimpleNamespace(quantization=quantization, runner_type=runner_type),
                additional_config={"oss_fused": {"short_step": False, **options}},
                load_config=SimpleNamespace(load_format="auto"),
            )
        )
        return [type(collector) for collector in registered]

    return prepare


def test_monitor_starts_where_the_options_ask_for_it(server):
    assert server({}) == []
    assert server({"monitor_every": 5}, runner_type="draft") == []
    assert server({"monitor_every": 5}, quantization="fp8") == []
    assert not os.environ["OSS_FUSED_MONITOR_DIR"]
    assert server({"monitor_every": 5}) == [Collector]
    made = os.environ["OSS_FUSED_MONITOR_DIR"]
    write_figures(0, 1, {}, TOTALS)
    assert server({"monitor_every": 5}) == [Collector], "once a process"
    assert os.environ["OSS_FUSED_MONITOR_DIR"] == made
    assert [path.name for path in Path(made).iterdir()] == ["rank0.json"]


def test_labels_name_the_options_of_the_served_model(server):
    assert build_info.labels()["options"] == ""
    server({"monitor_every": 5})
    server({"expert_kernels": "vllm", "monitor_policy": "/secret/place"})
    assert build_info.labels()["options"] == "expert_kernels=vllm, short_step=False"
    server({"expert_kernels": "native"}, runner_type="draft")
    assert build_info.labels()["options"] == "expert_kernels=vllm, short_step=False"
    build_info.show_options(ServingOptions())
    assert build_info.labels()["options"] == "defaults"


def test_several_api_servers_get_shared_values(tmp_path, monkeypatch):
    """vLLM then serves another registry, of values of all processes."""
    from prometheus_client import REGISTRY, CollectorRegistry
    from prometheus_client.multiprocess import MultiProcessCollector

    monkeypatch.setenv("OSS_FUSED_MONITOR_DIR", str(tmp_path / "figures"))
    registered = []
    monkeypatch.setattr(REGISTRY, "register", registered.append)
    monkeypatch.setattr(MultiProcessCollector, "collect", MultiProcessCollector.collect)
    ours = ServerCollector(), Collector()
    register_collectors(*ours)
    assert registered == list(ours), "with one API server"
    shared = CollectorRegistry()
    MultiProcessCollector(shared, str(tmp_path))
    write_figures(3, 7, {"a": LayerFigures(tokens=5, amax=2.0)}, TOTALS)
    value = shared.get_sample_value
    assert value("oss_fused:monitor_samples_total", {"rank": "3"}) == 7
    assert value("oss_fused:monitored_tokens_total", {"layer": "a", "rank": "3"}) == 5
    assert value("oss_fused:activation_amax", {"layer": "a", "rank": "3"}) == 2
    assert value("oss_fused:build_info", build_info.labels()) == 1
    assert value("oss_fused:memory_bytes") > 2**20
    assert 0 < time.time() - value("oss_fused:start_time_seconds") < 24 * 3600


def test_api_servers_of_one_server_say_the_same():
    """Each scrape meets one of them: a start time of its own would look like a restart."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(build_info.server_pid) == build_info.server_pid() == os.getpid()


def test_memory_counts_all_processes():
    before = build_info.anonymous_bytes(os.getpid())
    code = "x = b'1' * (64 << 20); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        child.stdout.readline()
        grown = build_info.anonymous_bytes(os.getpid()) - before
        child.communicate(b"\n")
    assert 64 << 20 <= grown < 256 << 20
