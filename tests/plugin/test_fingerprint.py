# SPDX-License-Identifier: MIT
"""vLLM's compile-cache key: which sources, options and variables it follows."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

import oss_fused
from oss_fused.errors import SchemeError
from oss_fused.plugin import fingerprint
from oss_fused.plugin.fingerprint import hash_sources, served_files
from oss_fused.quant.settings import ServingOptions
from tests.test_architecture import MODULES, imported_modules

PACKAGE = Path(oss_fused.__file__).parent
# imported by what serves, but no graph depends on them
NO_MATTER = ("errors.py", "files.py", "environment.py", "__init__.py", "quant/checkpoint/")


@pytest.fixture
def package(tmp_path) -> Path:
    copy = tmp_path / "oss_fused"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("kernels/attention/triton.py", True),
        ("kernels/tiles/nvidia_h200.json", True),
        ("layers/vllm/linear.py", True),
        ("plugin/models.py", True),
        ("quant/settings.py", True),
        ("bench/runner.py", False),
        ("tuning/tuner.py", False),
        ("tuning/devices/h200.json", False),
        ("layers/hf/__init__.py", False),
        ("quant/calibrator.py", False),
        ("plugin/doctor.py", False),
        ("plugin/monitor/watch.py", False),
    ],
)
def test_only_what_serves_changes_the_key(name, changes, package):
    before = hash_sources(package)
    with (package / name).open("a") as file:
        file.write("\n")
    assert (hash_sources(package) != before) is changes


def test_whatever_the_served_sources_import_is_in_the_key():
    served = set(served_files(PACKAGE))
    # with its mark: the checks at start import what checks
    parts = {path for path in served if path.suffix == ".py"}
    imported = {MODULES[m] for path in parts for m in imported_modules(path) if m in MODULES}
    missing = {str(path.relative_to(PACKAGE)) for path in imported - served}
    beside = {f"plugin/{name}" for name in fingerprint._BESIDE}
    assert {
        name
        for name in missing
        if not name.startswith((*NO_MATTER, *beside)) and not name.endswith("/__init__.py")
    } == set()
    assert len(parts) > 50


def key(**options) -> str:
    from vllm.config import VllmConfig

    config = VllmConfig(additional_config={"oss_fused": options})
    fingerprint.record(config)
    assert config.additional_config["oss_fused"] == options
    return config.compute_hash()


def test_the_key_follows_version_variables_and_options(monkeypatch):
    before = key(lm_head=True)
    assert before == key(lm_head=True)
    changed = [key(lm_head=False), key(lm_head=True, fused_layers=False)]
    changed.append(key(lm_head=True, linear_activations="fp8"))
    monkeypatch.setenv("OSS_FUSED_BACKEND", "torch")
    changed.append(key(lm_head=True))
    monkeypatch.delenv("OSS_FUSED_BACKEND")
    monkeypatch.setattr(oss_fused, "__version__", "0.0.0")
    changed.append(key(lm_head=True))
    assert len({before, *changed}) == 6


def test_a_draft_model_leaves_the_fingerprint_of_the_served_one(tmp_path):
    """Both write to one dict; the policy is the served model's."""
    policy = tmp_path / "policy.json"
    policy.write_text('{"kind": "oss_fused.monitor_policy", "layers": {"a": "why"}}')
    shared = {"oss_fused": {"monitor_policy": str(policy)}}
    for kind in ("generate", "draft"):
        model = SimpleNamespace(runner_type=kind)
        fingerprint.record(SimpleNamespace(additional_config=shared, model_config=model))
        assert '"a"' in shared[fingerprint.KEY]
    assert shared[fingerprint.KEY] != fingerprint.fingerprint(ServingOptions())


def test_additional_config_must_be_a_dict():
    with pytest.raises(SchemeError, match="expects a dict"):
        fingerprint.record(SimpleNamespace(additional_config=object()))
