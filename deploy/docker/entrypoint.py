# SPDX-License-Identifier: MIT
"""Start of the container: API key, pre-flight, then `vllm serve` in this process's place.

Arguments are those of `vllm serve`, the model first. Variables:

    SECRETS_DIR   folder with the file api_key, the key that clients must send (/run/secrets)
    AUTH          off serves without a key; without a key and without AUTH=off nothing starts
    DOCTOR        off leaves the pre-flight out
    HOST, PORT    address where no --host or --port is given (0.0.0.0, 8000)
    GRACE_PERIOD  seconds from SIGTERM to SIGKILL (60); streams may go on for all but the last 10
    SERVER_FILE   where the health check reads how to reach the server

Exit codes: 1 a check of the pre-flight failed, 2 a bad argument, variable or key.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
# vllm serve -> doctor.py, where both have the flag
SHARED_FLAGS = (
    "--quantization",
    "--tensor-parallel-size",
    "--pipeline-parallel-size",
    "--max-model-len",
    "--gpu-memory-utilization",
)
ALIASES = {
    "-q": "--quantization",
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-asc": "--api-server-count",
}
# of a grace period: ending the engine's processes once the last stream has ended
TEARDOWN_SECONDS = 10
# of the health check; below the 5 seconds that Docker and the probes give it
TIMEOUT_SECONDS = 4


class StartError(ValueError):
    """The container cannot start: an argument, a variable or the key is bad."""


def server_file() -> Path:
    """Where the health check reads how to reach the server."""
    default = Path(tempfile.gettempdir()) / "oss-fused-server.json"
    return Path(os.environ.get("SERVER_FILE") or default)


def switch(name: str) -> bool:
    """Whether the variable ``name`` is on, as it is by default.

    Raises:
        StartError: it is neither on nor off.
    """
    value = os.environ.get(name, "on")
    if value not in ("on", "off"):
        raise StartError(f"{name}={value!r}: expected on or off")
    return value == "on"


def stored_flags(paths: list[str]) -> dict[str, Any]:
    """Flag without dashes -> its value, of the file that --config names.

    Raises:
        StartError: there is no path, or no flags in the file.
    """
    if not paths:
        raise StartError("--config: expected the path of a YAML file behind it")
    stored = yaml.safe_load(Path(paths[-1]).read_text()) or {}
    if not isinstance(stored, dict) or not all(isinstance(key, str) for key in stored):
        raise StartError(f"--config {paths[-1]}: expected flags of vllm serve, each `name: value`")
    return stored


def flags_of(arguments: list[str]) -> dict[str, list[str]]:
    """Flag with dashes, as vLLM reads it -> its values: the last given ones, else --config's.

    Raises:
        StartError: --config is given in a way that vLLM does not read.
    """
    flags: dict[str, list[str]] = {}
    name = ""
    for word in arguments:
        flag, equals, value = word.partition("=")
        # short flags of vLLM too, but no number below zero
        if re.match("--?[A-Za-z]", word):
            name = ALIASES.get(flag, flag.replace("_", "-"))
            if name == "--config" and equals:
                raise StartError(f"{word}: vLLM passes this over; expected --config {value}")
            flags[name] = [value] if equals else []
        elif name:
            flags[name].append(word)
    if "--config" in flags:
        for key, value in stored_flags(flags["--config"]).items():
            # vLLM leaves such a flag out
            if value is not False:
                values = value if isinstance(value, list) else [value]
                flags.setdefault(f"--{key.replace('_', '-')}", list(map(str, values)))
    return flags


def key_of_file() -> str | None:
    """The key in the file that Docker or Kubernetes mounts; None without such a file.

    Raises:
        StartError: there is a file but no key in it, or another file in its place.
    """
    path = Path(os.environ.get("SECRETS_DIR", "/run/secrets")) / "api_key"
    try:
        return path.read_text(encoding="ascii")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"{path}: cannot be read ({error}); expected a file with a key") from None


def check_key(source: str, key: str) -> str:
    """The key without white space around it.

    Raises:
        StartError: it is empty, or no client could send it in a header.
    """
    key = key.strip()
    if not key:
        raise StartError(f"{source}: is empty; expected a key")
    if not all("!" <= character <= "~" for character in key):
        raise StartError(f"{source}: expected one line of printable characters without a space")
    return key


def api_keys(flags: dict[str, list[str]]) -> list[str]:
    """The keys of which clients must send one; none if the user asked for a server without.

    Raises:
        StartError: there is no key and no AUTH=off, a bad key, more than one, or a key
            and AUTH=off.
    """
    given: dict[str, list[str]] = {}
    if (content := key_of_file()) is not None:
        given["file api_key"] = [content]
    if "VLLM_API_KEY" in os.environ:
        given["VLLM_API_KEY"] = [os.environ["VLLM_API_KEY"]]
    if "--api-key" in flags:
        given["--api-key"] = flags["--api-key"] or [""]
    keys = [check_key(source, key) for source, some in given.items() for key in some]
    if len(given) > 1:
        raise StartError(f"API key: given by {' and by '.join(given)}; expected one of them")
    if not switch("AUTH"):
        if given:
            raise StartError(f"AUTH='off': but {next(iter(given))} gives a key; expected one")
        return []
    if not keys:
        folder = Path(os.environ.get("SECRETS_DIR", "/run/secrets"))
        found = sorted(os.listdir(folder)) if folder.is_dir() else "no such folder"
        raise StartError(
            f"API key: no file api_key in {folder} (found: {found}); expected one, or "
            "VLLM_API_KEY, or AUTH=off to serve whoever asks"
        )
    return keys


def shutdown_seconds() -> int:
    """Seconds that streams may go on after SIGTERM.

    Raises:
        StartError: GRACE_PERIOD is no number of seconds, or leaves no time for them.
    """
    text = os.environ.get("GRACE_PERIOD", "60")
    if not text.isdecimal() or int(text) <= TEARDOWN_SECONDS:
        raise StartError(f"GRACE_PERIOD={text!r}: expected over {TEARDOWN_SECONDS} seconds")
    return int(text) - TEARDOWN_SECONDS


def doctor_flags(arguments: list[str]) -> list[str]:
    """Those of the server's arguments that the pre-flight takes as well."""
    flags = flags_of(arguments)
    taken = []
    for name in SHARED_FLAGS:
        value = (flags.get(name) or [""])[-1]
        # other methods than ours are none of the doctor's business; lengths may be 32k or auto
        if not value or (name == "--quantization" and value != "oss_fp8"):
            continue
        if name != "--max-model-len" or value.isdecimal():
            taken += [name, value]
    return taken + ["--trust-remote-code"] * ("--trust-remote-code" in flags)


def stop(number: int, frame: FrameType | None) -> None:
    """SIGTERM during the pre-flight: process 1 has no default action of its own for it."""
    sys.exit(128 + number)


def write_address(serve: list[str]) -> None:
    """Tell the health check how to reach the server; a key only where it lies nowhere else.

    Raises:
        StartError: the host or the port is none.
    """
    flags = flags_of(serve)
    one = {name: values[-1] for name, values in flags.items() if values}
    if "--host" not in one:
        raise StartError("--host: expected an address behind it")
    port = one.get("--port", "")
    if not (port.isdecimal() and 0 < int(port) < 65536):
        raise StartError(f"--port or PORT={port!r}: expected a number from 1 to 65535")
    address = {
        "host": one["--host"],
        "port": int(port),
        "uds": one.get("--uds"),
        "certificate": one.get("--ssl-certfile"),
        "certificate_key": one.get("--ssl-keyfile"),
    }
    address["key"] = flags.get("--api-key", [None])[0]
    path = server_file()
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(address, file)


def command_of(arguments: list[str]) -> list[str]:
    """`vllm serve` with what the user left to the container."""
    defaults = {
        "--host": os.environ.get("HOST", "0.0.0.0"),
        "--port": os.environ.get("PORT", "8000"),
        "--shutdown-timeout": str(shutdown_seconds()),
    }
    serve = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *arguments]
    given = flags_of(arguments)
    for flag, value in defaults.items():
        serve += [] if flag in given else [flag, value]
    return serve


def main(arguments: list[str]) -> int:
    """Check, then become the server; returns only where it cannot."""
    try:
        if not arguments or arguments[0].startswith("-"):
            raise StartError(f"arguments {arguments}: expected a MODEL, then flags of vllm serve")
        keys = api_keys(flags_of(arguments))
        preflight = doctor_flags(arguments[1:])
        examine = switch("DOCTOR")
        serve = command_of(arguments)
        write_address(serve)
    except (OSError, ValueError, yaml.YAMLError) as error:
        print(f"entrypoint: {error}", file=sys.stderr)
        return 2
    if keys:
        # variables do not show in the process list
        os.environ |= {"API_KEYS": "\n".join(keys), "VLLM_API_KEY": keys[0]}
        serve += ["--middleware", "oss_fused.plugin.api_key.KeyForAllPaths"]
    else:
        print("entrypoint: AUTH=off: whoever reaches the server may use it", file=sys.stderr)
    several = {"--api-server-count", "--data-parallel-size"} & flags_of(arguments).keys()
    if any((flags_of(arguments)[name] or ["1"])[-1] != "1" for name in several):
        print("entrypoint: with several API servers streams break at SIGTERM", file=sys.stderr)
    model = arguments[0]
    if examine:
        local = [model] if Path(model).is_dir() else []
        command = [sys.executable, str(HERE / "scripts/doctor.py"), *local]
        signal.signal(signal.SIGTERM, stop)
        done = subprocess.run([*command, *preflight], check=False)
        if done.returncode:
            return done.returncode
    # the same process: signals of Docker and Kubernetes reach vLLM itself
    os.execv(sys.executable, serve)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
