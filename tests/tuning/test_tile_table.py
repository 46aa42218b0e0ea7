# SPDX-License-Identifier: MIT
"""The tile table's tuner against a device that exists only as a function of the tile."""

import json
from dataclasses import replace

import pytest
import torch

from oss_fused.errors import TritonKernelError
from oss_fused.kernels import tiles
from oss_fused.tuning import tile_table
from oss_fused.tuning.cache import TuningCache
from oss_fused.tuning.device import load_description
from oss_fused.tuning.space import ConfigSpace
from oss_fused.tuning.tile_table import FAMILIES, Family, TableTuner, tune_table, write_table

CPU = torch.device("cpu")
NAMES = frozenset(family.kernel for family in FAMILIES)


class Device:
    """Prices a call, and refuses what ``price`` has no answer for."""

    def __init__(self, price, tmp_path, names=NAMES):
        self.price, self.now, self.calls = price, 0.0, []
        self.tuner = TableTuner(CPU, names, TuningCache(tmp_path / "cache.json"), self.timer)

    def launch(self, kernel, config):
        self.calls.append((kernel, config))
        milliseconds = self.price(kernel, config)
        if milliseconds is None:
            raise RuntimeError("out of resource: shared memory")
        self.now = milliseconds

    def timer(self, call, repeats, device):
        call()
        return [self.now] * repeats


def stream_is_best(kernel, config):
    if kernel != "stream":
        return 9.0
    return {64: 5.0, 128: 7.0}[config["block_n"]] + abs(config.get("block_k", 256) - 512) / 1000


def test_the_fastest_family_and_tile_become_the_entry(tmp_path):
    device = Device(stream_is_best, tmp_path)
    entry = device.tuner.entry(16, 999, 1600, device.launch)
    assert entry["kernel"] == "stream" and entry["block_m"] == 16
    assert (entry["block_n"], entry["block_k"]) == (64, 512)


def test_a_second_run_measures_no_tile_again(tmp_path):
    """Also where two families are of one kernel."""
    device = Device(lambda kernel, config: 2.0 - config.get("slices", 1) / 4, tmp_path)
    first = device.tuner.entry(16, 999, 1600, device.launch)
    assert first["slices"] == 4
    device.calls.clear()
    assert device.tuner.entry(16, 999, 1600, device.launch) == first
    # the entry and the rule's tile, once more
    assert len(device.calls) <= 4


def test_a_time_of_the_cache_is_not_compared_with_one_of_today(tmp_path):
    """The device runs at half the clock: its tiles, not its cache, say what is faster."""
    clock = 1.0

    def price(kernel, config):
        return clock * (2.0 if config == rule else 1.9)

    device = Device(price, tmp_path)
    rule = tile_table._tile_arguments(device.tuner._rule(16, 999, 1600))
    first = device.tuner.entry(16, 999, 1600, device.launch)
    assert first is not None
    clock = 0.5
    assert device.tuner.entry(16, 999, 1600, device.launch) == first
    # and a gain of 1 % is none, however slow the device was
    clock, rule = 2.0, {}
    assert device.tuner.entry(16, 999, 1600, device.launch) is None


def test_the_kernels_themselves_are_tuned(tmp_path, monkeypatch):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    space = ConfigSpace({"block_n": (64, 128), "block_k": (128,), "num_stages": (3,)})
    monkeypatch.setattr(tile_table, "FAMILIES", (Family("swap", (4, 128), space),))
    launch = tile_table.gpu_launch(16, 64, 128, device)
    calls = []

    def timer(call, repeats, where):
        calls.append(call())
        # the rule's tile, timed last, is the slowest
        return [float(len(calls))] * repeats

    cache = TuningCache(tmp_path / "cache.json")
    tuner = TableTuner(device, frozenset({"swap"}), cache, timer)
    entry = tuner.entry(16, 64, 128, launch)
    assert entry == {
        "kernel": "swap",
        "block_m": 16,
        "block_n": 64,
        "block_k": 128,
        "num_stages": 3,
    }
    assert all(torch.isfinite(out).all() and out.shape == (16, 64) for out in calls)


def test_no_family_compiles_a_tile_whose_sums_exceed_the_registers(tmp_path):
    device = Device(lambda kernel, config: 3.0, tmp_path)
    tuner = replace(device.tuner, description=load_description("h100"), exhaustive=True)
    tuner.entry(128, 4096, 4096, device.launch)
    large = [config for kernel, config in device.calls if kernel == "large"]
    sums = {config["block_m"] * config["block_n"] // config["num_warps"] for config in large}
    assert max(sums) // 32 == 128, "a thread of 255 registers holds 128 sums"


def test_nothing_where_the_rule_is_as_good(tmp_path):
    device = Device(lambda kernel, config: 3.0, tmp_path)
    assert device.tuner.entry(1024, 4096, 4096, device.launch) is None


def test_a_kernel_that_cannot_run_is_no_entry(tmp_path):
    portable = NAMES - set(tiles.GLUON_KERNELS)
    device = Device(stream_is_best, tmp_path, portable)
    assert device.tuner.entry(16, 999, 1600, device.launch) is None
    assert {kernel for kernel, _ in device.calls} == {"swap"}


def test_a_rule_that_does_not_run_is_an_error(tmp_path):
    def price(kernel, config):
        return 4.0 if config.get("num_stages") == 3 else None

    device = Device(price, tmp_path, frozenset({"swap"}))
    with pytest.raises(TritonKernelError, match="rule="):
        # the rule's tile is deeper than this device's memory
        device.tuner.entry(64, 4096, 4096, device.launch)


GIVEN = {"16x999x1600": {"kernel": "stream", "block_n": 128, "block_k": 512, "ctas": 1}}


def test_recovery_is_the_share_of_the_tuned_speed(tmp_path):
    device = Device(stream_is_best, tmp_path)
    found = device.tuner.recovery(16, 999, 1600, device.launch, GIVEN)
    assert (found.given, found.given_ms) == (GIVEN["16x999x1600"], 7.0)
    assert (found.best["block_n"], found.best_ms) == (64, 5.0)
    assert found.share == pytest.approx(5 / 7)


def test_recovery_without_a_faster_tile_is_whole(tmp_path):
    given = {"16x999x1600": {"kernel": "gemv", "rows_n": 2, "block_k": 1024, "num_warps": 2}}

    def price(kernel, config):
        return 1.0 if kernel == "gemv" else 4.0

    device = Device(price, tmp_path)
    found = device.tuner.recovery(16, 999, 1600, device.launch, given)
    assert found.share == 1.0 and found.best == found.given == given["16x999x1600"]


def test_recovery_takes_the_rule_where_the_tile_is_missing_or_does_not_run(tmp_path):
    rule = tiles.gemm_rule(16, 999, 1600, True)
    device = Device(stream_is_best, tmp_path)
    assert device.tuner.recovery(16, 999, 1600, device.launch, {}).given == rule

    def price(kernel, config):
        return None if config.get("block_n") == 128 else 3.0

    device = Device(price, tmp_path)
    assert device.tuner.recovery(16, 999, 1600, device.launch, GIVEN).given == rule
    portable = Device(stream_is_best, tmp_path, NAMES - set(tiles.GLUON_KERNELS))
    given = portable.tuner.recovery(16, 999, 1600, portable.launch, GIVEN).given
    assert given == tiles.gemm_rule(16, 999, 1600) and given["kernel"] == "swap"


def test_the_cache_answers_the_second_time(tmp_path):
    device = Device(stream_is_best, tmp_path)
    first = device.tuner.entry(32, 4096, 4096, device.launch)
    measured = len(device.calls)
    assert device.tuner.entry(32, 4096, 4096, device.launch) == first
    # the entry and the rule's own choice are timed again, nothing else
    assert len(device.calls) - measured <= 4


def test_table_is_merged_sorted_and_read_back(tmp_path, monkeypatch):
    path = tmp_path / "nvidia_test.json"
    write_table(path, "other", {"64x32": {"ctas": 2}})
    write_table(path, "fp8_gemm", {"64x10x16": {"kernel": "swap"}, "4x10x16": {"kernel": "gemv"}})
    lines = []
    device = Device(stream_is_best, tmp_path)
    entries = tune_table(
        device.tuner, [(9, 10, 16), (11, 10, 16)], lambda *_: device.launch, lines.append
    )
    assert list(entries) == ["16x10x16"] and len(lines) == 1
    write_table(path, "fp8_gemm", {**entries, "64x10x16": None})
    table = json.loads(path.read_text())
    assert list(table["fp8_gemm"]) == ["4x10x16", "16x10x16"]
    assert table["other"] == {"64x32": {"ctas": 2}}
    monkeypatch.setattr(tiles, "table_path", lambda name: path)
    assert tiles.load_table("NVIDIA Test")["fp8_gemm"]["16x10x16"]["kernel"] == "stream"
