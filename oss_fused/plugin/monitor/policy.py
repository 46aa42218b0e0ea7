# SPDX-License-Identifier: MIT
"""The file of layers that are served with 16-bit activations because they misbehaved in FP8.

The monitor adds layers while a server runs; the next start reads them. Activations are quantised
inside compiled and captured graphs, so a layer changes at once only with monitor_fallback="now"
(fallback.py).
"""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

from oss_fused.errors import SchemeError
from oss_fused.files import write_json

_KIND = "oss_fused.monitor_policy"


def bits16_layers(policy: str | None) -> dict[str, str]:
    """Name (as in vLLM's model) -> reason of each layer in the file; empty if there is none.

    Args:
        policy: the option monitor_policy.

    Raises:
        SchemeError: the file is no policy.
    """
    if not policy or not (path := Path(policy)).exists():
        return {}
    try:
        content = json.loads(path.read_text())
        layers = content["layers"]
        if content["kind"] != _KIND or not all(isinstance(v, str) for v in layers.values()):
            raise ValueError(f"kind={content['kind']!r}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SchemeError(
            f"monitor_policy={policy!r}: is no policy of the monitor ({error!r}); "
            f'expected {{"kind": "{_KIND}", "layers": {{name: reason}}}}'
        ) from None
    return dict(layers)


def add_layers(policy: str, layers: dict[str, str]) -> None:
    """Add ``layers`` to the file ``policy``; reasons that it has already stay.

    Ranks and servers may do so at once: none loses what another added.

    Raises:
        OSError: it cannot be written.
        SchemeError: it holds something else.
    """
    path = Path(policy)
    path.parent.mkdir(parents=True, exist_ok=True)
    # the file itself is replaced, so that the lock lies on one beside it
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = bits16_layers(policy)
        if not layers.keys() <= known.keys():
            write_json(path, {"kind": _KIND, "layers": layers | known})
