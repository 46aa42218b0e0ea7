# SPDX-License-Identifier: MIT
"""bench_decode: engines in turn, speed-ups, groups of kernels, limits, report; no vLLM."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
from harness import decode, decode_figures, decode_profile
from harness.arms import Arm
from harness.decode_limits import kv_bytes, step_bytes

from oss_fused.errors import ServerError

WORKER = (sys.executable, str(Path(__file__).parent / "fake_decode_worker.py"))
GPT_OSS = {
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201088,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "quantization_config": {"quant_method": "mxfp4"},
}


def plan(folder: Path, **changes: object) -> decode.DecodeBenchmark:
    model = folder / "m"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(GPT_OSS))
    options = {
        "arms": [Arm("slow", str(model)), Arm("fast", str(model), ("q",))],
        "cells": [decode.Cell(1, 16, 8), decode.Cell(4, 16, 8), decode.Cell(1, 32, 0)],
        "profiles": [decode.Cell(4, 16, 8), decode.Cell(1, 32, 0)],
        "worker": WORKER,
        "say": lambda text: None,
    }
    return decode.DecodeBenchmark(**{**options, **changes})


def test_measures_every_cell_on_every_arm_and_compares(tmp_path):
    results = decode.run(plan(tmp_path), tmp_path)
    assert len(results["measurements"]) == 2 * 2 * 3
    first = [row["arm"] for row in results["measurements"][:4]]
    assert first == ["slow", "fast", "fast", "slow"]
    cells = decode_figures.condense(results["measurements"], "fast", ["slow"])
    assert [cell["speedup"] for cell in cells] == [2.0, 2.0, 2.0]
    assert cells[0]["arms"]["slow"] == {
        **dict.fromkeys(("ms", "min", "max", "p10", "p90"), 1.0),
        "distinct": 1.0,
        "left_out": 0,
        "steady": True,
    }
    assert decode_figures.named_speedups(cells, "m") == {
        "decode.m.speedup_b1": 2.0,
        "decode.m.speedup_b4": 2.0,
        "prefill.m.speedup_32": 2.0,
    }


def test_profiles_by_group(tmp_path):
    results = decode.run(plan(tmp_path), tmp_path)
    step = decode_profile.condense(results["profiles"][0])
    assert (step["arm"], step["kernels_per_step"], step["steps"]) == ("slow", 8, 8)
    assert step["groups"]["projections"] == {"kernels": 2.0, "us": 16.0}
    assert step["groups"]["head"]["kernels"] == 1.0
    assert step["busy_us"] == pytest.approx(64.0)
    assert step["span_us"] == pytest.approx(79.75)
    prefill = decode_profile.condense(results["profiles"][2])
    assert (prefill["steps"], prefill["kernels_per_step"]) == (0, 8)


def row(arm, number, ms, context=128):
    cell = {"batch": 1, "context": context, "steps": 8}
    return {"arm": arm, "round": number, **cell, "ms": ms, "distinct": 1.0}


def test_a_measurement_in_which_tokens_queued_up_is_left_out():
    queued = [60.0, 1.0, 1.0, 1.0]
    rows = [row("a", 0, [6.0]), row("oss_fp8", 0, queued)]
    rows += [row("a", 1, queued), row("oss_fp8", 1, [3.0])]
    rows += [row("a", 2, [4.0, 4.0, 7.9]), row("oss_fp8", 2, [2.0])]
    (cell,) = decode_figures.condense(rows, "oss_fp8", ["a"])
    assert (cell["arms"]["a"]["ms"], cell["arms"]["oss_fp8"]["ms"]) == (5.0, 2.5)
    # the one round in which both were steady
    assert (cell["speedup_min"], cell["speedup_max"]) == (2.0, 2.0)
    assert (cell["arms"]["a"]["left_out"], cell["arms"]["oss_fp8"]["left_out"]) == (1, 1)
    assert cell["arms"]["oss_fp8"]["steady"]
    # better than nothing, and said
    (cell,) = decode_figures.condense(rows[:2], "oss_fp8", ["a"])
    assert (cell["speedup"], cell["arms"]["oss_fp8"]["steady"]) == (6.0, False)


def test_a_step_shorter_than_its_kernels_is_left_out():
    rows = [row("a", 0, [6.0]), row("a", 1, [6.0])]
    rows += [row("oss_fp8", 0, [1.7]), row("oss_fp8", 1, [3.0])]
    profile = {"arm": "oss_fp8", "batch": 1, "context": 128, "steps": 8, "busy_us": 2000.0}

    def ms(**changes):
        profiles = [{**profile, **changes}]
        (cell,) = decode_figures.condense(rows, "oss_fp8", ["a"], profiles)
        return cell["arms"]["oss_fp8"]["ms"]

    assert ms() == 3.0
    # a profile slows kernels
    assert ms(busy_us=1850.0) == 2.35
    # a profile of something else says nothing
    for other in ({"batch": 2}, {"arm": "a"}, {"context": 256}, {"steps": 0}):
        assert ms(**other) == 2.35
    # better than nothing
    assert ms(busy_us=4000.0) == 2.35


def test_the_faster_baseline_and_the_worst_context_count():
    rows = [
        row(arm, 0, [ms], context)
        for context, times in ((128, (4.0, 3.0, 2.0)), (1024, (5.0, 6.0, 2.0)))
        for arm, ms in zip(("a", "b", "oss_fp8"), times)
    ]
    cells = decode_figures.condense(rows, "oss_fp8", ["a", "b"])
    assert [cell["baseline"] for cell in cells] == ["b", "a"]
    assert decode_figures.named_speedups(cells, "x") == {"decode.x.speedup_b1": 1.5}


def test_failures_name_the_engine_and_its_log(tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/config.json").write_text(json.dumps(GPT_OSS))
    working = plan(tmp_path).arms
    broken = [*working, Arm("a", str(tmp_path / "broken"))]
    with pytest.raises(ServerError, match=r"engine a .*ended(.|\n)*upside down"):
        decode.run(plan(tmp_path, arms=broken), tmp_path)
    with pytest.raises(ServerError, match="unlucky"):
        decode.run(plan(tmp_path, cells=[decode.Cell(13, 16, 8)]), tmp_path)


def test_the_most_wanted_comes_first_and_is_kept(tmp_path):
    cells = [decode.Cell(1, 16, 8), decode.Cell(1, 64, 8), decode.Cell(1, 32, 0)]
    whole = plan(tmp_path, cells=cells)
    order = [(number, cell.context) for number, cell in whole.schedule()]
    assert order[:5] == [(0, 16), (0, 32), (None, 16), (None, 32), (0, 64)]
    assert [number for number, _ in order[5:]] == [1, 1, 1]
    results = decode.run(plan(tmp_path, deadline=0.0), tmp_path)
    assert [row["arm"] for row in results["measurements"]] == ["slow", "fast"]
    assert results["stopped"] == "time is up"


def test_a_late_failure_keeps_what_was_measured(tmp_path):
    cells = [decode.Cell(1, 16, 8), decode.Cell(1, 19, 8)]
    results = decode.run(plan(tmp_path, cells=cells, profiles=[]), tmp_path)
    assert len(results["measurements"]) == 2 and "unlucky" in results["stopped"]


def test_a_baseline_that_does_not_start_is_left_out(tmp_path):
    broken = Arm("a", str(tmp_path / "broken"))
    Path(broken.model).mkdir()
    (Path(broken.model) / "config.json").write_text(json.dumps(GPT_OSS))
    results = decode.run(plan(tmp_path, arms=[broken, *plan(tmp_path).arms]), tmp_path)
    assert "upside down" in results["failed"]["a"]
    assert list(results["arms"]) == ["slow", "fast"]
    with pytest.raises(ServerError, match="upside down"):
        decode.run(plan(tmp_path, arms=[broken, plan(tmp_path).arms[1]]), tmp_path)


def test_engines_start_together_and_have_one_time_to_do_so(tmp_path):
    late = [Arm(name, str(tmp_path / "late")) for name in ("a", "b", "c")]
    Path(late[0].model).mkdir()
    (Path(late[0].model) / "config.json").write_text(json.dumps(GPT_OSS))
    arms = [*late, *plan(tmp_path).arms]
    begin = time.monotonic()
    results = decode.run(plan(tmp_path, arms=arms, startup_timeout=4.0), tmp_path)
    assert time.monotonic() - begin < 4 + 4
    assert (
        list(results["failed"]) == ["a", "b", "c"] and "no answer in 4 s" in results["failed"]["c"]
    )
    assert len(results["measurements"]) == 2 * 2 * 3


def test_flags_fit_the_cells(tmp_path):
    arm = plan(tmp_path).arms[1]
    flags = plan(tmp_path, flags=["--x"]).flags_of(arm)
    assert flags[flags.index("--max-num-seqs") + 1] == "4"
    assert flags[-3:] == ["--enforce-eager", "--x", "q"]
    gpu = plan(tmp_path, gpu=True).flags_of(arm)
    at = gpu.index("--cudagraph-capture-sizes")
    assert gpu[at + 1 : at + 4] == ["1", "4", "--gpu-memory-utilization"]
    # steps whose host time is taken may verify 7 drafts each, and no sequence may end before
    hosts = plan(tmp_path, hosts=[decode.Cell(4, 16, 48)]).flags_of(arm)
    assert hosts[hosts.index("--max-model-len") + 1] == str(16 + 8 * 48 + 4 + 64)
    # a step of the largest batch has a token for each sequence
    wide = [decode.Cell(256, 128, 48)]
    many = decode.DecodeBenchmark(arms=[arm], cells=wide, profiles=wide, gpu=False).flags_of(arm)
    assert many[many.index("--max-num-batched-tokens") + 1] == "256"


# two layers of gpt-oss as vLLM runs it; a product with split K; the next step's first product
LAYERS = [
    "triton_red_fused_rms_norm",
    "nvjet_a",
    "splitKreduce",
    "rotary",
    "flash",
    "combine",
    "nvjet_a",
    "splitKreduce",
    "norm",
    "router_nvjet",
    "_topk",
    "_matmul_ogs",
    "_reduce_grouped",
    "norm",
    "nvjet_a",
    "splitKreduce",
    "rotary",
    "flash",
    "nvjet_a",
    "norm",
    "router_nvjet",
    "_topk",
    "_matmul_ogs",
    "norm",
    "nvjet_a",
    "argmax",
]


def test_products_are_known_by_their_place():
    groups = decode_profile.attribute([*LAYERS, *LAYERS])
    for part in (groups[: len(LAYERS)], groups[len(LAYERS) :]):
        by_name = [part[i] for i, name in enumerate(LAYERS) if name == "nvjet_a"]
        assert by_name == ["projections"] * 4 + ["head"]
        assert part.count("router") == 4
        assert part[2] == part[7] == "projections"
    dense = [
        "qnorm",
        "gemm",
        "rope",
        "attention",
        "gemm",
        "norm",
        "gemm",
        "silu",
        "gemm",
        "norm",
        "gemm",
        "argmax",
    ]
    groups = decode_profile.attribute(dense)
    assert groups[1] == groups[4] == "projections"
    assert groups[6] == groups[7] == groups[8] == "mlp"
    assert groups[10] == "head"


def test_a_fused_projection_leaves_the_products_to_the_mlp():
    fused = ["_qkv_kernel", "attention", "gemv", "norm", "gemv", "act_mul", "gemv", "norm"] * 2
    groups = decode_profile.attribute([*fused, "gemv", "argmax"])
    assert groups[2:9] == ["projections", "norms", "mlp", "mlp", "mlp", "norms", "projections"]
    assert groups[-2] == "head"
    # gate and up of a dense model are no experts
    few = [name if name != "act_mul" else "_gate_up_stream_kernel" for name in fused]
    few = [name for at, name in enumerate(few) if at % 8 != 4]
    groups = decode_profile.attribute([*few, "gemv", "argmax"])
    assert groups[2:7] == ["projections", "norms", "mlp", "mlp", "norms"]


def test_shared_time_counts_once():
    assert decode_profile.own_times([(0, 0.0, 10.0), (1, 4.0, 2.0), (1, 8.0, 5.0)]) == [10, 0, 3]


def test_limits():
    sizes = step_bytes(GPT_OSS, 1, 128)
    # design.md: 297 us of experts and 136 of the head at 4.27 TB/s
    assert sizes["experts"] / 4.27e6 == pytest.approx(297, abs=2)
    assert sizes["head"] / 4.27e6 == pytest.approx(136, abs=1)
    assert sizes["attention"] == 24 * 128 * 2 * 512 * 2
    assert kv_bytes(GPT_OSS) == 24 * 2 * 512 * 2
    # half of the layers see no more than their window
    assert step_bytes(GPT_OSS, 2, 1024)["attention"] == 2 * 12 * (128 + 1024) * 2 * 512 * 2
    dense = {**GPT_OSS, "num_local_experts": 0}
    assert step_bytes(dense, 1, 1)["mlp"] == 24 * 3 * 2880 * 2880
