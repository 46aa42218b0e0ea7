# SPDX-License-Identifier: MIT
"""What differs between two devices' tuned configs: the report, and the command that prints it."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.tuning_differences import differences

from oss_fused.tuning.cache import CacheEntry, CacheKey, TuningCache
from tests.loading import load_script


def entry(device, shape, config, ms, tuned_at="1"):
    key = CacheKey("gemm", shape, "bfloat16", device, "v")
    return CacheEntry(key, config, 0.0, {"latency_ms": ms}, (), tuned_at)


ENTRIES = [
    entry("H200", (4, 4, 4), {"M": 128, "warps": 8}, 1.0, "2"),
    entry("H200", (8, 8, 8), {"M": 64, "warps": 4}, 2.0),
    entry("H200", (9, 9, 9), {"M": 64, "warps": 4}, 2.0),
    entry("H100", (4, 4, 4), {"M": 64, "warps": 8}, 1.5),
    entry("H100", (8, 8, 8), {"M": 64, "warps": 4}, 2.5),
]


def test_the_report_names_what_differs():
    text = differences(ENTRIES, "H200", "H100").markdown()
    assert "2 problems in common, 1 with another config; 1 of one device only" in text
    assert "| gemm | 4x4x4:bfloat16 | M 128 -> 64 | 1 | 1.5 | 1.50 |" in text
    assert "| gemm | 8x8x8:bfloat16 | same | 2 | 2.5 | 1.25 |" in text
    # an older entry of another version gives way
    old = entry("H100", (4, 4, 4), {"M": 16, "warps": 2}, 9.0, "0")
    assert "M 128 -> 64" in differences([*ENTRIES, old], "H200", "H100").markdown()
    with pytest.raises(ValueError, match="'B200'.*H100, H200|'B200'.*H200, H100"):
        differences(ENTRIES, "H200", "B200")


def test_the_command_tunes_two_devices_and_prints_it(tmp_path, capsys):
    tune = load_script("tune")
    cache, table = str(tmp_path / "c.json"), tmp_path / "all.csv"
    for device in ("h200", "low_bw"):
        args = ["simulate", "--device", device, "--sizes", "512x512x512", "--cache", cache]
        assert tune.main([*args, "--csv", str(table)]) == 0
    assert len(table.read_text().splitlines()) > 50
    names = [entry.key.device for entry in TuningCache(Path(cache)).entries().values()]
    capsys.readouterr()
    assert tune.main(["--cache", cache, "--differences", *sorted(names)]) == 0
    assert "1 problems in common" in capsys.readouterr().out
    assert tune.main(["--cache", cache, "--differences", "H200", "nothing"]) == 2
    with pytest.raises(SystemExit):
        tune.main(["--list", "--csv", str(table)])
