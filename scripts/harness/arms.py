# SPDX-License-Identifier: MIT
"""What scripts compare: models with their flags and environment, as given on a command line."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Arm:
    """One thing to compare: a name, a checkpoint, flags of `vllm serve`, environment variables."""

    name: str
    model: str
    flags: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


def parse_arm(text: str) -> Arm:
    """Read ``NAME=[VARIABLE=VALUE ...] MODEL [FLAGS ...]``, quoted as in a shell.

    Raises:
        ValueError: no name, no model, or words out of order.
    """
    name, equals, rest = text.partition("=")
    if not equals or not _NAME.fullmatch(name.strip()):
        raise ValueError(f"arm {text!r}: expected NAME=MODEL [vllm serve flags]")
    words = shlex.split(rest)
    environment = []
    while words and re.match(r"[A-Z][A-Z0-9_]*=", words[0]):
        variable, _, value = words.pop(0).partition("=")
        environment.append((variable, value))
    if not words or words[0].startswith("-"):
        raise ValueError(f"arm {text!r}: names no model; expected NAME=MODEL [vllm serve flags]")
    return Arm(name.strip(), words[0], tuple(words[1:]), tuple(environment))


def check_model(model: str) -> None:
    """Refuse a model that is neither a folder nor could be a hub name (``owner/name``).

    A name in a folder that exists here is a folder's.

    Raises:
        ValueError: it names the model.
    """
    local = model.startswith((".", "/", "~")) or model.count("/") != 1
    if not Path(model).is_dir() and (local or Path(model).parent.is_dir()):
        raise ValueError(f"model {model}: no such folder; expected a checkpoint")
