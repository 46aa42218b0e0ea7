# SPDX-License-Identifier: MIT
"""Registration, version and device checks, and the compile-cache key."""

from __future__ import annotations

import contextlib
import importlib.metadata
from types import SimpleNamespace

import pytest

import oss_fused
from oss_fused.errors import BackendUnavailableError, SchemeError, UnsupportedDeviceError
from oss_fused.plugin import compat, fingerprint
from oss_fused.plugin.config import OssFp8Config
from oss_fused.plugin.registration import MODEL_CLASSES, register_all, shorten_steps


def test_register_is_idempotent_and_known_to_vllm():
    from vllm import ModelRegistry
    from vllm.model_executor.layers.quantization import get_quantization_config

    oss_fused.register()
    register_all()
    assert get_quantization_config("oss_fp8").__name__ == "OssFp8Config"
    for architecture, name in MODEL_CLASSES.items():
        assert ModelRegistry.models[architecture].class_name == name


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "1.0.0"])
def test_other_vllm_releases_are_refused(version, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(BackendUnavailableError, match=f"vllm=={version}.*0.32"):
        compat.check_vllm()


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cu129", "0.32.0+cpu"])
def test_this_vllm_release_is_accepted(version, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    compat.check_vllm()


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


def test_fingerprint_follows_the_environment(monkeypatch):
    before = fingerprint.fingerprint()
    assert before == fingerprint.fingerprint()
    monkeypatch.setenv("OSS_FUSED_MODELS", "0")
    assert fingerprint.fingerprint() != before


def test_fingerprint_is_part_of_vllms_compile_key(monkeypatch):
    from vllm.config import VllmConfig

    def key() -> str:
        config = VllmConfig(additional_config={"oss_fused": {"lm_head": True}})
        fingerprint.record(config)
        assert config.additional_config["oss_fused"] == {"lm_head": True}
        return config.compute_hash()

    before = key()
    assert before == key()
    monkeypatch.setattr(oss_fused, "__version__", "0.0.0")
    assert key() != before


def test_additional_config_must_be_a_dict():
    with pytest.raises(SchemeError, match="expects a dict"):
        fingerprint.record(SimpleNamespace(additional_config=object()))


@pytest.mark.parametrize(
    ("checkpoint", "user", "expected"),
    [
        ({"quant_method": "oss_fp8"}, None, None),
        ({"quant_method": "mxfp4"}, None, None),
        ({"quant_method": "mxfp4"}, "oss_fp8", "oss_fp8"),
        ({}, "oss_fp8", "oss_fp8"),
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


@pytest.mark.parametrize(
    ("changes", "graphs", "largest"),
    [
        ({}, {}, 1024),
        ({"max_num_batched_tokens": 300}, {}, 300),
        ({}, {"max_cudagraph_capture_size": 64}, 64),
        ({}, {"cudagraph_capture_sizes": [1, 2]}, None),
        ({"speculative_config": object()}, {}, None),
        ({"quantization": "fp8"}, {}, None),
    ],
    ids=["default", "small steps", "the user's", "the user's sizes", "drafts", "not ours"],
)
def test_graphs_of_larger_steps(changes, graphs, largest):
    sizes = {"cudagraph_capture_sizes": None, "max_cudagraph_capture_size": None} | graphs
    config = SimpleNamespace(
        model_config=SimpleNamespace(quantization=changes.get("quantization", "oss_fp8")),
        scheduler_config=SimpleNamespace(
            scheduler_cls=None, max_num_batched_tokens=changes.get("max_num_batched_tokens", 8192)
        ),
        compilation_config=SimpleNamespace(**sizes),
        speculative_config=changes.get("speculative_config"),
    )
    shorten_steps(config)
    assert config.compilation_config.max_cudagraph_capture_size == largest


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
