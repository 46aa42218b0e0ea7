# SPDX-License-Identifier: MIT
"""Accuracy of attention and the limits of its FP8 form, at a small size, as CI runs it."""

import json

import pytest
import torch
from harness import attention_accuracy, attention_regression

from tests.loading import load_script

script = load_script("eval_attention_accuracy")
SMALL = ["--B", "1", "--H", "2", "--N", "96", "--D", "64", "--window-left", "16"]


def run(tmp_path, *flags):
    output = tmp_path / "out" / "attention_accuracy.json"
    code = script.main([*SMALL, "--device", "cpu", "--output", str(output), *flags])
    return code, json.loads(output.read_text()) if output.exists() else None


def test_the_report_has_every_curve(tmp_path):
    code, found = run(tmp_path, "--fp8", "--plot", "--group-candidates", "4,8,16,32,64,48")
    assert code == 0
    assert list(found["curves"]) == [
        "baseline",
        "window",
        "dropout",
        "fp8_per_channel",
        "fp8_group",
    ]
    for name, curve in found["curves"].items():
        assert len(curve["abs_diff_hist_counts"]) == 50
        assert sum(curve["abs_diff_hist_counts"]) == 2 * 96 * 64
        assert 0 < curve["p50_abs"] <= curve["p90_abs"] <= curve["p99_abs"] <= curve["max_abs"], (
            name
        )
        assert curve["mean_abs"] < curve["max_abs"] and curve["mean_rel"] <= curve["max_rel"]
        assert curve["kl_vs_laplace_like"] > 0
    # bfloat16 rounds once; e4m3 codes of V carry eight times its error and more
    assert found["curves"]["baseline"]["mean_abs"] < 1e-3
    assert found["curves"]["fp8_group"]["mean_abs"] > 2 * found["curves"]["baseline"]["mean_abs"]
    assert found["per_channel"]["amax_mean"] <= found["per_channel"]["amax_max"]
    group = found["per_group"]
    assert (
        list(group["candidates"]) == ["4", "8", "16", "32", "64"] and group["target_clip"] == 0.01
    )
    clips = {int(k): v["clip_ratio"] for k, v in group["candidates"].items()}
    assert group["group_size"] == attention_accuracy.choose_group(clips, 0.01)
    assert (tmp_path / "out" / "attention_accuracy.png").read_bytes().startswith(b"\x89PNG")


def test_without_fp8_there_is_nothing_to_hold(tmp_path):
    code, found = run(tmp_path)
    assert code == 0 and list(found["curves"]) == ["baseline", "window", "dropout"]


def test_the_smallest_group_within_the_target_is_chosen():
    assert attention_accuracy.choose_group({4: 0.02, 8: 0.01, 16: 0.0}, 0.01) == 8
    assert attention_accuracy.choose_group({4: 0.02, 8: 0.03}, 0.01) == 8


def test_the_divergence_is_small_of_laplace_and_large_of_a_constant():
    uniform = torch.rand(200000, generator=torch.Generator().manual_seed(0)).clamp(1e-7, 1 - 1e-7)
    laplace = -uniform.log()
    near = attention_accuracy.difference(laplace, torch.zeros_like(laplace), 0.0)
    far = attention_accuracy.difference(torch.ones(1000), torch.zeros(1000), 0.0)
    assert near["kl_vs_laplace_like"] < 0.01 < 1 < far["kl_vs_laplace_like"]


def test_limits_fail_a_run_and_follow_the_trend_down(tmp_path, capsys):
    trend, limits, page = (tmp_path / n for n in ("trend.json", "limits.json", "report.md"))
    files = ["--fp8", "--trend", str(trend), "--thresholds", str(limits), "--markdown", str(page)]
    files += ["--summary", str(tmp_path / "summary.json")]
    limits.write_text("{}")
    code, found = run(tmp_path, *files, "--fp8-p99-threshold", "1e-6")
    assert code == 1 and "attention_fp8_p99_abs" in capsys.readouterr().err
    p99 = json.loads(trend.read_text())[0]["p99"]
    assert p99 == max(found["curves"][n]["p99_abs"] for n in ("fp8_per_channel", "fp8_group"))
    assert "above its limit" in page.read_text() and limits.read_text() == "{}"
    figures = json.loads((tmp_path / "summary.json").read_text())
    assert figures == {"operators.flash.fp8_p99_abs": p99}
    assert run(tmp_path, *files, "--fp8-clip-threshold", "-1")[0] == 1
    # three runs more make five
    for _ in range(3):
        assert run(tmp_path, *files, "--write-adaptive-thresholds")[0] == 0
    lowered = json.loads(limits.read_text())
    assert lowered["attention_fp8_p99_abs"] == pytest.approx(1.05 * p99)
    assert run(tmp_path, *files, "--write-adaptive-thresholds")[0] == 0
    assert json.loads(limits.read_text()) == lowered
    # flags are for one run: they raise nothing
    kept = {"attention_fp8_p99_abs": 1.01 * p99, "attention_fp8_clip_ratio": 0.03}
    limits.write_text(json.dumps(kept))
    loose = ["--fp8-p99-threshold", "1", "--fp8-clip-threshold", "1"]
    assert run(tmp_path, *files, *loose, "--write-adaptive-thresholds")[0] == 0
    found = json.loads(limits.read_text())
    assert found["attention_fp8_p99_abs"] == kept["attention_fp8_p99_abs"]
    assert found["attention_fp8_clip_ratio"] <= 0.03
    limits.write_text(json.dumps({"attention_fp8_p99_abs": p99 / 2}))
    assert run(tmp_path, *files)[0] == 1
    assert len(json.loads(trend.read_text())) == 8


RUNS = [{"p99": 0.02, "clip": 0.001, "kl": 0.1, "group_size": 8}] * 3


def test_limits_are_written_only_where_lower(tmp_path):
    path = tmp_path / "limits.json"
    noisy = [{**RUNS[0], "p99": value} for value in (0.01, 0.02, 0.03, 0.04, 0.05)]
    low = json.dumps({"attention_fp8_p99_abs": 0.02, "attention_fp8_clip_ratio": 1e-6})
    path.write_text(low)
    assert attention_regression.write_adaptive(path, noisy) == {} and path.read_text() == low
    found = attention_regression.adaptive_limits(noisy)["attention_fp8_p99_abs"]
    assert found == pytest.approx(0.03 + 3 * 0.0158114, rel=1e-4)
    assert attention_regression.adaptive_limits(RUNS) == {}


def test_trend_keeps_a_hundred_runs(tmp_path):
    path = tmp_path / "trend.json"
    path.write_text(json.dumps([{**RUNS[0], "p99": float(i)} for i in range(100)]))
    runs = attention_regression.append_trend(path, RUNS[0])
    assert len(runs) == 100 and runs[0]["p99"] == 1.0 and runs[-1] == RUNS[0]


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ({"p99": 0.05}, "above its limit"),
        ({"p99": 0.01}, "a new low"),
        ({"clip": 0.2}, "Too many values are clipped"),
        ({"clip": 0.0}, "Almost nothing is clipped"),
        ({}, "Nothing to do"),
        ({"p99": float("nan")}, "above its limit"),
    ],
)
def test_advice(last, words):
    runs = [*RUNS, {**RUNS[0], **last}]
    assert words in attention_regression.report(runs, attention_regression.DEFAULTS)
    failed = attention_regression.failures(runs[-1], attention_regression.DEFAULTS)
    assert bool(failed) == (words.startswith(("above", "Too")))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--group-candidates", "5,7"], "--fp8"),
        (["--N", "0"], "'0': expected a whole number"),
        (["--trend", "x"], "need --fp8"),
        (["--fp8", "--markdown", "x"], "needs --trend"),
        (["--fp8", "--write-adaptive-thresholds"], "needs --trend and --thresholds"),
    ],
)
def test_bad_flags_are_named(flags, words, tmp_path, capsys):
    if "--group-candidates" in flags:
        assert run(tmp_path, "--fp8", *flags)[0] == 2
        assert "--group-candidates=5,7: expected a divisor of D=64" in capsys.readouterr().err
        return
    with pytest.raises(SystemExit) as stop:
        run(tmp_path, *flags)
    assert stop.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[1]", '{"other": 1}', '{"attention_fp8_p99_abs": "x"}'])
def test_bad_files_are_named(text, tmp_path, capsys):
    path = tmp_path / "file.json"
    path.write_text(text)
    assert run(tmp_path, "--fp8", "--thresholds", str(path))[0] == 2
    assert "file.json" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"file\.json"):
        attention_regression.append_trend(path, RUNS[0])


@pytest.mark.parametrize("value", [None, "x", float("nan"), float("inf")])
def test_a_trend_holds_finite_numbers(value, tmp_path):
    path = tmp_path / "trend.json"
    path.write_text(json.dumps([*RUNS, {**RUNS[0], "clip": value}]))
    with pytest.raises(ValueError, match=r"trend\.json: expected a list of runs with finite"):
        attention_regression.load_trend(path)


def test_a_run_without_figures_is_not_kept(tmp_path):
    path = tmp_path / "trend.json"
    bad = {**RUNS[0], "p99": float("nan")}
    attention_regression.append_trend(path, RUNS[0])
    assert attention_regression.append_trend(path, bad)[1] is not None
    assert attention_regression.load_trend(path) == RUNS[:1]


@pytest.mark.parametrize("broken", ["fp8_per_channel", "fp8_group"])
def test_a_curve_that_is_no_number_fails(broken):
    curve = {"p99_abs": 0.01, "clip_ratio": 0.0, "kl_vs_laplace_like": 0.1}
    curves = {name: dict(curve) for name in ("fp8_per_channel", "fp8_group")}
    curves[broken]["p99_abs"] = float("nan")
    run = attention_regression.figures({"curves": curves, "per_group": {"group_size": 8}})
    (failed,) = attention_regression.failures(run, attention_regression.DEFAULTS)
    assert failed.startswith("attention_fp8_p99_abs: nan")
