# SPDX-License-Identifier: MIT
"""The container's files: linted, and run as the container runs them (no Docker daemon needed)."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import shutil
import socket
import socketserver
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from harness import processes

from oss_fused import envs
from oss_fused.errors import ServerError
from tests.deploy.conftest import API_KEY, ROOT, container
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


def test_variables_of_the_files_are_this_packages() -> None:
    """A typo would be a setting that nobody reads."""
    for path in sorted((ROOT / "deploy").rglob("*")):
        if path.is_file():
            found = set(re.findall(r"\bOSS_FUSED_[A-Z_]+", path.read_text()))
            assert found <= set(envs.VARIABLES), path


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
        ({"AUTH": "off", "PORT": "http"}, [], "http"),
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


@pytest.mark.parametrize(
    "flags", [["--shutdown-timeout", "3"], ["--shutdown_timeout=3"], ["--config", "CONFIG"]]
)
def test_what_the_user_says_stays(entrypoint, tmp_path, flags) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text("shutdown_timeout: 3\nport: 9\napi-key: [k]\n")
    flags = [flag.replace("CONFIG", str(config)) for flag in flags]
    if "--config" not in flags:
        os.environ["AUTH"] = "off"
    entrypoint.main(["m", *flags, "--host", "::1"])
    (command,) = entrypoint.started
    assert str(entrypoint.shutdown_seconds()) not in command
    assert command.count("--host") == 1 and ("--port" in command) == ("--config" not in flags)


def certificate(folder: Path) -> list[str]:
    """Flags of a certificate that no one signed, for no name of this machine."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "model.example")])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name)
    builder = builder.public_key(key.public_key()).serial_number(1)
    builder = builder.not_valid_before(now - timedelta(1)).not_valid_after(now + timedelta(1))
    pem = serialization.Encoding.PEM
    plain = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "key.pem").write_bytes(key.private_bytes(pem, *plain))
    (folder / "cert.pem").write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(pem))
    return [f"--ssl-certfile={folder}/cert.pem", "--ssl-keyfile", f"{folder}/key.pem"]


class Answer(BaseHTTPRequestHandler):
    """What a server with a model and API_KEY answers."""

    def address_string(self) -> str:
        return "client"

    def log_message(self, *args) -> None:
        pass

    def do_GET(self) -> None:
        known = self.headers["Authorization"] == f"Bearer {API_KEY}"
        self.send_response(200 if known and self.path == "/v1/models" else 401)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": "m"}] if known else []}).encode())


@contextmanager
def answering(host: str, tls: list[str], uds: str = ""):
    family = socket.AF_UNIX if uds else socket.AF_INET6 if ":" in host else socket.AF_INET
    kind = type("S", (ThreadingHTTPServer,), {"address_family": family})
    kind.server_bind = socketserver.TCPServer.server_bind
    server = kind(uds or (host, 0), Answer)
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        folder = Path(tls[-1]).parent
        context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield 1 if uds else server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("way", ["port", "host", "wildcard", "uds", "tls", "variable", "file"])
def test_health_check_asks_where_and_how_the_server_was_told(
    entrypoint, image, tmp_path, way
) -> None:
    check = [sys.executable, str(image / "healthcheck.py")]
    host = {"host": "127.0.0.2", "wildcard": "0.0.0.0"}.get(way, "127.0.0.1")
    tls = certificate(tmp_path) if way == "tls" else []
    uds = str(tmp_path / "socket") if way == "uds" else ""
    os.environ["PORT"] = "1"
    flags = [*tls, *(["--uds", uds] if uds else [])]
    if way == "variable":
        os.environ["VLLM_API_KEY"] = API_KEY
    elif way == "file":
        (Path(os.environ["SECRETS_DIR"]) / "api_key").write_text(API_KEY)
    else:
        flags += ["--api-key", API_KEY, "another"]
    with answering("127.0.0.1" if way == "wildcard" else host, tls, uds) as port:
        entrypoint.main(["m", f"--host={host}", "--port", str(port), *flags])
        # Docker and Kubernetes start the check with the container's variables, not the server's
        environment = dict(os.environ)
        if way != "variable":
            del environment["VLLM_API_KEY"]
        done = subprocess.run(check, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert entrypoint.server_file().stat().st_mode & 0o777 == 0o600
        address = json.loads(entrypoint.server_file().read_text())
        entrypoint.server_file().write_text(json.dumps(address | {"key": "wrong"}))
        assert subprocess.run(check, env=environment, check=False).returncode == 1
    entrypoint.server_file().write_text(json.dumps(address))
    assert subprocess.run(check, env=environment, check=False).returncode == 1, "nobody listens"


def test_stop_ends_the_pre_flight(image, tmp_path) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(image / "entrypoint.py", tmp_path)
    child = tmp_path / "pid"
    (tmp_path / "scripts/doctor.py").write_text(
        f"import os, pathlib, time\npathlib.Path({str(child)!r}).write_text(str(os.getpid()))\n"
        "time.sleep(60)\n"
    )
    environment = os.environ | {"AUTH": "off", "SERVER_FILE": str(tmp_path / "server.json")}
    command = [sys.executable, str(tmp_path / "entrypoint.py"), "m"]
    with subprocess.Popen(command, env=environment) as process:
        deadline = time.monotonic() + 30
        while not (child.exists() and child.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.terminate()
        # 128 + SIGTERM: its own answer, since process 1 has no default one
        assert process.wait(timeout=10) == 143
    assert not processes.is_alive(int(child.read_text()))


@pytest.mark.serve
def test_stream_ends_before_the_server(image, tmp_path) -> None:
    """SIGTERM while a stream runs: all of its tokens, then the end, within the grace period."""
    variables = {"AUTH": "off", "DOCTOR": "off", "GRACE_PERIOD": "60"}
    body = {"model": "tiny", "prompt": [3, 17, 42], "max_tokens": 300, "temperature": 0}
    body |= {"ignore_eos": True, "detokenize": False, "stream": True, "return_token_ids": True}
    with container(image, tmp_path, ["--max-model-len", "512"], **variables) as server:
        server.wait_until_healthy()
        process = server._process
        url, headers = f"{server.url}/v1/completions", {"Content-Type": "application/json"}
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as stream:
            first = stream.readline()
            process.terminate()
            begin = time.monotonic()
            lines = [first, *(line for line in stream if line.strip())]
        assert process.wait(timeout=60) == 0
        assert time.monotonic() - begin < 60
    assert lines[-1].strip() == b"data: [DONE]"
    answers = [json.loads(line.removeprefix(b"data: "))["choices"][0] for line in lines[:-1]]
    assert sum(len(answer["token_ids"] or []) for answer in answers) == 300
    assert [answer["finish_reason"] for answer in answers if answer["finish_reason"]] == ["length"]


@pytest.mark.serve
def test_health_of_a_real_server(served) -> None:
    check = [sys.executable, str(served.image / "healthcheck.py")]
    assert subprocess.run(check, env=served.environment, check=False).returncode == 0
    without = {**served.environment, "SECRETS_DIR": "/nowhere"}
    assert subprocess.run(check, env=without, check=False).returncode == 1


@pytest.mark.serve
def test_key_is_asked_for_and_never_shown(served) -> None:
    assert len(served.complete()["choices"]) == 1
    with pytest.raises(urllib.error.HTTPError, match="401"):
        served.complete(key=None)
    assert API_KEY not in served.server.log_text()
    # beyond vLLM's own guard: this one generates as well
    for path in ("/invocations", "/tokenize"):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{served.server.url}{path}", b"{}", timeout=10)
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
        env={**os.environ, "PYTHONPATH": str(ROOT), "AUTH": "off", "SERVER_FILE": f"{tmp_path}/s"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1 and "not fit: checkpoint" in done.stderr
    assert "Traceback" not in done.stderr


def test_arguments_of_the_pre_flight(entrypoint) -> None:
    flags = ["--quantization=oss_fp8", "--max_model_len", "64", "--seed", "1", "-tp", "2"]
    assert entrypoint.doctor_flags(flags) == [
        "--quantization",
        "oss_fp8",
        "--tensor-parallel-size",
        "2",
        "--max-model-len",
        "64",
    ]
    assert entrypoint.doctor_flags(["--quantization", "fp8", "--max-model-len", "32k"]) == []
    assert entrypoint.main(["--seed"]) == 2
