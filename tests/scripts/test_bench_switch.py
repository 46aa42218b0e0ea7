# SPDX-License-Identifier: MIT
"""scripts/bench_switch.py without engines: what it writes, and when it fails."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

PATH = Path(__file__).resolve().parents[2] / "scripts" / "bench_switch.py"


@pytest.mark.parametrize(
    ("switched", "restarted", "status"),
    [(8, [4, 5], 0), (8, [4, 6], 1), (0, [4, 5], 1)],
)
def test_tokens_must_be_those_of_a_restart(switched, restarted, status, tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("bench_switch", PATH)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    tokens = {"before": [1, 2], "switched": [4, 5]}
    answers = {
        "make": tmp_path,
        "before_and_after": {"switched_layers": switched, "ms_after": 1.0, "tokens": tokens},
        "restarted": {"ms_restarted": 2.0, "tokens": restarted},
    }
    pool = contextlib.nullcontext(
        SimpleNamespace(
            submit=lambda function, *args: SimpleNamespace(
                result=lambda: answers[function.__name__]
            )
        )
    )
    monkeypatch.setattr(script, "processes", lambda count: pool)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    assert script.main(["--output", str(tmp_path / "switch.json")]) == status
    results = json.loads((tmp_path / "switch.json").read_text())
    assert results["same_tokens_as_restart"] == (restarted == [4, 5])
    assert results["ms_after"] == 1.0 and results["ms_restarted"] == 2.0
    assert "tokens" not in results and not results["same_tokens_as_before"]
