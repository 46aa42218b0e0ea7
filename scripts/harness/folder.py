# SPDX-License-Identifier: MIT
"""A folder that appears complete or not at all, and a writer of safetensors shards into it."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch
from safetensors.torch import save_file

from oss_fused.errors import CheckpointError
from oss_fused.files import write_json

INDEX = "model.safetensors.index.json"


@contextmanager
def atomic_folder(output: Path) -> Iterator[Path]:
    """Yield a scratch folder beside ``output``; rename it to ``output`` when the block succeeds.

    On any exception (Ctrl-C and a full disk included) the scratch folder is removed.

    Raises:
        CheckpointError: ``output`` exists, its parent cannot be written, or writing failed.
    """
    if output.is_symlink() or (output.exists() and (not output.is_dir() or any(output.iterdir()))):
        raise CheckpointError(f"output {output}: exists already; remove it or choose another")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{output.name}.partial-", dir=output.parent))
    except OSError as error:
        raise CheckpointError(f"output {output}: cannot create it: {error}") from error
    try:
        yield scratch
        scratch.chmod(0o755)
        for file in scratch.iterdir():  # safetensors makes files that only the owner can read
            file.chmod(0o644)
        if output.exists():  # an empty folder, checked above
            output.rmdir()
        scratch.rename(output)
    except BaseException as error:
        shutil.rmtree(scratch, ignore_errors=True)
        # safetensors and tokenizers report a full disk with exceptions of their own
        own = type(error).__name__ == "SafetensorError" or "(os error " in str(error)
        if own or isinstance(error, OSError):
            raise CheckpointError(f"output {output}: writing failed: {error}") from error
        raise


def missing_files(folder: Path) -> list[str]:
    """Files that a checkpoint in ``folder`` lacks: config, weights (per index) and tokenizer."""
    wanted = ["config.json", "tokenizer_config.json"]
    index = folder / INDEX
    if index.is_file():
        wanted += sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        wanted.append("model.safetensors")
    return [name for name in wanted if not (folder / name).is_file()]


class ShardWriter:
    """Writes one safetensors file per group of tensors, a few at a time in the background.

    Memory holds at most ``in_flight`` groups. Leaving the ``with`` block waits for the writes,
    gives the shards their final names and writes the index.

    Args:
        folder: where the shards go.
        in_flight: groups being written at once.
    """

    def __init__(self, folder: Path, in_flight: int = 2) -> None:
        """See the class."""
        self.folder = folder
        self.in_flight = in_flight
        self._pool = ThreadPoolExecutor(max_workers=in_flight)
        self._pending: list[Future[None]] = []
        self._names: list[list[str]] = []
        self.total_bytes = 0
        self.total_parameters = 0

    def add(self, tensors: dict[str, torch.Tensor]) -> None:
        """Queue a group of tensors (on any device) as the next shard."""
        while len(self._pending) >= self.in_flight:
            self._pending.pop(0).result()
        path = self.folder / f"shard-{len(self._names):05d}"
        self._names.append(list(tensors))
        self.total_bytes += sum(t.numel() * t.element_size() for t in tensors.values())
        self.total_parameters += sum(t.numel() for t in tensors.values())
        # to the host here, in order: the device is free for the next group at once
        host = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
        self._pending.append(self._pool.submit(save_file, host, path, {"format": "pt"}))

    def __enter__(self) -> ShardWriter:
        """Nothing to set up."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for the writes; after success name the shards and write the index."""
        try:
            if kind is None:
                for future in self._pending:
                    future.result()
        finally:
            self._pool.shutdown(wait=True, cancel_futures=True)
        if kind is None:
            self._finish()

    def _finish(self) -> None:
        count = len(self._names)
        if count == 1:
            (self.folder / "shard-00000").rename(self.folder / "model.safetensors")
            return
        weight_map = {}
        for number, names in enumerate(self._names):
            final = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            (self.folder / f"shard-{number:05d}").rename(self.folder / final)
            weight_map.update(dict.fromkeys(names, final))
        metadata = {"total_parameters": self.total_parameters, "total_size": self.total_bytes}
        write_json(self.folder / INDEX, {"metadata": metadata, "weight_map": weight_map})
