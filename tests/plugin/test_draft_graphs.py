# SPDX-License-Identifier: MIT
"""All drafts of a step in one CUDA graph: the same drafts, and which steps take it.

test_drafts_gpu.py records and replays them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness.draft_factory import make_draft
from harness.model_factory import get_shape, make_model

pytest.importorskip("vllm")

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator

from oss_fused.plugin import draft_graphs
from oss_fused.plugin.draft_graphs import OssEagleSpeculator, draft_in_one_graph

ROOT = Path(__file__).parents[2]
SYNTHETIC = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5}


RUNS = {"greedy": ({}, 3), "synthetic": (SYNTHETIC, 4)}
on_a_cpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="vLLM's kernels are interpreted on a CPU"
)


@pytest.fixture(scope="module")
def drafted(tmp_path_factory):
    """What each of RUNS gives. One process starts their engines: it imports vLLM once."""
    folder = tmp_path_factory.mktemp("drafts")
    shape = replace(get_shape("gpt-oss", "tiny"), vocab=512)
    make_model(folder / "model", shape)
    make_draft(folder / "head", shape, "specforge")
    paths = [str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]
    script = [sys.executable, str(Path(__file__).with_name("drafts_on_cpu.py"))]
    ran = subprocess.run(
        [*script, str(folder / "model"), str(folder / "head"), json.dumps([*RUNS.values()])],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return dict(zip(RUNS, json.loads(ran.stdout.splitlines()[-1]), strict=True))


@pytest.mark.serve
@on_a_cpu
@pytest.mark.parametrize("run", RUNS)
def test_an_engine_drafts_and_verifies_as_vllm(run, drafted):
    """Every draft and every token; with synthetic acceptance the draws, too."""
    found = drafted[run]
    assert found["ours"] == found["vllm"]
    tokens, drafts = found["ours"]
    assert [len(answer) for answer in tokens] == [14] * 3
    # all steps but those with prompts, and the last ones of requests that ended
    assert found["replays"] >= len(drafts) - 2 > 3


def speculator(**changes):
    """Of 3 drafts; graphs for 2 and 4 requests."""
    made = OssEagleSpeculator.__new__(OssEagleSpeculator)
    states = torch.zeros(16, 8)
    made.num_speculative_steps = 3
    made.target_graphs = SimpleNamespace(aux_hidden_states=[states])

    def dispatch(requests, tokens, queries, loras):
        assert (tokens, queries, loras) == (4 * requests, 4, 0)
        padded = next((size for size in (2, 4) if size >= requests), None)
        mode = CUDAGraphMode.FULL if padded else CUDAGraphMode.NONE
        return BatchExecutionDescriptor(mode, 4 * (padded or requests), padded or requests)

    made.passes = SimpleNamespace(dispatch=dispatch)
    vars(made).update(changes)
    return made


def batch(tokens=(4, 4, 4), eligible=True):
    tokens = np.array(tokens, np.int32)
    return SimpleNamespace(
        num_reqs=len(tokens),
        num_tokens=int(tokens.sum()),
        num_scheduled_tokens=tokens,
        decode_graph_eligible=eligible,
    )


def test_a_step_that_verifies_drafts_takes_a_graph():
    made = speculator()
    seen = [made.target_graphs.aux_hidden_states[0][:16]]
    assert made._graph_of(batch(), seen, {}).num_reqs == 4
    assert made._graph_of(batch((4, 4)), seen, {"num_speculative_tokens": 3}).num_reqs == 2


def test_no_graph_was_recorded():
    made = speculator(target_graphs=SimpleNamespace(aux_hidden_states=[]))
    assert made._graph_of(batch(), [torch.zeros(12, 8)], {}) is None


@pytest.mark.parametrize(
    ("step", "options"),
    [
        # more requests than graphs have, a request without drafts, a prompt, and one that ends here
        ({"tokens": (4,) * 5}, {}),
        ({"tokens": (4, 1, 4)}, {}),
        ({"tokens": (5, 3, 4)}, {}),
        ({"eligible": False}, {}),
        ({}, {"dummy_run": True}),
        ({}, {"is_profile": True}),
        ({}, {"mm_inputs": ([], None)}),
        ({}, {"num_speculative_tokens": 2}),
        ({}, {"seen": None}),
        # the target ran without a graph
        ({}, {"seen": [torch.ones(16, 8)]}),
    ],
)
def test_other_steps_draft_as_in_vllm(step, options, monkeypatch):
    made = speculator()
    options = dict(options)
    seen = options.pop("seen", [made.target_graphs.aux_hidden_states[0][:12]])
    told = []

    def propose(*args, **kwargs):
        told.append((args[1:], kwargs))
        return "vLLM's"

    monkeypatch.setattr(EagleSpeculator, "propose", propose)
    inputs = (batch(**step), "metadata", "slots", "hidden", seen, *"abcdef")
    assert made.propose(*inputs, **options) == "vLLM's"
    assert told == [(inputs, options)]


def runner(kind=EagleSpeculator, **changes):
    group = SimpleNamespace(kernel_block_size=changes.pop("blocks", None))
    made = kind.__new__(kind)
    made.method, made.supports_decode_metadata_update = "eagle3", True
    made.draft_logits = made.acceptance_estimator = made.draft_watermarker = None
    made.supports_mm_inputs, made.attn_groups, made.target_attn_groups = False, [[group]], [[]]
    made.max_num_reqs, made.device, made.num_speculative_steps = 4, torch.device("cpu"), 3
    sizes = ("data", "pipeline", "decode_context", "prefill_context")
    parallel = {f"{name}_parallel_size": changes.pop(name, 1) for name in sizes}
    ubatching, lora = changes.pop("use_ubatching", False), changes.pop("lora_config", None)
    dynamic, mode = changes.pop("dynamic", False), changes.pop("mode", "FULL_AND_PIECEWISE")
    seen = changes.pop("use_aux_hidden_state_outputs", True)
    vars(made).update(changes)
    return SimpleNamespace(
        speculator=made,
        use_aux_hidden_state_outputs=seen,
        cudagraph_manager=mode and SimpleNamespace(cudagraph_mode=CUDAGraphMode[mode]),
        vllm_config=SimpleNamespace(
            parallel_config=SimpleNamespace(**parallel, use_ubatching=ubatching),
            speculative_config=SimpleNamespace(uses_dynamic_speculative_decoding=lambda: dynamic),
            lora_config=lora,
        ),
    )


@pytest.fixture
def managers(monkeypatch):
    made = []
    monkeypatch.setattr(draft_graphs, "CudaGraphManager", lambda *args: made.append(args) or made)
    return made


def test_caches_that_are_set_up_twice(managers):
    """First to see how much memory graphs take."""
    given = runner()
    for number in (1, 2):
        draft_in_one_graph(given)
        assert type(given.speculator) is OssEagleSpeculator and len(managers) == number
        assert managers[-1][2:] == (CUDAGraphMode.FULL_DECODE_ONLY, 4)
    assert given.speculator.rejected.tolist() == [0] * 4
    assert given.speculator.target_graphs is given.cudagraph_manager


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": NgramGPUSpeculator},
        {"method": "eagle"},
        {"use_aux_hidden_state_outputs": False},
        {"supports_decode_metadata_update": False},
        {"draft_logits": torch.zeros(1)},
        {"acceptance_estimator": object()},
        {"draft_watermarker": object()},
        {"supports_mm_inputs": True},
        {"dynamic": True},
        {"lora_config": object()},
        {"mode": None},
        {"mode": "PIECEWISE"},
        {"data": 2},
        {"pipeline": 2},
        {"decode_context": 2},
        {"prefill_context": 2},
        {"use_ubatching": True},
        {"blocks": 16},
    ],
)
def test_what_keeps_vllms_speculator(changes, managers):
    given = runner(**changes)
    draft_in_one_graph(given)
    assert type(given.speculator) is changes.get("kind", EagleSpeculator) and not managers


def test_no_drafts(managers):
    draft_in_one_graph(SimpleNamespace(speculator=None))
    assert not managers


def test_a_graph_records_both_kinds_of_passes(monkeypatch):
    """Metadata is made twice for each size, outside: warm-up may change it."""
    made, asked, ran = speculator(), [], []

    def prepare(*args, **options):
        asked.append((args, options))
        return ("metadata", len(asked)), "slots"

    monkeypatch.setattr(draft_graphs, "prepare_inputs_to_capture", prepare)
    made.model_state, made.target_input_buffers, made.input_buffers = "state", "target", "own"
    made.block_tables, made.target_attn_groups, made.attn_groups = "tables", "all", "head"
    made.kv_cache_config = "cache"
    made._run_passes = lambda *args: ran.append(args)
    desc = BatchExecutionDescriptor(CUDAGraphMode.FULL, 8, 2, 4)
    made._prepare_passes(desc, warmup=True)(CUDAGraphMode.NONE)
    first, later = asked
    whole = {"full_cudagraph": True}
    inputs = (2, 8, "state", "target", "tables", "all", "cache")
    assert first == (inputs, whole | {"max_query_len": 4})
    inputs = (2, 2, "state", "own", "tables", "head", "cache")
    assert later == (inputs, whole | {"max_query_len": 1})
    assert ran == [(2, 8, (("metadata", 1), "slots"), (("metadata", 2), "slots"))]


def test_vllms_graphs_come_first(monkeypatch):
    told = []
    monkeypatch.setattr(EagleSpeculator, "capture", lambda self: told.append("vLLM's"))
    made = speculator()
    made.passes = SimpleNamespace(capture=lambda make, text: told.append(make))
    made.capture()
    assert told == ["vLLM's", made._prepare_passes]
