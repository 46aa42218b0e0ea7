# SPDX-License-Identifier: MIT
"""Exit code 0 if the server has a model and answers, 1 otherwise; for HEALTHCHECK and probes."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from pathlib import Path


def main() -> int:
    """Ask /v1/models of this container's server."""
    secret = Path(os.environ.get("SECRETS_DIR", "/run/secrets")) / "api_key"
    key = secret.read_text().strip() if secret.is_file() else os.environ.get("VLLM_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url = f"http://127.0.0.1:{os.environ.get('PORT', '8000')}/v1/models"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=4) as r:
            return 0 if json.load(r)["data"] else 1
    except (OSError, ValueError, KeyError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
