# SPDX-License-Identifier: MIT
"""What another device's tiles are worth on this one: figures, report and command."""

from __future__ import annotations

import json

import pytest
import torch
from harness import tuning_recovery

from oss_fused.kernels import tiles
from oss_fused.tuning import tile_table
from oss_fused.tuning.cache import TuningCache
from oss_fused.tuning.tile_table import FAMILIES, Recovery, TableTuner
from tests.loading import load_script

H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"
SLOW, FAST = {"kernel": "swap", "num_stages": 3}, {"kernel": "stream", "ctas": 2}
FOUND = [Recovery("1x8x16", SLOW, 0.002, SLOW, 0.002), Recovery("4x8x16", SLOW, 0.004, FAST, 0.001)]


@pytest.fixture(scope="module")
def tune():
    return load_script("tune")


def test_the_figure_is_the_worst_shape():
    name = "tuning.h100_from_h200_recovery"
    assert tuning_recovery.figures(FOUND, H200, H100) == {name: 0.25, f"{name}_geomean": 0.5}
    assert tuning_recovery.short_name("GeForce RTX (tm)") == "geforce_rtx_tm_"


def test_the_report_puts_the_worst_first():
    text = tuning_recovery.make_report(FOUND, H200, H100).markdown()
    assert f"# Tiles of {H200} on {H100}" in text
    assert "25.0% at worst, 50.0% in the geometric mean of 2 shapes" in text
    lines = [line for line in text.splitlines() if "x8x16" in line]
    assert lines == [
        "| 4x8x16 | 25.0% | 4.00 | 1.00 | swap num_stages=3 | stream ctas=2 |",
        "| 1x8x16 | 100.0% | 2.00 | 2.00 | swap num_stages=3 | as given |",
    ]


def test_the_command_measures_every_size(tune, tmp_path, monkeypatch, capsys):
    """On a device that exists as prices: a tile of the H200's table takes 2 ms, others 1 ms."""
    table = tiles.load_table(H200)["fp8_gemm"]
    key = next(key for key in table if not key.startswith("8192"))
    given = {name: value for name, value in table[key].items() if name != "kernel"}
    now = 0.0

    def launch(kernel, config):
        nonlocal now
        now = 2.0 if (kernel, config) == (table[key]["kernel"], given) else 1.0

    def timer(call, repeats, device):
        call()
        return [now] * repeats

    def tuner(device, cache, *options):
        names = frozenset(family.kernel for family in FAMILIES)
        return TableTuner(torch.device("cpu"), names, cache, timer)

    monkeypatch.setattr(tile_table, "gpu_tuner", tuner)
    monkeypatch.setattr(tile_table, "gpu_launch", lambda bucket, n, k, device: launch)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: H100)
    output, summary = tmp_path / "r.json", tmp_path / "summary.json"
    monkeypatch.setattr(tune, "gpu", lambda args: torch.device("cpu"))
    flags = ["--from", H200, "--device", "cuda"]
    flags += ["--cache", str(tmp_path / "c.json"), "--output", str(output)]
    assert tune.main(["recovery", "--sizes", key, *flags, "--summary", str(summary)]) == 0
    assert "50.0% at worst" in capsys.readouterr().out
    (row,) = json.loads(output.read_text())["results"]
    assert (row["key"], row["share"], row["given"]) == (key, 0.5, table[key])
    assert json.loads(summary.read_text())["tuning.h100_from_h200_recovery"] == 0.5
    more = ["--sizes", key, "1x64x64", "--seconds", "1e-9"]
    assert tune.main(["recovery", *more, *flags]) == 0
    assert [row["key"] for row in json.loads(output.read_text())["results"]] == [key]
    assert "time is up: 1 sizes left" in capsys.readouterr().err


def test_the_table_is_written_after_every_size(tune, tmp_path, monkeypatch):
    calls = []

    def entries(tuner, sizes, launch, report):
        calls.append(sizes)
        return {"x".join(map(str, *sizes)): {"kernel": "tile"}}

    monkeypatch.setattr(tune, "table_tuner", lambda *arguments: ("cpu", None))
    monkeypatch.setattr(tile_table, "tune_table", entries)
    monkeypatch.setattr(tile_table, "write_table", lambda *found: calls.append(found[2].keys()))
    cache = ["--cache", str(tmp_path / "c.json"), "--table", str(tmp_path / "t.json")]
    assert tune.main(["tiles", *cache, "--sizes", "1x64x64", "2x64x64"]) == 0
    assert calls == [[(1, 64, 64)], {"1x64x64"}, [(2, 64, 64)], {"2x64x64"}]


def test_bad_input_of_the_command(tune, tmp_path, capsys):
    cache = ["--cache", str(TuningCache(tmp_path / "c.json").path), "--sizes", "1x64x64"]
    assert tune.main(["recovery", "--from", "NVIDIA T4", *cache]) == 2
    assert "--from 'NVIDIA T4': no tile table nvidia_t4.json" in capsys.readouterr().err
    wrong = (["recovery"], ["tiles", "--from", H200], ["tiles", "--summary", "s.json"])
    wrong += (
        ["tiles", "--memory", "0.5"],
        ["simulate", "--exhaustive"],
        ["tiles", "--workers", "-1"],
    )
    for flags in (*wrong, ["matmul", "--seconds", "9"], ["matmul", "--table", "t.json"]):
        with pytest.raises(SystemExit):
            tune.main([*flags, *cache])
    assert tune.main(["recovery", "--from", H200, *cache[:2], "--sizes", "1x64"]) == 2
    assert "--sizes 1x64: recovery expects MxNxK" in capsys.readouterr().err
