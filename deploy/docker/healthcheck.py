# SPDX-License-Identifier: MIT
"""Exit code 0 if the server has a model and answers, 1 otherwise; for HEALTHCHECK and probes.

The entry point left the server's address in a file: --host, --port, --uds and TLS as it was given
them, and a key of the command line. Any other key comes from where the entry point found it.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
import sys
from typing import Any

from entrypoint import TIMEOUT_SECONDS, key_of_file, server_file

WILDCARDS = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1", "[::]": "::1"}


def connect(address: dict[str, Any]) -> http.client.HTTPConnection:
    """A connection to the server of this container."""
    host = WILDCARDS.get(address["host"], address["host"])
    context = None
    if address["certificate"]:
        # this very container's: its name and signer say nothing here
        context = ssl._create_unverified_context()
        # in case that the server asks for a client's certificate
        context.load_cert_chain(address["certificate"], address["certificate_key"])
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            host, address["port"], timeout=TIMEOUT_SECONDS, context=context
        )
    else:
        connection = http.client.HTTPConnection(host, address["port"], timeout=TIMEOUT_SECONDS)
    if address["uds"]:
        plain = socket.socket(socket.AF_UNIX)
        plain.settimeout(TIMEOUT_SECONDS)
        plain.connect(address["uds"])
        connection.sock = context.wrap_socket(plain) if context else plain
    return connection


def main() -> int:
    """Ask /v1/models of this container's server."""
    try:
        address = json.loads(server_file().read_text())
        key = address["key"] or (key_of_file() or os.environ.get("VLLM_API_KEY", "")).strip()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        connection = connect(address)
        connection.request("GET", "/v1/models", headers=headers)
        answer = connection.getresponse()
        if answer.status == 200 and json.load(answer)["data"]:
            return 0
        print(f"/v1/models answered {answer.status}", file=sys.stderr)
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        print(error, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
