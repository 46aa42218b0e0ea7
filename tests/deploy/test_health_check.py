# SPDX-License-Identifier: MIT
"""The container's health check: where it asks, by what protocol, with which key."""

from __future__ import annotations

import json
import os
import socket
import socketserver
import ssl
import subprocess
import sys
import threading
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.deploy.conftest import API_KEY


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


@pytest.mark.parametrize(
    "way", ["port", "host", "wildcard", "uds", "uds-tls", "tls", "variable", "file"]
)
def test_health_check_asks_where_and_how_the_server_was_told(
    entrypoint, image, tmp_path, way
) -> None:
    check = [sys.executable, str(image / "healthcheck.py")]
    host = {"host": "127.0.0.2", "wildcard": "0.0.0.0"}.get(way, "127.0.0.1")
    tls = certificate(tmp_path) if "tls" in way else []
    uds = str(tmp_path / "socket") if "uds" in way else ""
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
