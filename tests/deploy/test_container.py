# SPDX-License-Identifier: MIT
"""The container's files: linted, and run as the container runs them (no Docker daemon needed)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.error
from pathlib import Path

import psutil
import pytest
import yaml

from oss_fused.bench import processes
from tests.deploy.conftest import API_KEY, ROOT
from tests.deploy.hostile import make, make_bases

DOCKERFILES = sorted((ROOT / "deploy/docker").glob("Dockerfile*"))
COMPOSE = ROOT / "deploy/compose"
HADOLINT = Path(sys.executable).with_name("hadolint")


def compose(name: str) -> str:
    """A compose file with the variables of example.env in place."""
    lines = (COMPOSE / "example.env").read_text().splitlines()
    values = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))

    def value(match: re.Match) -> str:
        name, _, default = match[1].partition(":-")
        assert name in values or ":-" in match[1], f"{name} is not in example.env"
        return values.get(name, default)

    return re.sub(r"\$\{([^}]+)\}", value, (COMPOSE / name).read_text())


def test_dockerfiles_lint_clean() -> None:
    files = [str(path) for path in DOCKERFILES]
    done = subprocess.run([HADOLINT, *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfile_keeps_the_promises(path) -> None:
    text = path.read_text()
    users = re.findall(r"^USER (\S+)", text, re.M)
    assert users and users[-1] == "10001:10001"
    assert "HEALTHCHECK" in text and "entrypoint.py" in text
    assert not re.search(r"(API_KEY|TOKEN|PASSWORD|SECRET)\s*=", text), "no secrets in images"
    for image in re.findall(r"^ARG \w+_IMAGE=(\S+)", text, re.M):
        assert not image.endswith(":latest") and ":" in image, "pinned"
    for source in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.M):
        for name in source.split():
            assert (ROOT / name).exists(), name


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_compose_fits_the_specification(name) -> None:
    import compose_spec

    compose_spec.PyCompose.from_yaml(compose(name)).validate()


def test_compose_keeps_the_promises() -> None:
    services = yaml.safe_load(compose("compose.yaml"))["services"]
    assert set(services) == {"server", "prometheus", "grafana"}
    for name, service in services.items():
        assert not service["image"].endswith(":latest") and ":" in service["image"]
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), "loopback only"
        assert service["cap_drop"] == ["ALL"]
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("../"):
                assert (COMPOSE / source).exists(), f"{name}: {source}"
    assert services["server"]["read_only"] is True
    assert "api_key" in services["server"]["secrets"]


@pytest.mark.serve
def test_health_needs_the_model_and_the_key(served) -> None:
    check = [sys.executable, str(served.image / "healthcheck.py")]
    assert subprocess.run(check, env=served.environment, check=False).returncode == 0
    without = {**served.environment, "SECRETS_DIR": "/nowhere"}
    assert subprocess.run(check, env=without, check=False).returncode == 1
    closed = {**served.environment, "PORT": "1"}
    assert subprocess.run(check, env=closed, check=False).returncode == 1


@pytest.mark.serve
def test_key_is_asked_for_and_never_shown(served) -> None:
    assert len(served.complete()["choices"]) == 1
    with pytest.raises(urllib.error.HTTPError, match="401"):
        served.complete(key=None)
    assert API_KEY not in served.server.log_text()
    processes_of = [psutil.Process(served.server._process.pid)]
    processes_of += processes_of[0].children(recursive=True)
    assert not any(API_KEY in word for process in processes_of for word in process.cmdline())


@pytest.mark.serve
def test_nothing_listens_beyond_loopback(served) -> None:
    pid = served.server._process.pid
    for process in map(psutil.Process, [pid, *processes.descendants(pid)]):
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                assert connection.laddr.ip in ("127.0.0.1", "::1"), (process, connection)


@pytest.mark.serve
def test_bad_checkpoint_keeps_the_container_from_serving(image, tmp_path) -> None:
    folder = make("scale_zero", make_bases(tmp_path), tmp_path)
    done = subprocess.run(
        [sys.executable, str(image / "entrypoint.py"), str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1 and "not fit: checkpoint" in done.stderr
    assert "Traceback" not in done.stderr


def test_arguments_of_the_pre_flight(image, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(image))
    import entrypoint

    flags = ["--quantization=oss_fp8", "--max-model-len", "64", "--seed", "1"]
    assert entrypoint.doctor_flags(flags) == [
        "--quantization",
        "oss_fp8",
        "--max-model-len",
        "64",
    ]
    assert entrypoint.doctor_flags(["--quantization", "fp8"]) == []
    assert entrypoint.main(["--seed"]) == 2
