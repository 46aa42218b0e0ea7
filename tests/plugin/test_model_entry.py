# SPDX-License-Identifier: MIT
"""What vLLM's registry is told of our model classes."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from oss_fused.plugin.model_entry import ModelEntry, register_model
from oss_fused.plugin.registration import MODEL_CLASSES, register_all


@pytest.mark.parametrize("architecture", MODEL_CLASSES)
def test_a_class_supports_what_vllms_does(architecture, monkeypatch):
    """So the registry may answer for vLLM's class, without importing ours in a process."""
    from vllm import ModelRegistry
    from vllm.model_executor.models import registry
    from vllm.model_executor.models.registry import _ModelInfo

    if architecture != "LlamaForCausalLM":
        # the process takes ten seconds and tells the same: one class shows it
        monkeypatch.setattr(registry, "_run_in_subprocess", lambda inspect: inspect())
    register_all()
    entry = ModelRegistry.models[architecture]
    ours, theirs = entry.load_model_cls(), entry.theirs.load_model_cls()
    assert issubclass(ours, theirs) and ours is not theirs
    # vLLM keeps the answer in a JSON file, which knows no tuples
    told, true = entry.inspect_model_cls(), _ModelInfo.from_model_cls(ours)
    assert json.dumps(asdict(told)) == json.dumps(asdict(true))
    assert told.architecture == MODEL_CLASSES[architecture]


def test_a_class_is_registered_over_itself_and_without_vllms(monkeypatch):
    from vllm import ModelRegistry

    monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))
    register_all()
    architecture = "LlamaForCausalLM"
    theirs = ModelRegistry.models[architecture].theirs
    register_model(architecture, "my", "Model")
    assert ModelRegistry.models[architecture] == ModelEntry("my", "Model", theirs)
    register_model("NewForCausalLM", "my", "Model")
    assert ModelRegistry.models["NewForCausalLM"].class_name == "Model"
