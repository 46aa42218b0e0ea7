# SPDX-License-Identifier: MIT
"""Fingerprint of the machine and the software under a measurement, for every result file."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from oss_fused import envs

PACKAGES = ("oss-fused", "vllm", "torch", "triton", "transformers", "safetensors", "numpy")
_GPU_FIELDS = ("name", "memory.total", "driver_version", "clocks.max.sm", "clocks.max.mem")
_GPU_STATE = ("clocks.sm", "clocks.mem", "power.limit", "temperature.gpu")
_ENV_PREFIXES = ("OSS_FUSED_", "VLLM_", "TRITON_", "CUDA_VISIBLE", "OMP_", "NCCL_")
# ends of the names of variables whose values stay out of result files
_SECRETS = ("_KEY", "_KEYS", "_TOKEN", "_SECRET", "_PASSWORD")


# at the start of a word, or behind the = of an option
_PATH = re.compile(r"(?<![^\s=])/[^\s]+")


def fingerprint() -> dict[str, Any]:
    """Everything needed to judge or repeat a measurement, as JSON-ready values.

    Keys: timestamp (UTC), command, commit, gpus (one dict each; empty without a GPU), cpu,
    memory_gib, platform, python, versions, oss_fused (its settings),
    environment (variables that matter).
    """
    return {
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": portable(sys.argv),
        "commit": commit(),
        "gpus": gpus(),
        "cpu": cpu_model(),
        "cpu_count": os.cpu_count(),
        "memory_gib": memory_gib(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES} | cuda_version(),
        "oss_fused": envs.snapshot(),
        "environment": {
            k: "set, not shown" if k.endswith(_SECRETS) else portable(v)
            for k, v in sorted(os.environ.items())
            if k.startswith(_ENV_PREFIXES)
        },
    }


def portable(value: Any) -> Any:
    """``value`` with each absolute path as its last part: a result is read on other machines."""
    if isinstance(value, dict):
        return {name: portable(part) for name, part in value.items()}
    if isinstance(value, list):
        return [portable(part) for part in value]
    return _PATH.sub(lambda found: Path(found[0]).name, value) if isinstance(value, str) else value


def version(package: str) -> str | None:
    """Installed version of ``package``, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        if package != "oss-fused":
            return None
    from oss_fused import __version__  # a bare checkout on PYTHONPATH

    return __version__


def cuda_version() -> dict[str, str | None]:
    """The CUDA version that torch was built with."""
    try:
        import torch
    except ImportError:
        return {"cuda": None}
    return {"cuda": torch.version.cuda}


def commit() -> str | None:
    """OSS_FUSED_COMMIT if set, else the checkout's, "-dirty" if tracked files differ."""
    if named := envs.get("OSS_FUSED_COMMIT"):
        # a copied checkout may hold newer files than its HEAD
        return named
    root = Path(__file__).resolve().parent.parent
    head = _output("git", "-C", str(root), "rev-parse", "HEAD")
    if head is None:
        return None
    dirty = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return head + ("-dirty" if dirty else "")


def gpus() -> list[dict[str, str]]:
    """Name, memory, driver, clocks, power limit and temperature of each NVIDIA GPU."""
    fields = (*_GPU_FIELDS, *_GPU_STATE)
    text = _output("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
    lines = text.splitlines() if text else []
    rows = [[cell.strip() for cell in line.split(",")] for line in lines]
    return [dict(zip(fields, row)) for row in rows if len(row) == len(fields)]


def gpu_used_mib() -> float:
    """Memory in use on all NVIDIA GPUs together, in MiB; 0 without one."""
    text = _output("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    return float(sum(int(line) for line in text.splitlines())) if text else 0.0


def has_gpu() -> bool:
    """Whether there is an NVIDIA GPU; makes no CUDA context in this process."""
    # a container may have the device without nvidia-smi
    return bool(gpus()) or Path("/dev/nvidia0").exists()


def cpu_model() -> str:
    """Marketing name of the processor."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def memory_gib() -> float:
    """Main memory in GiB."""
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def describe(environment: dict[str, Any]) -> str:
    """One line for a report: device, versions, commit."""
    devices = Counter(gpu["name"] for gpu in environment["gpus"])
    device = ", ".join(name if n == 1 else f"{n} x {name}" for name, n in devices.items())
    if devices.total() > 1:
        # a measurement may have used some of them
        device = f"host with {device}"
    device = device or f"{environment['cpu']} ({environment['cpu_count']} cores)"
    versions = environment["versions"]
    names = ("vllm", "torch", "triton", "oss-fused")
    software = ", ".join(f"{name} {versions[name]}" for name in names if versions.get(name))
    revision = (environment["commit"] or "unknown")[:12]
    if (environment["commit"] or "").endswith("-dirty"):
        revision += "-dirty"
    return f"{device}; {software}; commit {revision}; {environment['timestamp']}"


def _output(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
