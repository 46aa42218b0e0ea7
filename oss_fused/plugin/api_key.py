# SPDX-License-Identifier: MIT
"""The API key for every path of a server: vLLM asks for it only below /v1 and on a few others.

/invocations generates as /v1/completions does. For `vllm serve --middleware`.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable
from typing import Any

from vllm.entrypoints.serve.middleware import authenticate

from oss_fused.errors import ServerError

# probes and Prometheus read these without a key; none of them generates tokens
OPEN_PATHS = ("/health", "/ping", "/metrics", "/version", "/load")


class KeyForAllPaths(authenticate.AuthenticationMiddleware):
    """Answers 401 to requests without one of the keys in API_KEYS, one a line."""

    def __init__(self, app: Any) -> None:
        """See the class.

        Raises:
            ServerError: API_KEYS holds no key.
        """
        keys = os.environ.get("API_KEYS", "").split()
        if not keys:
            raise ServerError("API_KEYS: is empty or unset; expected one key a line")
        super().__init__(app, keys)

    def __call__(self, scope: Any, receive: Any, send: Any) -> Awaitable[None]:
        """Answer requests for open paths, preflights of browsers, and requests with a key."""
        asked = scope["type"] in ("http", "websocket") and scope.get("method") != "OPTIONS"
        if asked:
            path = scope["path"].removeprefix(scope.get("root_path", "")).rstrip("/")
            headers = authenticate.Headers(scope=scope)
            if path not in OPEN_PATHS and not self.verify_token(headers):
                content = {"error": "Unauthorized"}
                refusal = authenticate.JSONResponse(content=content, status_code=401)
                return refusal(scope, receive, send)
        return self.app(scope, receive, send)
