# SPDX-License-Identifier: MIT
"""What a result says of where it was measured."""

from __future__ import annotations

import subprocess
from pathlib import Path

from oss_fused import environment

ROOT = Path(__file__).resolve().parents[2]


def git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def test_a_result_names_the_commit_of_the_checkout(monkeypatch) -> None:
    monkeypatch.delenv("OSS_FUSED_COMMIT", raising=False)
    found = environment.commit()
    # a source archive has no history
    head = git("rev-parse", "HEAD")
    assert (found or "").removesuffix("-dirty") == head
    monkeypatch.setenv("OSS_FUSED_COMMIT", "abc")
    assert environment.commit() == "abc"
    monkeypatch.setenv("OSS_FUSED_COMMIT", "")
    monkeypatch.setattr(environment, "_output", lambda *command: None)
    assert environment.commit() is None


def test_paths_of_a_machine_stay_on_it() -> None:
    assert environment.portable(["/a/b/model", {"x": "--m=/c/d"}]) == ["model", {"x": "--m=d"}]


def test_secrets_stay_out_of_result_files(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    monkeypatch.setenv("VLLM_MAX_TOKENS", "8")
    found = environment.fingerprint()["environment"]
    assert found["VLLM_API_KEY"] == "set, not shown" and found["VLLM_MAX_TOKENS"] == "8"
