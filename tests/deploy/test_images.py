# SPDX-License-Identifier: MIT
"""Dockerfiles and compose files: linted, and held to what the docs promise."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from oss_fused import envs
from oss_fused.quant.settings import parse_options
from tests.deploy.conftest import ROOT

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


def test_compose_lets_streams_end(entrypoint) -> None:
    server = yaml.safe_load(compose("compose.yaml"))["services"]["server"]
    grace = server["environment"]["GRACE_PERIOD"]
    assert server["stop_grace_period"] == f"{grace}s" and server["init"] is True
    default = entrypoint.command_of(["m"])
    os.environ["GRACE_PERIOD"] = grace
    assert entrypoint.command_of(["m"]) == default, "an image without compose"
    assert "--shutdown-timeout" in default
    seconds = int(default[default.index("--shutdown-timeout") + 1])
    assert 30 <= seconds <= int(grace) - entrypoint.TEARDOWN_SECONDS


def test_docker_run_mounts_what_its_user_can_read() -> None:
    """The folder of the keys is of mode 700: user 10001 could not enter it."""
    page = (ROOT / "docs/deploy.md").read_text()
    (command,) = re.findall(r"docker run (?:.+\\\n)*.+", page.replace("`docker run`", ""))
    mounts = dict(re.findall(r"-v (\S+?):(\S+)", command))
    assert mounts["$PWD/secrets/api_key"] == "/run/secrets/api_key:ro"
    assert "install -d -m 700 secrets" in page and "chmod 644 secrets/*" in page
    assert not any(place.startswith("/run/secrets:") for place in mounts.values())


def test_compose_passes_the_monitors_interval() -> None:
    command = yaml.safe_load(compose("compose.yaml"))["services"]["server"]["command"]
    start = "--additional-config="
    (text,) = (flag.removeprefix(start) for flag in command if start in flag)
    assert parse_options(json.loads(text)["oss_fused"])[1].monitor_every == 2000


def test_variables_of_the_files_are_this_packages() -> None:
    """A typo would be a setting that nobody reads."""
    for path in sorted((ROOT / "deploy").rglob("*")):
        # byte code is there once another test has imported deploy/docs/hooks.py
        if path.is_file() and path.suffix != ".pyc":
            found = set(re.findall(r"\bOSS_FUSED_[A-Z_]+", path.read_text()))
            assert found <= set(envs.VARIABLES), path
