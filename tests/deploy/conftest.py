# SPDX-License-Identifier: MIT
"""The files of the image, its entry point, and a server that it starts."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness.arms import CPU_ENVIRONMENT
from harness.server import Server

from tests.plugin.conftest import build, calibrate

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/kubernetes/oss-fused"
API_KEY = "sk-test-4f1c9d7e"


@dataclass(frozen=True)
class Served:
    """The running server, and the environment and folder that it was started with."""

    server: Server
    environment: dict[str, str]
    image: Path

    def ask(self, body: dict, key: str | None = API_KEY) -> Any:
        """The open answer to a request for completions."""
        headers = {"Content-Type": "application/json"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        url = f"{self.server.url}/v1/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        return urllib.request.urlopen(request, timeout=60)

    def complete(self, key: str | None = API_KEY) -> dict:
        """A greedy completion of four tokens."""
        body = {"model": "tiny", "prompt": [3, 17, 42], "max_tokens": 4, "temperature": 0}
        with self.ask(body | {"detokenize": False}, key) as answer:
            return json.load(answer)


@pytest.fixture(scope="session")
def image(tmp_path_factory) -> Path:
    """The files of /opt/oss, as the Dockerfile copies them."""
    folder = tmp_path_factory.mktemp("opt-oss")
    for name in ("entrypoint.py", "healthcheck.py"):
        shutil.copy(ROOT / "deploy/docker" / name, folder)
    (folder / "scripts").mkdir()
    for name in ("doctor.py", "calibrate.py"):
        shutil.copy(ROOT / "scripts" / name, folder / "scripts")
    shutil.copytree(ROOT / "scripts/harness", folder / "scripts/harness")
    return folder


@pytest.fixture(scope="module")
def chart():
    """The Helm chart, loaded by Helm's own library."""
    import helm_python

    with helm_python.Chart.load(CHART) as loaded:
        yield loaded


@pytest.fixture
def entrypoint(image, monkeypatch, tmp_path):
    """The module, in an environment of its own whose server is never started."""
    environment = {"SECRETS_DIR": str(tmp_path / "secrets"), "DOCTOR": "off", "PATH": "/usr/bin"}
    environment |= {"SERVER_FILE": str(tmp_path / "server.json")}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.syspath_prepend(str(image))
    monkeypatch.setattr(os, "execv", lambda path, command: started.append(command))
    started: list[list[str]] = []
    module = importlib.import_module("entrypoint")
    module.started = started
    (tmp_path / "secrets").mkdir()
    return module


@pytest.fixture(scope="module")
def served(tmp_path_factory, image):
    """A server of a tiny model, as the container starts it. A start takes most of a minute."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "secrets").mkdir()
    (folder / "secrets/api_key").write_text(f"{API_KEY}\n")
    # static scales: layers with others cannot saturate
    model = build(folder / "model", "llama", max_position_embeddings=512)
    calibrate(model, inputs="tensor")
    environment = CPU_ENVIRONMENT | os.environ
    environment |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment |= {"SERVER_FILE": str(folder / "server.json"), "PYTHONPATH": str(ROOT)}
    environment |= {"SECRETS_DIR": str(folder / "secrets"), "GRACE_PERIOD": "60"}
    flags = ["--max-model-len", "512"]
    flags += ["--skip-tokenizer-init", "--enforce-eager"]
    flags.append("--additional-config.oss_fused.monitor_every=1")
    command = [sys.executable, str(image / "entrypoint.py")]
    log = folder / "server.log"
    with Server("tiny", str(model), flags, log, environment, command=command) as server:
        server.wait_until_healthy()
        yield Served(server, server._environment, image)
