# SPDX-License-Identifier: MIT
"""The API key and other settings: refused where they make no sense, the key shown nowhere."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import pytest

from oss_fused.errors import ServerError
from tests.deploy.conftest import API_KEY


def put_key(kind: str, path: Path) -> None:
    """A key's file that is of no use."""
    if kind == "directory":  # what Docker makes where the source of a mount is missing
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "misnamed":
        path.with_name("api-key").write_text("sk-1")
    elif kind != "missing":
        contents = {"empty": b"", "blank": b" \n\t\n", "binary": b"\xff\xfe", "lines": b"a\nb\n"}
        path.write_bytes(contents[kind])


BAD_KEYS = {
    "empty": "is empty",
    "blank": "is empty",
    "directory": "cannot be read .*directory",
    "loop": "cannot be read",
    "binary": "cannot be read",
    "lines": "expected one line",
    "missing": r"no file api_key in .*found: \[\]",
    "misnamed": r"found: \['api-key'\]",
}


@pytest.mark.parametrize("kind", BAD_KEYS)
def test_no_server_without_the_key(entrypoint, capsys, kind) -> None:
    put_key(kind, Path(os.environ["SECRETS_DIR"]) / "api_key")
    assert entrypoint.main(["m"]) == 2
    assert re.search(BAD_KEYS[kind], capsys.readouterr().err)
    assert not entrypoint.started


@pytest.mark.parametrize(
    ("variables", "flags", "reason"),
    [
        ({"VLLM_API_KEY": ""}, [], "VLLM_API_KEY: is empty"),
        ({}, ["--api-key"], "--api-key: is empty"),
        ({}, ["--api-key", "good", " "], "--api-key: is empty"),
        ({}, ["--api_key="], "--api-key: is empty"),
        ({"VLLM_API_KEY": "a"}, ["--api-key", "b"], "given by VLLM_API_KEY and by --api-key"),
        ({"VLLM_API_KEY": "a", "AUTH": "off"}, [], "but VLLM_API_KEY gives a key"),
        ({"AUTH": "no"}, [], "AUTH='no': expected on or off"),
        ({"AUTH": "off", "DOCTOR": "no"}, [], "DOCTOR='no': expected on or off"),
        ({"AUTH": "off", "PORT": "http"}, [], "--port or PORT='http': expected a number"),
        ({"AUTH": "off"}, ["--port"], "--port or PORT='': expected a number"),
        ({"AUTH": "off"}, ["--host"], "--host: expected an address"),
        ({"AUTH": "off"}, ["--config"], "--config: expected the path"),
        ({"AUTH": "off"}, ["--config", os.devnull, "--config=a"], "expected --config a"),
        ({"AUTH": "off", "GRACE_PERIOD": "10"}, [], "GRACE_PERIOD='10': expected over 10"),
        ({"AUTH": "off", "GRACE_PERIOD": "1m"}, [], "GRACE_PERIOD='1m': expected"),
        ({"SECRETS_DIR": "/nowhere"}, [], "found: no such folder"),
    ],
)
def test_bad_settings_are_refused(entrypoint, capsys, variables, flags, reason) -> None:
    os.environ |= variables
    assert entrypoint.main(["m", *flags]) == 2
    assert reason in capsys.readouterr().err and not entrypoint.started


def test_key_reaches_the_server_and_no_command_line(entrypoint) -> None:
    (Path(os.environ["SECRETS_DIR"]) / "api_key").write_text(f" {API_KEY}\n")
    entrypoint.main(["m"])
    assert os.environ["VLLM_API_KEY"] == os.environ["API_KEYS"] == API_KEY
    assert "oss_fused.plugin.api_key.KeyForAllPaths" in entrypoint.started[0]
    assert API_KEY not in str(entrypoint.started)
    assert API_KEY not in entrypoint.server_file().read_text()


def test_values_of_other_flags_are_no_keys(entrypoint) -> None:
    """Else a client with the key "2" could generate at /invocations."""
    entrypoint.main(["m", "--api-key", "one", "other", "-ep", "-dcp", "2", "-O3"])
    assert os.environ["API_KEYS"].split() == ["one", "other"]


def test_a_file_of_flags_is_a_mapping(entrypoint, tmp_path, capsys) -> None:
    os.environ["AUTH"] = "off"
    for text in ("- port\n", "1: 2\n", "port\n"):
        (tmp_path / "serve.yaml").write_text(text)
        assert entrypoint.main(["m", "--config", str(tmp_path / "serve.yaml")]) == 2
        assert "serve.yaml: expected flags of vllm serve" in capsys.readouterr().err


def test_server_without_a_key_must_be_asked_for(entrypoint, capsys) -> None:
    os.environ["AUTH"] = "off"
    entrypoint.main(["m"])
    assert entrypoint.started and "AUTH=off" in capsys.readouterr().err
    assert "VLLM_API_KEY" not in os.environ and "--middleware" not in entrypoint.started[0]


@pytest.mark.parametrize(
    ("path", "method", "key", "passes"),
    [
        ("/invocations", "POST", None, False),
        ("/tokenize", "POST", "wrong", False),
        ("/metrics/../invocations", "POST", None, False),
        ("/", "GET", None, False),
        ("/invocations", "POST", "k2", True),
        ("/v1/models", "OPTIONS", None, True),
        ("/health", "GET", None, True),
        ("/metrics/", "GET", None, True),
    ],
)
def test_every_path_but_a_few_needs_a_key(monkeypatch, path, method, key, passes) -> None:
    from oss_fused.plugin.api_key import KeyForAllPaths

    monkeypatch.setenv("API_KEYS", "k1\nk2")
    reached, sent = [], []

    async def app(scope, receive, send) -> None:
        reached.append(scope["path"])

    async def send(message) -> None:
        sent.append(message)

    headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
    scope = {"type": "http", "method": method, "path": path, "headers": headers}

    async def ask() -> None:
        await KeyForAllPaths(app)(scope, None, send)

    asyncio.run(ask())
    assert bool(reached) is passes
    assert passes or sent[0]["status"] == 401
    monkeypatch.delenv("API_KEYS")
    with pytest.raises(ServerError, match="API_KEYS"):
        KeyForAllPaths(app)
