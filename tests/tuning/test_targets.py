# SPDX-License-Identifier: MIT
"""The tuner on a real Triton kernel, its targets, and scripts/tune.py."""

from __future__ import annotations

import json

import pytest
import torch
from harness.chapters import chapter

from oss_fused.bench.accuracy import check_accuracy
from oss_fused.specs import FP8GEMMInput
from oss_fused.tuning.cache import TuningCache
from oss_fused.tuning.result import Status
from oss_fused.tuning.targets import get_target
from oss_fused.tuning.tuner import TritonAutoTuner
from tests.loading import load_script

tune = load_script("tune")


def operands(m, n, k, dtype, device):
    generator = torch.Generator().manual_seed(m)
    a = torch.randn(m, k, generator=generator).to(dtype).to(device)
    b = torch.randn(n, k, generator=generator).to(dtype).to(device)
    return a, b.t()


def test_tuner_on_a_real_kernel_rejects_the_wrong_and_keeps_the_right(tmp_path, device):
    a, b = operands(16, 16, 64, torch.float32, device)

    def sometimes_wrong(a, b, BLOCK_K):
        out = chapter("06-matmul").matmul_v3(a, b, 16, 16, BLOCK_K, num_warps=4, num_stages=1)
        return out * 1.01 if BLOCK_K == 64 else out

    tuner = TritonAutoTuner(
        sometimes_wrong,
        {"BLOCK_K": (16, 32, 64)},
        warmup_runs=0,
        benchmark_runs=20,
        reference=torch.mm,
        cache=TuningCache(tmp_path / "c.json"),
        exhaustive=True,
    )
    result = tuner.tune(a, b, problem_size=FP8GEMMInput(16, 16, 64), device=device)
    assert result.count(Status.WRONG) == 1 and result.count(Status.OK) == 2
    assert result.best_config["BLOCK_K"] in (16, 32)
    assert result.metrics.throughput_tflops > 0 and result.metrics.bandwidth_gbps > 0


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("matmul", (48, 64, 64)),
        ("fp8_gemm", (48, 64, 64)),
        ("gated_mlp", (20, 64, 96)),
        ("rmsnorm_rope", (2, 40, 128, 32)),
        ("convolution", (2, 20, 24, 9, 3)),
    ],
)
def test_targets_take_their_space_and_their_default(name, sizes, device):
    target = get_target(name)
    assert not target.default or target.default in target.space
    problem = target.problem(*sizes)
    arguments = target.arguments(problem, device)
    expected = target.reference(*arguments).cpu()
    smallest = {key: values[0] for key, values in target.space.parameters.items()}
    for config in (target.default, smallest):
        actual = target.function(*arguments, **config)
        assert check_accuracy(actual.cpu(), expected, target.tolerance).passed


def test_tuning_a_library_kernel_states_the_gain_over_its_own_choice(tmp_path, device):
    cache = TuningCache(tmp_path / "c.json")
    target = get_target("rmsnorm_rope")
    problem = target.problem(1, 8, 64, 16)
    tuner = TritonAutoTuner(
        target.function,
        {"BLOCK_SIZE": (4,), "num_warps": (2,), "num_stages": (1, 2)},
        warmup_runs=0,
        benchmark_runs=20,
        operation="rmsnorm_rope",
        reference=target.reference,
        cache=cache,
        # its samples under the interpreter would take a minute
        timer=lambda call, repeats, device: [1.0 + (call() is None)] * repeats,
    )
    arguments = target.arguments(problem, device)
    result = tuner.tune(*arguments, problem_size=problem, device=device, default=target.default)
    assert result.best_config["BLOCK_SIZE"] == 4 and result.gain is not None
    assert result.count(Status.OK) == 3


def test_unknown_target_is_named():
    with pytest.raises(ValueError, match="target='conv'"):
        get_target("conv")


def test_command_simulates_lists_and_merges(tmp_path, capsys):
    cache, out = tmp_path / "c.json", tmp_path / "out" / "r.json"
    args = ["simulate", "--device", "low_bw", "--sizes", "512x512x512", "--cache", str(cache)]
    assert tune.main([*args, "--output", str(out)]) == 0
    (found,) = json.loads(out.read_text())["results"]
    assert found["config"]["BLOCK_M"] and "simulated" in found["key"]
    other = tmp_path / "other.json"
    assert tune.main(["--merge", str(cache), "--list", "--cache", str(other)]) == 0
    err = capsys.readouterr().err
    assert "1 entries taken" in err and "512x512x512" in err


@pytest.mark.parametrize(
    ("failure", "code"),
    [(RuntimeError("lost"), 1), (ValueError("odd"), 2), (KeyboardInterrupt, 130)],
)
def test_what_was_found_before_a_failure_is_written(tmp_path, monkeypatch, capsys, failure, code):
    tuned = tune.tune

    def fails_behind_the_first(args, size):
        if size[0] == 256:
            raise failure
        return tuned(args, size)

    monkeypatch.setattr(tune, "tune", fails_behind_the_first)
    out, table, cache = (tmp_path / name for name in ("r.json", "t.csv", "c.json"))
    args = ["simulate", "--device", "low_bw", "--cache", str(cache), "--output", str(out)]
    sizes = ["--sizes", "512x512x512", "256x256x256"]
    assert tune.main([*args, *sizes, "--csv", str(table)]) == code
    (found,) = json.loads(out.read_text())["results"]
    assert "512x512x512" in found["key"] and "512x512x512" in table.read_text()
    # a size that fits no target is told before the first is tuned
    out.unlink()
    assert tune.main([*args, "--sizes", "512x512x512", "8x8"]) == 2
    assert "--sizes 8x8: simulate expects MxNxK" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["simulate", "--device", "h300", "--sizes", "8x8x8"], 2, "h300"),
        (["rmsnorm_rope", "--sizes", "8x8x8"], 2, "BATCHxSEQUENCExHIDDENxHEAD"),
        (["--merge", "nowhere.json"], 2, "nowhere.json"),
    ],
)
def test_command_names_bad_input(args, code, words, capsys, tmp_path):
    assert tune.main([*args, "--cache", str(tmp_path / "c.json")]) == code
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("args", [[], ["matmul"], ["matmul", "--sizes", "8xb"]])
def test_command_usage_errors(args, capsys):
    with pytest.raises(SystemExit) as caught:
        tune.main(args)
    assert caught.value.code == 2
    assert "expected" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
@pytest.mark.parametrize("target", ["tiles", "matmul"])
def test_command_without_a_gpu_does_not_suggest_a_cpu(target, tmp_path, capsys):
    args = [target, "--sizes", "64x64x64", "--cache", str(tmp_path / "c.json")]
    assert tune.main(args) == 1
    assert "--device cuda:0: no NVIDIA GPU is usable here" in capsys.readouterr().err


@pytest.mark.parametrize(
    "target",
    [["tiles"], ["recovery", "--from", "NVIDIA H200"], ["matmul"], ["fp8_gemm"]],
    ids=lambda target: target[0],
)
def test_a_cpu_is_not_tuned(target, tmp_path, capsys):
    """Its times would be those of Triton's interpreter."""
    cache = tmp_path / "c.json"
    args = [*target, "--sizes", "64x64x64", "--cache", str(cache), "--device", "cpu"]
    assert tune.main(args) == 1
    wanted = f"error: --device cpu: {target[0]} expects an NVIDIA GPU, 'cuda' or 'cuda:N'"
    assert wanted in capsys.readouterr().err
    assert not cache.exists()
