# SPDX-License-Identifier: MIT
"""scripts/doctor.py: table, JSON, exit codes."""

from __future__ import annotations

import importlib.metadata
import json

import pytest
import torch

from oss_fused.plugin import doctor, preflight
from oss_fused.plugin.compat import HookResult
from tests.loading import load_script
from tests.plugin.conftest import build, calibrate, edit, tensors_of

GPU = torch.cuda.is_available()
main = load_script("doctor").main


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return calibrate(build(tmp_path_factory.mktemp("good"), "llama"))


def test_good_checkpoint(model, tmp_path, capsys) -> None:
    report = tmp_path / "doctor.json"
    assert main([str(model), "--json", str(report), "--max-model-len", "64"]) == 0
    assert "fit to serve" in capsys.readouterr().err
    facts = json.loads(report.read_text())
    assert facts["ok"] and facts["environment"]["versions"]["vllm"]
    status = {check["name"]: check["status"] for check in facts["checks"]}
    assert status["checkpoint"] == status["operators"] == status["memory"] == "ok"
    assert status["smoke"] == "skip"


def test_bad_scale_and_its_remedy(model, tmp_path, capsys) -> None:
    name = "model.layers.0.self_attn.q_proj.weight_scale"
    good = tensors_of(model)[name]
    edit(model, {name: torch.zeros_like(good)})
    try:
        assert main([str(model)]) == 1
    finally:
        edit(model, {name: good})
    text = capsys.readouterr().err
    assert f"'{name}' holds 0.0" in text and "-> do not serve it" in text


@pytest.mark.parametrize(
    "arguments",
    [
        ["/nowhere"],
        [".", "--tensor-parallel-size", "0"],
        [".", "--pipeline-parallel-size", "0"],
        ["--device", "tpu"],
    ],
)
def test_bad_arguments(arguments, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    problem = capsys.readouterr().err
    assert all(word in problem for word in arguments[-2:])


def test_an_nccl_that_vllm_gives_up_is_seen(monkeypatch) -> None:
    class Old:
        def __init__(self):
            raise AttributeError("undefined symbol: ncclCommSuspend")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert doctor._check_nccl().status == "skip"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(doctor, "NCCLLibrary", Old)
    check = doctor._check_nccl()
    assert check.status == "warn" and "ncclCommSuspend" in check.detail
    assert "VLLM_NCCL_SO_PATH" in check.remedy


def test_too_little_memory(monkeypatch) -> None:
    monkeypatch.setattr(preflight, "free_gib", lambda utilization: 1.0)
    check = preflight.check_memory({"weights": 0.9, "overhead": 0.5}, 0.9)
    assert check.status == "fail" and "1.40 GiB" in check.detail and check.remedy


def test_stages_share_layers_and_their_cache() -> None:
    config = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 512}
    config |= {"num_hidden_layers": 6}
    whole = preflight.needed_gib(12.0, config, 1 << 20, 2)
    stage = preflight.needed_gib(12.0, config, 1 << 20, 2, 4)
    assert (whole["weights"], stage["weights"]) == (6.0, 2.0), "the largest has two layers"
    assert stage["kv_cache"] == whole["kv_cache"] / 3


@pytest.mark.parametrize(("ranks", "heads"), [(1, 3), (2, 2), (8, 1)])
def test_a_rank_holds_whole_heads_of_the_cache(ranks, heads) -> None:
    """At least one, rounded up: a key and a value of two bytes each."""
    config = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 384}
    config["num_hidden_layers"] = 5
    found = preflight.needed_gib(1.0, config, 1 << 20, ranks)["kv_cache"]
    assert found == 5 * heads * 64 * 4 * 2**20 / preflight.GIB
    found = preflight.needed_gib(1.0, {**config, "head_dim": 128}, 1 << 20, ranks)["kv_cache"]
    assert found == 5 * heads * 128 * 4 * 2**20 / preflight.GIB


def test_a_model_that_fits_several_stages_only(model, monkeypatch, capsys) -> None:
    seen = []
    needed = preflight.needed_gib
    monkeypatch.setattr(preflight, "needed_gib", lambda *a: seen.append(a[3:]) or needed(*a))
    assert main([str(model), "--max-model-len", "64", "--pipeline-parallel-size", "2"]) == 0
    assert seen == [(1, 2)], capsys.readouterr().err


def test_hooks_of_vllm(monkeypatch, capsys) -> None:
    fits = HookResult("vllm.a:f", "(x)")
    gone = HookResult("vllm.b:g", "missing", "is missing")
    # the script has names of its own
    for holder in (vars(doctor), main.__globals__):
        monkeypatch.setitem(holder, "check_hooks", lambda package: results)
    results = [fits, gone]
    assert main(["--hooks"]) == 1
    assert "ok    vllm.a:f (x)\nfail  vllm.b:g is missing" in capsys.readouterr().err
    check = doctor._check_vllm()
    assert check.status == "fail" and "vllm.b:g is missing" in check.detail
    results = [fits]
    assert main(["--hooks"]) == 0
    assert doctor._check_vllm().status == "ok"
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.34.0")
    check = doctor._check_vllm()
    assert check.status == "warn" and "0.32.0 or 0.33.0" in check.remedy


def test_unknown_setting_is_a_warning(monkeypatch) -> None:
    monkeypatch.setenv("OSS_FUSED_BACKENDS", "torch")
    check = preflight.check_settings()
    assert check.status == "warn" and "OSS_FUSED_BACKENDS" in check.detail
    monkeypatch.setenv("OSS_FUSED_MONITOR", "10")
    check = preflight.check_settings()
    assert check.status == "warn" and "option monitor_every" in check.detail


@pytest.mark.skipif(GPU, reason="this machine has a GPU")
def test_gpu_that_is_not_there() -> None:
    assert preflight.check_device("cuda").status == "fail"
    assert preflight.check_device("auto").status == "ok"


@pytest.mark.parametrize(("missing", "status"), [("triton", "ok"), ("torch", "fail")])
def test_a_cpu_serves_without_triton(missing, status, monkeypatch) -> None:
    version = preflight.environment.version
    monkeypatch.setattr(
        preflight.environment, "version", lambda name: None if name == missing else version(name)
    )
    check = preflight.check_versions()
    assert check.status == status and (f"missing: {missing}" in check.detail) is (status == "fail")


@pytest.mark.parametrize("wrong", [True, False])
def test_an_operator_that_is_wrong_in_one_form_is_seen(wrong, monkeypatch) -> None:
    right = torch.ops.oss_fused.fp8_linear

    def linear(*args):
        # bf16_rows: few rows are served in two levels of codes
        return right(*args) * (0 if wrong == bool(args[-1]) else 1)

    monkeypatch.setattr(torch.ops.oss_fused, "fp8_linear", linear)
    check = preflight.check_operators()
    rows = preflight.BF16_ROWS if wrong else 0
    assert check.status == "fail" and f"bf16_rows={rows} is off by 1.000" in check.detail


def test_exception_becomes_a_failure() -> None:
    def broken():
        raise RuntimeError("no such library")

    check = preflight.guarded("operators", broken, "reinstall")
    assert (check.status, check.detail, check.remedy) == ("fail", "no such library", "reinstall")

    def silent():
        raise NotImplementedError

    assert preflight.guarded("operators", silent).detail == "NotImplementedError"
