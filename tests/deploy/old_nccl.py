# SPDX-License-Identifier: MIT
"""vLLM with an NCCL older than it asks for.

vLLM 0.32 asks for NCCL 2.29.7, for two functions that only a sleeping engine calls, and silently
gives its own communicator up without them. ``offer`` makes vLLM's processes do without those two.
"""

from __future__ import annotations

import os
from pathlib import Path

_LATE = ("ncclCommSuspend", "ncclCommResume")


def offer(folder: Path) -> str:
    """Have vLLM load ``install`` as a plugin where NCCL is too old; what is done, for a report."""
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    try:
        return f"NCCL {NCCLLibrary().ncclGetVersion()}"
    except OSError as error:
        return f"no NCCL: {error}"
    except AttributeError:
        install()
    info = folder / "old_nccl-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: old-nccl\nVersion: 0\n")
    entry = f"old_nccl = {__name__}:install"
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{entry}\n")
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return f"NCCL {NCCLLibrary().ncclGetVersion()}, without {' and '.join(_LATE)} of 2.29.7"


def install() -> None:
    """Take the two functions off those that vLLM loads."""
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    known = NCCLLibrary.exported_functions
    NCCLLibrary.exported_functions = [f for f in known if f.name not in _LATE]
