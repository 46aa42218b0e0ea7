# SPDX-License-Identifier: MIT
"""Where and how a calibration run happens, checked before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from oss_fused.errors import OssFusedError
from oss_fused.kernels.checks import check_device
from oss_fused.quant.checkpoint.place import check_apart, check_replaceable, real
from oss_fused.quant.dataset import PYTHON
from oss_fused.quant.recipe import Recipe


@dataclass(frozen=True)
class RunOptions:
    """Where and how a run happens; nothing here changes the numbers of the result.

    Attributes:
        model: source folder.
        adapter: folder of a LoRA adapter that is merged into it, None without.
        output: folder to make.
        device: of the arithmetic.
        resume: go on with an interrupted run of the same settings.
        overwrite: replace an existing output folder once the new one is complete.
        max_shard_bytes: upper size of a shard.
        stage: where a run with an accuracy target keeps the checkpoint with everything in FP8, for
            other targets; None drops it.
        kept: what the user calls it -> a file that the output must not replace.
    """

    model: Path
    output: Path
    device: str = "cpu"
    resume: bool = False
    overwrite: bool = False
    max_shard_bytes: int = 5_000_000_000
    stage: Path | None = None
    adapter: Path | None = None
    kept: Mapping[str, Path] = field(default_factory=dict)


def pick_device(name: str) -> torch.device:
    """The device called ``name``: "auto" takes the GPU where there is one.

    Raises:
        OssFusedError: the device is unknown or absent.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return check_device(name)
    except OssFusedError as error:
        raise OssFusedError(f"--{error}, or 'auto'") from None


def check_output(options: RunOptions, recipe: Recipe) -> None:
    """Refuse places for output and stage that hold something that a run must not replace.

    Raises:
        CheckpointError: the output exists (without overwrite) or is no output of calibration; or
            output or stage contains or lies in the source, or contains another file of the user.
    """
    output, stage = real(options.output), options.stage
    files = dict(options.kept)
    if recipe.dataset is not None and recipe.dataset != PYTHON:
        files["--dataset"] = Path(recipe.dataset)
    folders = {"MODEL": options.model}
    if options.adapter is not None:
        folders["--adapter"] = options.adapter
    if recipe.base is not None:
        folders["--base"] = Path(recipe.base)
    flag = f"--output={str(options.output)!r}"
    check_apart(output, flag, folders | ({} if stage is None else {"--fp8-stage": stage}), files)
    if stage is not None:
        check_apart(real(stage), f"--fp8-stage={str(stage)!r}", folders, files)
    check_replaceable(output, flag, options.overwrite)
