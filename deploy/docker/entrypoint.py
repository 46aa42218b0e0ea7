# SPDX-License-Identifier: MIT
"""Start of the container: secrets, pre-flight, then `vllm serve` in this process's place.

Arguments are those of `vllm serve`, the model first. DOCTOR=off leaves the pre-flight out.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# vllm serve -> doctor.py, where both have the flag
SHARED_FLAGS = (
    "--quantization",
    "--tensor-parallel-size",
    "--max-model-len",
    "--gpu-memory-utilization",
)


def read_secret(name: str) -> str | None:
    """A secret from the file that Docker or Kubernetes mounts; never from the image."""
    path = Path(os.environ.get("SECRETS_DIR", "/run/secrets")) / name
    return path.read_text().strip() if path.is_file() else None


def doctor_flags(arguments: list[str]) -> list[str]:
    """Those of the server's arguments that the pre-flight takes as well."""
    flags = []
    for position, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name in SHARED_FLAGS:
            value = value if equals else arguments[position + 1]
            # other methods than ours are none of the doctor's business
            if name != "--quantization" or value == "oss_fp8":
                flags += [name, value]
        elif name == "--trust-remote-code":
            flags.append(name)
    return flags


def main(arguments: list[str]) -> int:
    """Check, then become the server; returns only where it cannot."""
    if not arguments or arguments[0].startswith("-"):
        print("expected a MODEL, then flags of vllm serve", file=sys.stderr)
        return 2
    key = read_secret("api_key")
    if key:
        os.environ["VLLM_API_KEY"] = key
    model = arguments[0]
    if os.environ.get("DOCTOR", "on") != "off":
        local = [model] if Path(model).is_dir() else []
        command = [sys.executable, str(HERE / "scripts/doctor.py"), *local]
        done = subprocess.run([*command, *doctor_flags(arguments[1:])], check=False)
        if done.returncode:
            return done.returncode
    serve = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *arguments]
    for flag, variable, default in (("--host", "HOST", "0.0.0.0"), ("--port", "PORT", "8000")):
        if not any(word.partition("=")[0] == flag for word in arguments):
            serve += [flag, os.environ.get(variable, default)]
    os.execv(sys.executable, serve)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
