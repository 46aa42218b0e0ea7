# SPDX-License-Identifier: MIT
"""The report of a calibration run, from a made-up record."""

from __future__ import annotations

import argparse
import json
import math
import re
from pathlib import Path

import pytest
from harness.calibration_report import (
    FIGURES,
    append_trend,
    failures,
    figures_of,
    load_thresholds,
    trend_file,
    write_report,
)

from oss_fused.quant.record import (
    CalibrationRecord,
    Histogram,
    LayerRecord,
    LinearRecord,
    MixRecord,
    Percentiles,
    write_record,
)
from tests.loading import load_script
from tests.tags import Tags

KINDS = ("q_proj", "k_proj", "v_proj", "o_proj")
QUALITY = {
    "task": {"window": 512, "top": 300},
    "texts": [
        {
            "text": "a/prose.txt",
            "tokens": 4000,
            "baseline": {"name": "base", "perplexity": 11.0},
            "candidates": [
                {
                    "name": "fp8",
                    "perplexity": 11.1,
                    "perplexity_factor": 1.009,
                    "kl_divergence": 0.01,
                    "kl_divergence_p99": 0.1,
                    "top1_agreement": 0.97,
                }
            ],
        }
    ],
}


def make_record(data: bool = True, layers: int = 6) -> CalibrationRecord:
    bell = tuple(int(1000 * 2.7 ** (-((i - 15) ** 2) / 20)) for i in range(31))
    linears = []
    for layer in range(layers):
        for number, kind in enumerate(KINDS):
            error = 0.01 + 0.004 * number + 0.001 * layer
            spread = Percentiles(p50=error, p90=1.3 * error, p99=2 * error)
            linears.append(
                LinearRecord(
                    name=f"model.layers.{layer}.self_attn.{kind}",
                    layer=layer,
                    scheme="BF16" if (layer, number) == (0, 0) else "FP8_DYNAMIC",
                    elements=4096,
                    bytes_before=8192,
                    bytes_after=4352,
                    weight_error=0.026,
                    output_error=error if data else None,
                    error=spread if data else None,
                    clip_ratio=0.0 if data else None,
                    kl=1e-4 * number if data else None,
                    weight_histogram=Histogram(low=-1, high=1, counts=bell),
                )
            )
    states = [
        LayerRecord(
            layer=layer,
            cumulative_error=0.01 * (layer + 1) if data else None,
            k_scale=0.01,
            kv_cache="fp8",
            expert_tokens=(90, 110, 100, 100) if data else None,
        )
        for layer in range(layers)
    ]
    mixes = (
        MixRecord(inputs_share=0, weights_share=0, factor=1.02, chosen=False),
        MixRecord(inputs_share=0.2, weights_share=0, factor=1.01, chosen=True),
    )
    return CalibrationRecord(
        model="model <with> & signs",
        format="oss-fp8",
        scheme="FP8_DYNAMIC",
        rounding="feedback",
        experts="fp8",
        samples=64 if data else 0,
        tokens=32768 if data else 0,
        source_bytes=200_000,
        output_bytes=104_000,
        linears=tuple(linears),
        layers=tuple(states),
        mixes=mixes if data else (),
    )


def test_report_of_a_run_with_data(tmp_path):
    record = make_record()
    runs = [{"figures": {"output_error_max": 0.03}}, {"figures": {"output_error_max": 0.027}}]
    page = write_report(tmp_path / "report", record, QUALITY, runs, {"output_error_max": 0.02})
    text = page.read_text()
    tags = Tags(text)
    assert tags.seen["img"] == 9 and "http" not in text and "<with>" not in text
    assert "output_error_max: 0.027 is above the threshold 0.02" in text
    markdown = (tmp_path / "report" / "report.md").read_text()
    for name in re.findall(r"!\[.*?\]\((.*?)\)", markdown):
        assert (tmp_path / "report" / name).read_bytes().startswith(b"\x89PNG")
    for expected in ("1.0090", "23 of 24 linears", "52.0%", "90 to 110", "written", "2.70%"):
        assert expected in markdown and expected in text
    worst = markdown.split("## Worst linears")[1].split("## All")[0]
    assert worst.index("layers.5.self_attn.o_proj") < worst.index("layers.4.self_attn.o_proj")


def test_report_without_data(tmp_path):
    text = write_report(tmp_path, make_record(data=False)).read_text()
    assert "no calibration data" in text and Tags(text).seen["img"] == 5
    # what was not measured has neither columns nor charts
    assert "cumulative error" not in text and "tokens per expert" not in text
    assert "Worst linears" in text


def test_the_same_record_gives_the_same_report(tmp_path):
    files = [write_report(tmp_path / name, make_record()).parent for name in "ab"]
    assert [p.read_bytes() for p in sorted(files[0].iterdir())] == [
        p.read_bytes() for p in sorted(files[1].iterdir())
    ]


def test_figures_and_thresholds():
    figures = figures_of(make_record(), QUALITY)
    assert figures["size_ratio"] == 0.52 and figures["cumulative_error"] == pytest.approx(0.06)
    assert figures["perplexity_factor_max"] == 1.009
    assert figures.keys() == set(FIGURES)
    assert failures(figures, {"cumulative_error": 0.07, "clip_ratio_max": 0.0}) == []
    assert "was not measured" in failures(figures_of(make_record(data=False)), {"kl_max": 1.0})[0]
    # a text whose perplexity is NaN, behind one that is fine
    first = QUALITY["texts"][0]
    broken = {**first, "candidates": [{**first["candidates"][0], "perplexity_factor": math.nan}]}
    figures = figures_of(make_record(), {**QUALITY, "texts": [first, broken]})
    assert "perplexity_factor_max: nan" in failures(figures, {"perplexity_factor_max": 1.01})[0]


def test_command_line(tmp_path, capsys):
    folder: Path = tmp_path / "model"
    folder.mkdir()
    main = load_script("calibration_report").main
    assert main([str(folder)]) == 2
    write_record(folder, make_record())
    trend, limits = tmp_path / "trend.json", tmp_path / "limits.json"
    limits.write_text(json.dumps({"output_error_max": 0.05}))
    arguments = [str(folder), "--trend", str(trend), "--thresholds", str(limits)]
    assert main(arguments) == 0 and main(arguments) == 0
    assert len(json.loads(trend.read_text())["runs"]) == 2
    assert (folder / "report" / "trend.png").is_file()
    limits.write_text(json.dumps({"output_error_max": 0.005}))
    assert main(arguments) == 1
    assert "is above the threshold" in capsys.readouterr().err
    capsys.readouterr()
    limits.write_text('{"output_eror_max": 0.05}')
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert f"--thresholds='{limits}': no figure 'output_eror_max'; expected some of " in said
    assert all(name in said for name in FIGURES)
    limits.write_text("[1]")
    assert main(arguments) == 2
    limits.unlink()
    capsys.readouterr()
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert f"--thresholds='{limits}': expected a JSON file of {{figure: limit}}" in said
    assert "No such file" in said and said.count(str(limits)) == 1


@pytest.mark.parametrize(
    "quality",
    [
        *([1], {}, {"texts": 5}, {"texts": [{"candidates": []}]}),
        {"texts": [{**QUALITY["texts"][0], "candidates": [{"perplexity_factor": 1.0}]}]},
        {**QUALITY, "needles": [3]},
    ],
)
def test_quality_of_another_shape_is_refused_before_the_trend_is_touched(tmp_path, capsys, quality):
    write_record(tmp_path, make_record())
    file, trend = tmp_path / "quality.json", tmp_path / "trend.json"
    file.write_text(json.dumps(quality))
    arguments = [str(tmp_path), "--quality", str(file), "--trend", str(trend)]
    assert load_script("calibration_report").main(arguments) == 2
    assert f"--quality='{file}': expected a JSON file of" in capsys.readouterr().err
    assert not trend.exists() and not (tmp_path / "report").exists()
    file.write_text(json.dumps(QUALITY))
    assert load_script("calibration_report").main(arguments) == 0


def test_calibrate_writes_one_and_survives_a_failure(tmp_path, capsys):
    calibrate = load_script("calibrate")
    write_record(tmp_path, make_record(data=False))
    calibrate.write_pages(tmp_path, tmp_path / "trend.json")
    assert (tmp_path / "report" / "report.html").is_file() and (tmp_path / "trend.json").is_file()
    (tmp_path / "calibration.json").write_text("{}")
    calibrate.write_pages(tmp_path, None)
    assert "warning: no report" in capsys.readouterr().err


def test_files_of_another_kind_are_refused(tmp_path):
    other = tmp_path / "other.json"
    run = {"figures": {"size_ratio": "half"}}
    for content in (
        {"rows": 1},
        {"runs": []},
        {"kind": "oss_fused.calibration_trend"},
        {"kind": "oss_fused.calibration_trend", "runs": [1]},
        {"kind": "oss_fused.calibration_trend", "runs": [run]},
    ):
        other.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=r"other\.json: is no trend file"):
            append_trend(other, make_record(), {})
        # said before a run begins
        with pytest.raises(argparse.ArgumentTypeError, match=r"other\.json: is no trend file"):
            trend_file(str(other))
        assert json.loads(other.read_text()) == content
    other.write_text('{"a": "b"}')
    with pytest.raises(ValueError, match=r"other\.json': expected a JSON file of \{figure"):
        load_thresholds(other)
