# SPDX-License-Identifier: MIT
"""One server for all tests of this folder, started as the container starts it."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness.compare import CPU_ENVIRONMENT
from harness.server import Server

from tests.plugin.conftest import build, calibrate

ROOT = Path(__file__).resolve().parents[2]
API_KEY = "sk-test-4f1c9d7e"


@dataclass(frozen=True)
class Served:
    """The running server, and the environment and folder that it was started with."""

    server: Server
    environment: dict[str, str]
    image: Path

    def complete(self, key: str | None = API_KEY) -> dict:
        """A greedy completion of four tokens."""
        body = {"model": "tiny", "prompt": [3, 17, 42], "max_tokens": 4, "temperature": 0}
        headers = {"Content-Type": "application/json"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        data = json.dumps(body | {"detokenize": False}).encode()
        url = f"{self.server.url}/v1/completions"
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as r:
            return json.load(r)


@pytest.fixture(scope="session")
def image(tmp_path_factory) -> Path:
    """The files of /opt/oss, as the Dockerfile copies them."""
    folder = tmp_path_factory.mktemp("opt-oss")
    for name in ("entrypoint.py", "healthcheck.py"):
        shutil.copy(ROOT / "deploy/docker" / name, folder)
    (folder / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/doctor.py", folder / "scripts")
    return folder


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


def container(image: Path, folder: Path, flags: list[str], **variables: str) -> Server:
    """A server of a tiny model, as the container starts it; its files lie in ``folder``."""
    # static scales: layers with others cannot saturate
    model = build(folder / "model", "llama", max_position_embeddings=512)
    calibrate(model, inputs="tensor")
    environment = CPU_ENVIRONMENT | os.environ
    environment |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment |= {"SERVER_FILE": str(folder / "server.json"), "PYTHONPATH": str(ROOT)}
    environment |= variables
    monitored = "--additional-config.oss_fused.monitor_every=1"
    flags = ["--skip-tokenizer-init", "--enforce-eager", monitored, *flags]
    command = [sys.executable, str(image / "entrypoint.py")]
    return Server("tiny", str(model), flags, folder / "server.log", environment, command=command)


@pytest.fixture(scope="session")
def served(tmp_path_factory, image):
    folder = tmp_path_factory.mktemp("served")
    (folder / "secrets").mkdir()
    (folder / "secrets/api_key").write_text(f"{API_KEY}\n")
    # with several API servers vLLM serves another registry of metrics
    flags = ["--max-model-len", "64", "--api-server-count", "2"]
    with container(image, folder, flags, SECRETS_DIR=str(folder / "secrets")) as server:
        server.wait_until_healthy()
        yield Served(server, server._environment, image)
