# SPDX-License-Identifier: MIT
"""Option short_step: the scheduler, the worker, CUDA graphs and outputs that a server gets."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from vllm.config.compilation import CUDAGraphMode
from vllm.model_executor.models.config import GptOssForCausalLMConfig

from oss_fused.plugin import burst_metrics, registration
from oss_fused.plugin.burst import WORKER
from oss_fused.plugin.registration import _add_to_settings, prepare_server, shorten_steps
from oss_fused.plugin.step_graphs import graph_sizes

AUTO = SimpleNamespace(load_format="auto")


@pytest.mark.parametrize(
    ("options", "changes", "chosen"),
    [
        ({"burst": "auto"}, {}, WORKER),
        ({"burst": 2}, {}, WORKER),
        ({"burst": 1}, {}, WORKER),
        ({}, {}, WORKER),
        ({"short_step": False}, {}, "auto"),
        ({"burst": 8}, {"worker_cls": "my.Worker"}, "my.Worker"),
        ({"burst": 8}, {"scheduler_cls": "my.Scheduler"}, "auto"),
        ({"burst": 8}, {"on_gpu": False}, "auto"),
        ({"burst": 8}, {"runner_type": "pooling"}, "auto"),
    ],
)
def test_which_worker(options, changes, chosen, monkeypatch):
    from vllm.platforms import current_platform

    counted = []
    monkeypatch.delenv("VLLM_V1_OUTPUT_PROC_CHUNK_SIZE", raising=False)
    monkeypatch.setattr(burst_metrics, "count_bursts", lambda: counted.append(1))
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _: changes.get("on_gpu", True))
    sizes = {
        "cudagraph_capture_sizes": None,
        "max_cudagraph_capture_size": None,
        "cudagraph_mode": None,
    }
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            quantization="oss_fp8", runner_type=changes.get("runner_type", "generate")
        ),
        load_config=AUTO,
        additional_config={"oss_fused": options},
        scheduler_config=SimpleNamespace(
            scheduler_cls=changes.get("scheduler_cls"),
            max_num_batched_tokens=8192,
            max_num_seqs=256,
        ),
        compilation_config=SimpleNamespace(**sizes),
        parallel_config=SimpleNamespace(
            worker_cls=changes.get("worker_cls", "auto"), data_parallel_size=1
        ),
        lora_config=None,
        speculative_config=None,
    )
    prepare_server(config)
    assert config.parallel_config.worker_cls == chosen
    assert bool(counted) == (chosen == WORKER and options.get("burst") != 1)
    # an API server takes all outputs of a step at once
    at_once = os.environ.get("VLLM_V1_OUTPUT_PROC_CHUNK_SIZE")
    assert at_once == ("256" if options.get("short_step", True) else None)


def _drafts(number, changing):
    return SimpleNamespace(
        num_speculative_tokens=number, uses_dynamic_speculative_decoding=lambda: changing
    )


@pytest.mark.parametrize("given", [None, 64])
def test_graphs_of_gpt_oss(given):
    # vLLM's own settings of gpt-oss end them at 1024 tokens where nobody chose
    settings = {"GptOssForCausalLM": GptOssForCausalLMConfig}
    _add_to_settings(settings, "GptOssForCausalLM", shorten_steps)
    scheduler = {"scheduler_cls": None, "max_num_batched_tokens": 8192, "max_num_seqs": 256}
    graphs = {"cudagraph_capture_sizes": None, "max_cudagraph_capture_size": given}
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(**scheduler),
        compilation_config=SimpleNamespace(**graphs, cudagraph_mode=None),
        parallel_config=SimpleNamespace(worker_cls="auto", data_parallel_size=1),
        lora_config=None,
        structured_outputs_config=SimpleNamespace(reasoning_parser=""),
        speculative_config=None,
    )
    settings["GptOssForCausalLM"].verify_and_update_config(config)
    chosen = None if given else graph_sizes(8192, 256)
    assert config.compilation_config.cudagraph_capture_sizes == chosen
    assert config.compilation_config.max_cudagraph_capture_size == given
    assert config.structured_outputs_config.reasoning_parser == "openai_gptoss"


@pytest.mark.parametrize(
    ("changes", "graphs", "largest"),
    [
        ({}, {}, 8192),
        ({"max_num_batched_tokens": 16384}, {}, 8192),
        ({"max_num_batched_tokens": 300}, {}, 300),
        ({}, {"cudagraph_mode": CUDAGraphMode.FULL_AND_PIECEWISE}, 8192),
        ({}, {"cudagraph_mode": CUDAGraphMode.FULL}, 4096),
        ({"worker_cls": "my.Worker"}, {}, 4096),
        ({"scheduler_cls": "my.Scheduler"}, {}, 4096),
        ({"v2": "0"}, {}, 4096),
        ({"v2": "1"}, {}, 8192),
        ({"lora_config": object()}, {}, 4096),
        ({"data_parallel_size": 2}, {}, 4096),
        ({"drafts": (3, False)}, {}, 4096),
        ({"drafts": (3, True)}, {}, None),
        # what the user says
        ({}, {"max_cudagraph_capture_size": 64}, None),
        ({}, {"cudagraph_capture_sizes": [1, 2]}, None),
        # another method, switched off, a draft model
        ({"quantization": "fp8"}, {}, None),
        ({"options": {"short_step": False}}, {}, None),
        ({"runner_type": "draft"}, {}, None),
    ],
)
def test_graphs_of_larger_steps(changes, graphs, largest, monkeypatch):
    monkeypatch.setattr(registration, "choose_worker", lambda *_: None)
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    if "v2" in changes:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", changes["v2"])
    drafts = changes.get("drafts")
    sizes = {
        "cudagraph_capture_sizes": None,
        "max_cudagraph_capture_size": None,
        "cudagraph_mode": None,
    } | graphs
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            quantization=changes.get("quantization", "oss_fp8"),
            runner_type=changes.get("runner_type", "generate"),
        ),
        load_config=AUTO,
        additional_config={"oss_fused": changes.get("options", {})},
        scheduler_config=SimpleNamespace(
            scheduler_cls=changes.get("scheduler_cls"),
            max_num_batched_tokens=changes.get("max_num_batched_tokens", 8192),
            max_num_seqs=256,
        ),
        compilation_config=SimpleNamespace(**sizes),
        parallel_config=SimpleNamespace(
            worker_cls=changes.get("worker_cls", "auto"),
            data_parallel_size=changes.get("data_parallel_size", 1),
        ),
        lora_config=changes.get("lora_config"),
        speculative_config=drafts and _drafts(*drafts),
    )
    prepare_server(config)
    chosen = config.compilation_config.cudagraph_capture_sizes
    queries = 1 if drafts is None else 1 + drafts[0]
    assert chosen == (
        graph_sizes(largest, 256, queries) if largest else graphs.get("cudagraph_capture_sizes")
    )
    assert config.compilation_config.max_cudagraph_capture_size == graphs.get(
        "max_cudagraph_capture_size"
    )


@pytest.mark.parametrize(
    ("set_by_user", "requests", "expected"),
    [(None, 128, None), (None, 129, "129"), ("64", 200, "64"), ("512", 256, "512")],
)
def test_outputs_that_an_api_server_takes_at_once(set_by_user, requests, expected, monkeypatch):
    name = "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE"
    monkeypatch.delenv(name, raising=False)
    if set_by_user:
        monkeypatch.setenv(name, set_by_user)
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(
            scheduler_cls=None, max_num_seqs=requests, max_num_batched_tokens=8192
        ),
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=[1], max_cudagraph_capture_size=None
        ),
        speculative_config=None,
    )
    shorten_steps(config)
    assert os.environ.get(name) == expected
    # a second engine of the process
    config.scheduler_config.max_num_seqs = 1024
    shorten_steps(config)
    assert os.environ.get(name) == (set_by_user or "1024")
