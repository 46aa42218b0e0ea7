# SPDX-License-Identifier: MIT
"""What quantization_config and the options of the command line may say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from oss_fused import envs
from oss_fused.errors import SchemeError
from oss_fused.quant.scheme import FP8_DYNAMIC, FP8_STATIC, W8A16
from oss_fused.quant.settings import (
    OnlineOptions,
    ServingOptions,
    from_checkpoint,
    online,
    with_options,
)
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
        ({"kv_cache_scheme": "fp8"}, "kv_cache_scheme='fp8': "),
        ({"kv_cache_scheme": {"x": 1}}, "kv_cache_scheme.strategy={'x': 1}: Field required"),
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


def test_options_of_both_places():
    """Option by option; one that both name is that of --additional-config."""
    stored = {"quant_method": "oss_fp8", "scheme": "W8A16", "ignore": ["*.o_proj"]}
    parsed = with_options(from_checkpoint(stored), {"lm_head": True, "ignore": ["*.q_proj"]})
    assert parsed.groups == {"online": W8A16} and parsed.lm_head
    assert parsed.ignore == ("*.q_proj",)
    again = with_options(parsed, {"scheme": "FP8_DYNAMIC"})
    assert again.groups != {"online": W8A16} and again.lm_head and again.ignore == parsed.ignore


@pytest.mark.parametrize(
    ("key", "expected"),
    [("oss-fused", "oss_fused"), ("OSS_FUSED", "oss_fused"), ("burst", "oss_fused.burst")],
)
def test_keys_beside_ours_are_named(key, expected, monkeypatch):
    from oss_fused.plugin import options

    said = []
    monkeypatch.setattr(options.logger, "warning_once", lambda text, *values: said.append(values))
    config = {"oss_fused": {"burst": 1}, "another_plugin": {}, key: 4}
    assert options.raw_options(SimpleNamespace(additional_config=config)) == {"burst": 1}
    assert said == [(key, expected)]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"shceme": "FP8_DYNAMIC"}, "shceme"),
        ({"scheme": "FP8_STATIC"}, "calibrate"),
        ({"scheme": "FP4"}, "FP4"),
        ({"lm_head": "yes"}, "lm_head='yes': .*boolean"),
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


def test_options_that_a_calibrated_checkpoint_fixes_are_refused():
    with pytest.raises(SchemeError, match="fixes its own.*expected none of lm_head"):
        with_options(from_checkpoint(CALIBRATED), {"lm_head": True, "short_step": False})


def test_options_of_serving_hold_for_every_checkpoint():
    raw = {"expert_kernels": "vllm", "monitor_every": 7}
    for checkpoint in (CALIBRATED, {"quant_method": "mxfp4"}, {"quant_method": "oss_fp8"}):
        settings = from_checkpoint(checkpoint)
        assert settings.serving == ServingOptions()
        parsed = with_options(settings, raw)
        assert parsed.serving == ServingOptions(expert_kernels="vllm", monitor_every=7)
        assert parsed.model_copy(update={"serving": ServingOptions()}) == settings
    both = with_options(online(OnlineOptions()), {"lm_head": True, "fused_layers": False})
    assert both.lm_head and not both.serving.fused_layers


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"expert_kernel": "vllm"}, "no option 'expert_kernel'; expected some of .*expert_kernels"),
        ({"expert_kernels": "oss"}, "expert_kernels='oss': .*'auto', 'native' or 'vllm'"),
        ({"linear_activations": "auto"}, "linear_activations='auto': .*'bf16' or 'fp8'"),
        ({"linear_activations": None}, "linear_activations=None: .*'bf16' or 'fp8'"),
        ({"short_step": "no"}, "short_step='no': .*boolean"),
        *(
            ({"burst": value}, f"burst={re.escape(repr(value))}: .*'auto' or .* from 1 to 16")
            for value in (0, 17, "8", 2.0, True, None)
        ),
        ({"burst": 2, "short_step": False}, r"\]: Value error, burst=2 with short_step=False"),
        ({"monitor_every": -1}, "monitor_every=-1: .*greater than or equal to 0"),
        ({"monitor_every": True}, "monitor_every=True: .*integer"),
        ({"monitor_policy": 3}, "monitor_policy=3: .*string"),
        ({"monitor_policy": ""}, "monitor_policy='': .*at least 1 character"),
        ({"monitor_fallback": "soon"}, "monitor_fallback='soon': .*'restart' or 'now'"),
        (
            {"monitor_fallback": "now", "monitor_every": 9},
            "with monitor_every=9 and monitor_policy=None: expected a number of steps and a file",
        ),
    ],
)
def test_bad_options_of_serving(raw, message):
    with pytest.raises(SchemeError, match=message):
        with_options(from_checkpoint(CALIBRATED), raw)


@pytest.mark.parametrize("burst", ["auto", 1, 16])
def test_length_of_a_burst(burst):
    assert with_options(from_checkpoint(CALIBRATED), {"burst": burst}).serving.burst == burst


@pytest.mark.parametrize(("raw", "levels"), [({}, True), ("bf16", True), ("fp8", False)])
def test_activations_of_linear_layers(raw, levels):
    from oss_fused.plugin.config import OssFp8Config

    options = {"linear_activations": raw} if raw else {}
    for checkpoint in (CALIBRATED, {"quant_method": "mxfp4"}, {"quant_method": "oss_fp8"}):
        config = OssFp8Config(with_options(from_checkpoint(checkpoint), options))
        assert config._linear_method(FP8_DYNAMIC, "layer").bf16_if_few is levels


def test_serving_options_come_from_the_command_line_only():
    with pytest.raises(SchemeError, match="short_step"):
        from_checkpoint({"quant_method": "oss_fp8", "short_step": False})


def test_every_option_is_documented_and_no_name_is_used_twice():
    page = (Path(__file__).parents[2] / "docs/serving.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", page, re.MULTILINE))
    fields = {**OnlineOptions.model_fields, **ServingOptions.model_fields}
    assert len(fields) == len(OnlineOptions.model_fields) + len(ServingOptions.model_fields)
    assert fields.keys() <= rows.keys()
    for name, field in ServingOptions.model_fields.items():
        text = json.dumps(field.default).strip('"').replace("null", "none")
        assert rows[name].replace("`", "").split(", ")[0] == text
    assert set(envs.VARIABLES) <= rows.keys() and len(envs.VARIABLES) <= 4
    assert set(envs.MOVED.values()) <= set(ServingOptions.model_fields)


def test_vllm_takes_each_option_as_a_flag():
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    parser.add_argument("--additional-config", type=json.loads)
    flags = ["expert_kernels=vllm", "monitor_every=20", "short_step=false"]
    args = parser.parse_args([f"--additional-config.oss_fused.{flag}" for flag in flags])
    parsed = with_options(from_checkpoint(CALIBRATED), args.additional_config["oss_fused"])
    assert parsed.serving == ServingOptions(
        expert_kernels="vllm", monitor_every=20, short_step=False
    )


@pytest.mark.parametrize("v2", [True, False])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["layers", "blocks", "mlps", "attention", "sums", "rope", "state"]),
        ({"fused_layers": False}, ["attention", "sums", "state"]),
        ({"attention_kernels": "vllm"}, ["layers", "blocks", "mlps", "sums", "rope", "state"]),
        (
            {"all_reduce_kernels": "vllm"},
            ["layers", "blocks", "mlps", "attention", "rope", "state"],
        ),
        ({"short_step": False}, ["layers", "blocks", "mlps", "attention", "sums", "rope"]),
    ],
)
def test_a_model_is_changed_as_the_options_say(options, expected, v2, monkeypatch):
    from oss_fused.plugin import model_state, models

    done = []
    names = {
        "fuse_decoder_layers": "layers",
        "join_blocks": "blocks",
        "join_mlps": "mlps",
        "adopt_attention": "attention",
        "adopt_all_reduce": "sums",
        "fuse_rope": "rope",
    }
    for name, short in names.items():
        monkeypatch.setattr(models, name, lambda *_, short=short: done.append(short))
    monkeypatch.setattr(model_state, "brings_state", lambda model: done.append("state"))
    settings = with_options(from_checkpoint(CALIBRATED), options)
    model = SimpleNamespace(model=SimpleNamespace(layers=[]), is_outermost=True)
    quant_config = SimpleNamespace(settings=settings)
    config = SimpleNamespace(
        quant_config=quant_config,
        use_v2_model_runner=v2,
        additional_config={"oss_fused": options},
    )
    models._OssModel._adopt(model, config)
    assert done == [name for name in expected if v2 or name != "state"]
    assert model.options == settings.serving
    # a draft model has default options, and shares the served model's communicator
    config.additional_config = {"oss_fused": {"all_reduce_kernels": "vllm"}}
    done.clear()
    # a part of another model is not told when to warm up what joined layers run
    model.is_outermost = False
    models._OssModel._adopt(model, config)
    assert not {"sums", "mlps"} & {*done}
