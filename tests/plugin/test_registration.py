# SPDX-License-Identifier: MIT
"""Registration, version and device checks, and the compile-cache key."""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import sys
from types import SimpleNamespace

import pytest

import oss_fused
from oss_fused.errors import BackendUnavailableError, SchemeError, UnsupportedDeviceError
from oss_fused.plugin import compat
from oss_fused.plugin.config import OssFp8Config
from oss_fused.plugin.registration import MODEL_CLASSES, prepare_server, register_all

AUTO = SimpleNamespace(load_format="auto")


def test_register_is_idempotent_and_known_to_vllm():
    from vllm import ModelRegistry
    from vllm.model_executor.layers.quantization import get_quantization_config

    oss_fused.register()
    register_all()
    assert get_quantization_config("oss_fp8").__name__ == "OssFp8Config"
    for architecture, name in MODEL_CLASSES.items():
        assert ModelRegistry.models[architecture].class_name == name


@pytest.fixture
def fresh(monkeypatch):
    """Registration as in a new process; vLLM's tables are put back afterwards."""
    from vllm.model_executor.layers import quantization
    from vllm.model_executor.models import config

    from oss_fused.plugin import registration

    methods = quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG
    monkeypatch.setattr(registration, "_registered", False)
    monkeypatch.setitem(methods, "oss_fp8", methods.get("oss_fp8"))
    monkeypatch.setattr(config, "MODELS_CONFIG_MAP", dict(config.MODELS_CONFIG_MAP))
    monkeypatch.setattr(registration, "_register_metrics", lambda: None)
    return registration, methods, config.MODELS_CONFIG_MAP


def not_there(*_):
    raise ImportError("no module fusion")


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("0.34.1", r"vllm==0\.34\.1: vllm\.a:gone is missing.*install vllm 0\.32\.0 or 0\.33\.0"),
        ("0.32.0", "vLLM changed"),
    ],
)
def test_another_vllm_serves_what_is_not_oss_fp8(version, reason, fresh, monkeypatch, caplog):
    registration, methods, changed = fresh
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    gone = compat.HookResult("vllm.a:gone", "missing", "is missing")
    monkeypatch.setattr(compat, "check_hooks", lambda package: [gone])
    monkeypatch.setattr(registration, "_add_to_settings", not_there)
    monkeypatch.setattr("vllm.ModelRegistry.register_model", not_there)
    before = dict(changed)
    register_all()
    register_all()
    assert changed == before
    assert len(caplog.records) == 1 and re.search(reason, caplog.text)
    refused = methods["oss_fp8"]
    assert refused.override_quantization_method({"quant_method": "fp8"}, None) is None
    with pytest.raises(BackendUnavailableError, match=reason):
        refused()
    with pytest.raises(BackendUnavailableError, match=reason):
        refused.from_config({"quant_method": "oss_fp8"})
    with pytest.raises(BackendUnavailableError, match=reason):
        refused.override_quantization_method({"quant_method": "mxfp4"}, "oss_fp8", hf_config=None)


def test_a_vllm_without_the_registry_is_left_alone(fresh, monkeypatch, caplog):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.32.0")
    monkeypatch.setitem(sys.modules, "vllm.model_executor.layers.quantization", None)
    register_all()
    assert "no place for a quantisation method" in caplog.text


def test_a_typo_is_refused_where_oss_fp8_is_used_and_only_there(fresh, monkeypatch, caplog):
    from oss_fused.plugin import build_info
    from oss_fused.plugin.config import OssFp8Config

    monkeypatch.setenv("OSS_FUSED_BACKEND", "cuda")
    monkeypatch.setattr(fresh[0], "_register_metrics", build_info.labels)
    with caplog.at_level("WARNING"):
        register_all()
    assert not caplog.text
    other = SimpleNamespace(model_config=SimpleNamespace(quantization="fp8"))
    prepare_server(other)
    assert OssFp8Config.override_quantization_method({"quant_method": "fp8"}, None) is None
    with pytest.raises(SchemeError, match="OSS_FUSED_BACKEND='cuda': expected"):
        OssFp8Config()


def served(options, quantization="oss_fp8"):
    return SimpleNamespace(
        model_config=SimpleNamespace(quantization=quantization, runner_type="generate"),
        additional_config=options,
        load_config=AUTO,
    )


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"oss_fused": {"expert_kernel": "vllm"}}, "no option 'expert_kernel'; .*expert_kernels"),
        ({"oss_fused": {"expert_kernels": "oss"}}, "expert_kernels='oss': .*'native'"),
        ({"oss_fused": {"monitor_every": "often"}}, "monitor_every='often': .*integer"),
        ({"oss_fused": {"scheme": "FP4"}}, "FP4"),
        (object(), "additional_config=object: .*expects a dict"),
    ],
)
def test_a_bad_option_is_refused_at_start_and_only_for_oss_fp8(options, match):
    prepare_server(served(options, "fp8"))
    with pytest.raises(SchemeError, match=match):
        prepare_server(served(options))


def test_a_variable_that_moved_is_named_once_with_its_option(monkeypatch, caplog):
    compat._warn_of_moved_variables.cache_clear()
    monkeypatch.setenv("OSS_FUSED_EXPERTS", "vllm")
    monkeypatch.setenv("OSS_FUSED_STEP", "vllm")
    OssFp8Config()
    OssFp8Config()
    compat._warn_of_moved_variables.cache_clear()
    (record,) = caplog.records
    text = record.getMessage()
    assert "OSS_FUSED_EXPERTS (option expert_kernels)" in text
    assert "OSS_FUSED_STEP (option short_step)" in text and "--additional-config" in text


def test_metrics_that_cannot_be_registered_stop_nothing(fresh, monkeypatch, caplog):
    def taken():
        raise OSError("no space left")

    monkeypatch.setattr(fresh[0], "_register_metrics", taken)
    register_all()
    assert "no metrics: OSError" in caplog.text


def platform(kind: str, capability: tuple[int, int]) -> SimpleNamespace:
    from vllm.platforms.interface import DeviceCapability

    return SimpleNamespace(
        is_cpu=lambda: kind == "cpu",
        is_cuda=lambda: kind == "cuda",
        device_name=kind,
        get_device_name=lambda: "NVIDIA A100",
        get_device_capability=lambda: DeviceCapability(*capability),
    )


def test_old_gpu_is_refused(monkeypatch):
    import vllm.platforms

    monkeypatch.setattr(vllm.platforms, "_current_platform", platform("cuda", (8, 0)))
    with pytest.raises(UnsupportedDeviceError, match=r"NVIDIA A100.*8\.0.*8\.9"):
        compat.check_device()
    monkeypatch.setattr(vllm.platforms, "_current_platform", platform("rocm", (9, 0)))
    with pytest.raises(UnsupportedDeviceError, match="rocm"):
        compat.check_device()


@pytest.mark.parametrize(("kind", "capability"), [("cuda", (9, 0)), ("cuda", (8, 9)), ("cpu", ())])
def test_new_gpus_and_cpus_are_accepted(kind, capability, monkeypatch):
    import vllm.platforms

    monkeypatch.setattr(vllm.platforms, "_current_platform", platform(kind, capability or (0, 0)))
    compat.check_device()


@pytest.mark.parametrize(
    ("checkpoint", "user", "expected"),
    [
        ({"quant_method": "oss_fp8"}, None, None),
        ({"quant_method": "mxfp4"}, None, None),
        ({"quant_method": "mxfp4"}, "oss_fp8", "oss_fp8"),
        ({}, "oss_fp8", "oss_fp8"),
        ({"quant_method": ""}, "oss_fp8", "oss_fp8"),
        ({"quant_method": "gptq"}, "gptq", None),
    ],
)
def test_takes_a_checkpoint_over_only_when_asked(checkpoint, user, expected):
    from oss_fused.plugin.config import OssFp8Config

    assert OssFp8Config.override_quantization_method(checkpoint, user) == expected


def test_refuses_other_quantised_checkpoints():
    from oss_fused.plugin.config import OssFp8Config

    with pytest.raises(SchemeError, match="gptq"):
        OssFp8Config.override_quantization_method({"quant_method": "gptq"}, "oss_fp8")


@pytest.mark.parametrize("value", ["1", "0", None])
def test_batch_invariance_is_refused(value, monkeypatch):
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    if value is not None:
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
    refused = pytest.raises(SchemeError, match="VLLM_BATCH_INVARIANT='1': .*attention splits")
    with refused if value == "1" else contextlib.nullcontext():
        OssFp8Config()


def test_batch_invariance_of_other_quantisations_is_vllms(monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    for asked in (None, "fp8", "mxfp4"):
        assert OssFp8Config.override_quantization_method({}, asked) is None
