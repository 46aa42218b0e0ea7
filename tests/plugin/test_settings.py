# SPDX-License-Identifier: MIT
"""What quantization_config and the options of the command line may say."""

from __future__ import annotations

import pytest

from oss_fused.errors import SchemeError
from oss_fused.quant.scheme import FP8_DYNAMIC, FP8_STATIC, W8A16
from oss_fused.quant.settings import OnlineOptions, from_checkpoint, online, with_options
from tests.plugin.conftest import KV_SCHEME, scheme

CALIBRATED = {
    "quant_method": "oss_fp8",
    "version": 1,
    "config_groups": {"group_0": scheme(), "group_1": scheme("tensor") | {"targets": ["lm_head"]}},
    "ignore": ["model.layers.0.mlp.down_proj"],
    "kv_cache_scheme": KV_SCHEME,
    "experts": "fp8",
}


def test_calibrated_checkpoint():
    parsed = from_checkpoint(CALIBRATED)
    assert parsed.calibrated
    assert parsed.groups == {"group_0": FP8_DYNAMIC, "group_1": FP8_STATIC}
    assert parsed.targets["group_1"] == ("lm_head",)
    assert parsed.ignore == ("model.layers.0.mlp.down_proj",)
    assert parsed.experts == "fp8"
    assert parsed.kv_cache_scheme["strategy"] == "tensor"


def test_weight_only_checkpoint():
    parsed = from_checkpoint(CALIBRATED | {"config_groups": {"g": scheme(None)}})
    assert parsed.groups == {"g": W8A16}


@pytest.mark.parametrize("method", ["mxfp4", "gpt_oss_mxfp4"])
def test_mxfp4_checkpoint_is_quantised_online(method):
    parsed = from_checkpoint(
        {"quant_method": method, "modules_to_not_convert": ["model.layers.*.self_attn"]}
    )
    assert not parsed.calibrated
    assert parsed.experts == "mxfp4"
    assert parsed.ignore == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "gptq"}, "quant_method='gptq'"),
        ({"version": 2}, "version=2"),
        ({"experts": "int4"}, "experts='int4'"),
        ({"kv_cache_scheme": KV_SCHEME | {"num_bits": 4}}, "num_bits=4"),
        ({"kv_cache_scheme": KV_SCHEME | {"strategy": "channel"}}, "strategy='channel'"),
        (
            {"config_groups": {"g": {**scheme(), "weights": {"strategy": "block"}}}},
            "strategy='block'",
        ),
    ],
)
def test_values_that_are_not_understood(changes, message):
    with pytest.raises(SchemeError, match=message):
        from_checkpoint(CALIBRATED | changes)


def test_options():
    parsed = with_options(online(OnlineOptions()), {"scheme": "w8a16", "ignore": ["*.o_proj"]})
    assert parsed.groups == {"online": W8A16}
    assert parsed.ignore == ("*.o_proj",)


def test_options_from_hf_overrides():
    parsed = from_checkpoint({"quant_method": "oss_fp8", "ignore": ["lm_head"], "lm_head": True})
    assert parsed.lm_head
    assert not parsed.calibrated


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"shceme": "FP8_DYNAMIC"}, "shceme"),
        ({"scheme": "FP8_STATIC"}, "calibrate"),
        ({"scheme": "FP4"}, "FP4"),
        ("FP8_DYNAMIC", "FP8_DYNAMIC"),
    ],
)
def test_bad_options(raw, message):
    with pytest.raises(SchemeError, match=message):
        with_options(online(OnlineOptions()), raw)


def test_experts_option():
    assert with_options(online(OnlineOptions()), {"experts": "fp8"}).quantize_experts
    with pytest.raises(SchemeError, match="experts are mxfp4"):
        with_options(from_checkpoint({"quant_method": "mxfp4"}), {"experts": "fp8"})


def test_options_of_a_calibrated_checkpoint_are_refused():
    with pytest.raises(SchemeError, match="fixes its own"):
        with_options(from_checkpoint(CALIBRATED), {"lm_head": True})
