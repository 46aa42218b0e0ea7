# SPDX-License-Identifier: MIT
"""scripts/evaluate_logits.py: its arms, and a signal."""

from __future__ import annotations

import sys

import pytest

from oss_fused.files import write_json
from tests.loading import load_script


@pytest.fixture
def script():
    return load_script("evaluate_logits")


@pytest.mark.parametrize(
    ("text", "arm"),
    [
        ("a=VLLM_PLUGINS=", "a=VLLM_PLUGINS= m"),
        ("a=X=1 --quantization oss_fp8", "a=X=1 m --quantization oss_fp8"),
        ("a=--quantization=oss_fp8 -x", "a=m --quantization=oss_fp8 -x"),
        ("a=X=1 --quantization=oss_fp8", "a=X=1 m --quantization=oss_fp8"),
    ],
)
def test_the_model_stands_between_variables_and_flags(script, text, arm):
    assert script.with_model(text, "m") == arm


def test_a_signal_ends_without_a_traceback(script, tmp_path, monkeypatch, capsys):
    def stopped(*_):
        raise script.processes.Terminated("SIGTERM")

    write_json(tmp_path / "config.json", {"vocab_size": 1000})
    monkeypatch.setattr(script, "run", stopped)
    options = ["--model", str(tmp_path), "--arm", "a=", "--output", str(tmp_path / "o.json")]
    monkeypatch.setattr(sys, "argv", ["evaluate_logits.py", *options])
    assert script.main() == 130
    assert "evaluate_logits: stopped by Terminated" in capsys.readouterr().err
