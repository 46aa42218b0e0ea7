# SPDX-License-Identifier: MIT
"""Config spaces, device descriptions and pruning rules."""

from __future__ import annotations

import json

import pytest

from oss_fused.errors import UnsupportedDeviceError
from oss_fused.tuning.device import (
    FOLDER,
    DeviceDescription,
    available_descriptions,
    load_description,
    match_description,
)
from oss_fused.tuning.prune import estimate_resources, reason_to_skip
from oss_fused.tuning.space import (
    FP8_GEMM_CONFIGS,
    GATED_MLP_CONFIGS,
    RMSNORM_ROPE_CONFIGS,
    ConfigSpace,
)


@pytest.mark.parametrize("space", [RMSNORM_ROPE_CONFIGS, GATED_MLP_CONFIGS, FP8_GEMM_CONFIGS])
def test_named_spaces_hold_what_is_required(space):
    blocks = [values for name, values in space.parameters.items() if name.startswith("BLOCK")]
    assert any({16, 32, 64, 128} <= set(values) for values in blocks)
    assert {2, 4, 8} <= set(space.parameters["num_warps"])
    assert {1, 2, 3, 4} <= set(space.parameters["num_stages"])


def test_iteration_length_and_membership_agree():
    space = ConfigSpace({"A": (1, 2, 4), "B": (8, 9)})
    configs = list(space)
    assert len(configs) == len(space) == 6
    assert all(config in space for config in configs)
    assert {"A": 3, "B": 8} not in space and {"A": 1} not in space


def test_coarse_grid_is_spread_and_inside():
    space = ConfigSpace({"A": (1, 2, 3, 4), "B": (7,)})
    assert dict(space.coarse(2).parameters) == {"A": (2, 4), "B": (7,)}
    assert len(space.coarse(9)) == len(space)


def test_neighbours_are_one_step_away():
    space = ConfigSpace({"A": (1, 2, 4), "B": (8, 9)})
    found = space.neighbours({"A": 2, "B": 8})
    assert sorted((c["A"], c["B"]) for c in found) == [(1, 8), (2, 9), (4, 8)]
    wider = space.neighbours({"A": 2, "B": 8}, reach=2)
    assert sorted((c["A"], c["B"]) for c in wider) == [(1, 8), (1, 9), (2, 9), (4, 8), (4, 9)]


def test_all_promised_devices_are_described():
    assert set(available_descriptions()) == {"a100", "b200", "h100", "h200", "low_bw", "rtx4090"}


def test_gpu_is_matched_by_name_then_by_age():
    assert match_description("NVIDIA H200", (9, 0)).name == "NVIDIA H200"
    assert match_description("NVIDIA A100-SXM4-40GB", (8, 0)).num_sms == 108
    assert match_description("NVIDIA L40S", (8, 9)).name.endswith("RTX 4090")
    with pytest.raises(UnsupportedDeviceError, match="Tesla V100"):
        match_description("Tesla V100", (7, 0))


def test_bad_description_files_are_named(tmp_path):
    raw = json.loads((FOLDER / "h200.json").read_text())
    bad = tmp_path / "bad.json"
    for change, words in (
        ({"num_sms": 0}, "num_sms=0"),
        ({"surprise": 1}, "surprise"),
    ):
        bad.write_text(json.dumps({**raw, **change}))
        with pytest.raises(ValueError, match=words):
            DeviceDescription.from_json(bad)
    bad.write_text("{")
    with pytest.raises(ValueError, match=r"bad\.json"):
        load_description(str(bad))
    with pytest.raises(ValueError, match="expected one of a100"):
        load_description("h300")


def test_pruning_by_shared_memory_registers_and_size():
    h200, low = load_description("h200"), load_description("low_bw")
    tile = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}
    assert estimate_resources(tile, 2).shared_memory_bytes == 3 * 256 * 64 * 2
    assert reason_to_skip(tile, h200, (4096, 4096, 4096)) is None
    assert "shared memory" in reason_to_skip(tile, low, (4096, 4096, 4096))
    assert "registers" in reason_to_skip({**tile, "num_warps": 2}, h200)
    assert "BLOCK_M=128" in reason_to_skip(tile, h200, (8, 4096, 4096))
    assert reason_to_skip({**tile, "BLOCK_M": 16}, h200, (1, 4096, 4096)) is None
    two = reason_to_skip({**tile, "num_warps": 4, "num_stages": 2}, h200, accumulators=2)
    assert "registers" in two
    small = {name.lower(): value for name, value in tile.items()}
    assert estimate_resources(small, 2) == estimate_resources(tile, 2)
    assert "registers" in reason_to_skip({**small, "num_warps": 2}, h200)
    assert "BLOCK_M=128" in reason_to_skip(small, h200, (8, 4096, 4096))
