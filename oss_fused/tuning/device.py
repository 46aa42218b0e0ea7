# SPDX-License-Identifier: MIT
"""What a device offers, as data: JSON files that prune the search before anything compiles."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from oss_fused.errors import SchemeError, UnsupportedDeviceError

FOLDER = Path(__file__).parent / "devices"


@dataclass(frozen=True)
class DeviceDescription:
    """Limits and nominal ceilings of one device; bytes, bytes/s * 1e9 and FLOP/s * 1e12."""

    name: str
    match: tuple[str, ...]
    compute_capability: tuple[int, int]
    num_sms: int
    warp_size: int
    shared_memory_per_block: int
    registers_per_sm: int
    registers_per_thread: int
    max_threads_per_sm: int
    vector_width_bytes: int
    l2_bytes: int
    memory_bandwidth_gbps: float
    peak_tflops: dict[str, float]
    launch_overhead_us: float

    @classmethod
    def from_json(cls, path: Path) -> DeviceDescription:
        """Read one description.

        Raises:
            SchemeError: not JSON, an unknown or missing field, or a limit that is not positive;
                names the file.
        """
        try:
            raw: dict[str, Any] = json.loads(path.read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise SchemeError(f"{path}: not a readable JSON file ({error})") from error
        names = {field.name for field in fields(cls)}
        if not isinstance(raw, dict) or raw.keys() != names:
            keys = set(raw) if isinstance(raw, dict) else set()
            raise SchemeError(
                f"{path}: missing fields {sorted(names - keys)}, unknown {sorted(keys - names)}"
            )
        raw["match"] = tuple(raw["match"])
        raw["compute_capability"] = tuple(raw["compute_capability"])
        for name, value in raw.items():
            if isinstance(value, int | float) and value <= 0:
                raise SchemeError(f"{path}: {name}={value}: expected a positive number")
        return cls(**raw)


def available_descriptions() -> dict[str, DeviceDescription]:
    """Every packaged description by name."""
    return {p.stem: DeviceDescription.from_json(p) for p in sorted(FOLDER.glob("*.json"))}


def load_description(name_or_path: str) -> DeviceDescription:
    """A packaged description by name (``h200``), or one from a JSON file.

    Raises:
        SchemeError: neither a packaged name nor a readable description.
    """
    packaged = FOLDER / f"{name_or_path.lower()}.json"
    if packaged.is_file():
        return DeviceDescription.from_json(packaged)
    if Path(name_or_path).suffix == ".json":
        return DeviceDescription.from_json(Path(name_or_path))
    known = ", ".join(sorted(p.stem for p in FOLDER.glob("*.json")))
    raise SchemeError(f"device={name_or_path!r}: expected one of {known}, or a .json file")


def describe(device: torch.device | str) -> DeviceDescription | None:
    """The packaged description of a CUDA device, adjusted to its own limits; None on a CPU.

    An unknown GPU gets the description of the nearest older architecture with the limits that the
    driver reports.

    Raises:
        UnsupportedDeviceError: no packaged description is as old as this GPU.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return match_description(properties.name, (properties.major, properties.minor))


def match_description(gpu_name: str, capability: tuple[int, int]) -> DeviceDescription:
    """The description whose ``match`` is in ``gpu_name``, else the nearest older architecture.

    Raises:
        UnsupportedDeviceError: none is as old as ``capability``.
    """
    real = [d for d in available_descriptions().values() if d.match]
    # the longest match wins: "H100" is no part of "H200", but "A100" could be of a longer name
    named = [(len(m), d.name, d) for d in real for m in d.match if m.lower() in gpu_name.lower()]
    if named:
        return max(named, key=lambda item: item[:2])[2]
    older = [d for d in real if d.compute_capability <= capability]
    if not older:
        raise UnsupportedDeviceError(
            f"device={gpu_name!r}, capability={capability}: expected at least (8, 0)"
        )
    return max(older, key=lambda d: (d.compute_capability, -d.shared_memory_per_block))
